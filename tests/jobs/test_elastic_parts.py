"""The parts of the elastic job, in one process and without Ray."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic.board import SaveReturned, StepDone, WorkerStarted
from elastic.corpus import Windows, standard_library_bytes
from elastic.gpt import GptShape
from elastic.learner import Course, Learner, uninterrupted_losses
from elastic.record import Resume, RunRecord
from elastic.story import choose_victim
from elastic_train import main

import ray_dcp as dcp

SMALL = Course(num_steps=12, num_warmup_steps=3, shape=GptShape(num_layers=1, width=32, context=16))
CPU = torch.device("cpu")


def started(group: str, rank: int, world_size: int, resumed_step: int = 0, node: str = "n1") -> WorkerStarted:
    return WorkerStarted(group, rank, world_size, node, 100 + rank, resumed_step, 0.0)


def test_the_samples_are_the_text_cut_in_pieces() -> None:
    text = standard_library_bytes()
    windows = Windows(text, 16)
    inputs, targets = windows.batch([0, 1, len(windows) - 1])
    assert torch.equal(torch.cat([inputs[0], inputs[1]]), text[:32].long())
    assert torch.equal(targets[0], text[1:17].long())
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_learner_that_resumes_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    expected = uninterrupted_losses(SMALL)
    first = Learner(SMALL, CPU)
    losses = [first.train_one_step() for _ in range(5)]
    dcp.save({"learner": first.state}, checkpoint_id=tmp_path / "five", no_dist=True)
    second = Learner(SMALL, CPU)
    dcp.load({"learner": second.state}, checkpoint_id=tmp_path / "five", no_dist=True)
    assert second.step == 5
    assert second._schedule.get_last_lr() == first._schedule.get_last_lr()
    assert [group["lr"] for group in second._optimizer.param_groups] == first._schedule.get_last_lr()
    losses += [second.train_one_step() for _ in range(7)]
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    dcp.save({"learner": Learner(SMALL, CPU).state}, checkpoint_id=tmp_path / "seed-0", no_dist=True)
    other = Learner(Course(seed=1, shape=SMALL.shape), CPU)
    with pytest.raises(dcp.CheckpointException, match="seed 0"):
        dcp.load({"learner": other.state}, checkpoint_id=tmp_path / "seed-0", no_dist=True)


DROPPING = replace(SMALL, shape=replace(SMALL.shape, dropout=0.2))


def test_with_dropout_a_learner_resumes_to_the_last_bit(tmp_path: Path) -> None:
    expected = uninterrupted_losses(DROPPING)
    first = Learner(DROPPING, CPU)
    losses = [first.train_one_step() for _ in range(5)]
    dcp.save({"learner": first.state}, checkpoint_id=tmp_path, no_dist=True)
    second = Learner(DROPPING, CPU)
    torch.manual_seed(12345)
    dcp.load({"learner": second.state}, checkpoint_id=tmp_path, no_dist=True)
    losses += [second.train_one_step() for _ in range(7)]
    assert losses == expected
    assert losses != uninterrupted_losses(SMALL)


def test_every_sample_is_seen_once_whatever_number_of_workers_there_is(tmp_path: Path) -> None:
    """One process acts for all workers of a size in turn; checkpoints carry the position on."""
    course = replace(SMALL, sequences_per_step=12)
    seen: list[int] = []
    for number, (world_size, num_steps) in enumerate(((4, 3), (2, 2), (3, 4), (1, 2))):
        learners = [Learner(course, CPU, rank=rank, world_size=world_size) for rank in range(world_size)]
        for learner in learners if number else ():
            dcp.load({"learner": learner.state}, checkpoint_id=tmp_path / str(number - 1), no_dist=True)
        for _ in range(num_steps):
            batches = [next(learner._batches) for learner in learners]
            assert {len(batch) for batch in batches} == {12 // world_size}
            seen += [sample for batch in batches for sample in batch]
        dcp.save({"learner": learners[0].state}, checkpoint_id=tmp_path / str(number), no_dist=True)
    whole = Learner(course, CPU)
    assert [seen[i : i + 12] for i in range(0, len(seen), 12)] == [next(whole._batches) for _ in range(11)]
    assert len(set(seen)) == len(seen) == 11 * 12


@pytest.mark.parametrize("forgotten", ["optim", "scheduler", "data"])
def test_the_tolerance_tells_when_a_part_of_the_state_is_lost(forgotten: str) -> None:
    """Else the job would pass whatever a checkpoint held."""
    expected = uninterrupted_losses(SMALL)
    first = Learner(SMALL, CPU)
    losses = [first.train_one_step() for _ in range(5)]
    kept = first.state.state_dict()
    second = Learner(SMALL, CPU)
    fresh = Learner(SMALL, CPU).state.state_dict()
    second.state.load_state_dict(kept | {forgotten: fresh[forgotten]})
    losses += [second.train_one_step() for _ in range(7)]
    record = RunRecord()
    record.add(StepDone("a", 1, number, loss, 0.0) for number, loss in enumerate(losses, start=1))
    assert record.compare(expected, tolerance=1e-4).steps_off


def test_what_a_resume_cost_is_read_off_the_notes() -> None:
    record = RunRecord()
    record.add([started("a", 0, 2), started("a", 1, 2)])
    record.add(StepDone("a", 2, step, 1.0, at=float(step)) for step in (1, 2, 3, 4, 5))
    record.add([SaveReturned("a", 4, 0.1, 4.5), started("gone at once", 0, 1, 4)])
    record.add([started("b", 0, 1, 4)])
    record.add(StepDone("b", 1, step, 1.0, at=10.0 + step) for step in (5, 6))
    assert record.resumes == [
        Resume(step=4, workers_before=2, workers=1, seconds=10.0, steps_repeated=1),
    ]
    assert record.last_step is not None
    assert record.last_step.step == 6


def test_a_step_that_is_repeated_on_as_many_workers_must_be_the_same_to_the_last_bit() -> None:
    record = RunRecord()
    record.add(StepDone("a", 2, step, loss, at=0.0) for step, loss in ((1, 1.0), (2, 1.0), (3, 1.0)))
    record.add(StepDone("b", 2, step, loss, at=0.0) for step, loss in ((2, 1.0), (3, 1.0 + 1e-9)))
    record.add([StepDone("c", 1, 3, 1.0, at=0.0)])
    assert record.compare([1.0] * 3, tolerance=1e-3).matches
    comparison = record.compare([1.0] * 3, tolerance=1e-3, exact_repeats=True)
    assert comparison.steps_unlike == (3,)
    assert not comparison.matches


@pytest.mark.parametrize("loss", [1.1, math.nan, math.inf])
def test_one_loss_that_is_off_is_found_though_it_was_repeated_rightly(loss: float) -> None:
    record = RunRecord()
    record.add(StepDone("a", 2, step, found, at=0.0) for step, found in ((1, 1.0), (2, loss)))
    record.add([StepDone("b", 2, 2, 1.0, at=0.0)])
    comparison = record.compare([1.0, 1.0, 1.0], tolerance=1e-3)
    assert comparison.steps_off == (2,)
    assert comparison.steps_missing == (3,)
    assert not comparison.matches


def test_the_victim_is_not_on_the_node_that_watches() -> None:
    workers = [started("a", rank, 3, node=node) for rank, node in enumerate(["n1", "n2", "head"])]
    assert choose_victim(workers, spare_node_id="head").rank == 1
    assert choose_victim(workers[2:], spare_node_id="head").rank == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0", "2"],
        ["--workers", "3", "2"],
        ["--workers", "2", "2"],
        ["--workers", "1", "5"],
        ["--sequences", "0"],
        ["--steps", "10"],
        ["--checkpoint-every", "0"],
        ["--use-gpu"],
        ["--kill", "never"],
        ["--dropout", "1"],
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err
