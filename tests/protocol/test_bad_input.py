"""What users get wrong: each a clear error that says what and where, with nothing written or changed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import CheckpointNotFoundError, ConfigError, OutOfStepError, StateDictError, UnknownSchemeError
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors
from tests.slack import within


def template():
    return {"w": torch.full((4,), float("nan")), "step": -1}


def untouched(state):
    return bool(state["w"].isnan().all()) and state["step"] == -1


def load_failure(place, **options) -> CheckpointException:
    """How a load of two ranks fails: alike on both, both templates untouched."""
    templates = [template(), template()]
    outcomes = ThreadRanks(2).load(templates, place, **options)
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes), outcomes
    assert str(outcomes[0]) == str(outcomes[1])
    assert all(untouched(state) for state in templates)
    return outcomes[0]


def save_failure(place, state_of) -> CheckpointException:
    outcomes = ThreadRanks(2).save(state_of, place)
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes), outcomes
    assert str(outcomes[0]) == str(outcomes[1])
    return outcomes[0]


def test_no_such_checkpoint(tmp_path):
    error = load_failure(tmp_path / "nowhere")
    assert isinstance(error.__cause__, CheckpointNotFoundError)
    assert str(tmp_path / "nowhere") in str(error)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_was_never_committed(tmp_path):
    dcp.save({"w": torch.ones(4), "step": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / ".metadata").unlink()
    error = load_failure(tmp_path / "c")
    assert isinstance(error.__cause__, CheckpointNotFoundError)
    assert "before its commit" in str(error)


def test_a_root_in_place_of_a_checkpoint(tmp_path):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "step-00000007", no_dist=True)
    assert "step-00000007" in str(load_failure(tmp_path))


@pytest.mark.parametrize("direction", ["save", "load"])
def test_a_file_where_a_folder_should_be(tmp_path, direction):
    (tmp_path / "c").write_text("precious")
    if direction == "load":
        error = load_failure(tmp_path / "c")
    else:
        error = save_failure(tmp_path / "c", lambda rank: {"w": torch.ones(4)})
    assert str(tmp_path / "c") in str(error)
    assert "file" in str(error)
    assert (tmp_path / "c").read_text() == "precious"


@pytest.mark.parametrize("place", ["hdfsx://host/c", Path("s3://bucket/c"), "", "s3:/bucket/c", 5, Path("")], ids=repr)
@pytest.mark.parametrize("calls", [dcp.save, dcp.async_save, dcp.load])
def test_what_is_no_place_is_refused_on_all_ranks(tmp_path, monkeypatch, calls, place):
    monkeypatch.chdir(tmp_path)
    ranks = ThreadRanks(2)
    errors = ranks.run(
        lambda rank: calls({"w": torch.ones(4)}, checkpoint_id=place, group=ThreadGroup(ranks, rank)),
    )
    for error in errors:
        assert isinstance(error, CheckpointException)
        assert isinstance(error.__cause__, UnknownSchemeError if ":/" in str(place) else ConfigError)
        assert "s3://" in str(error) or "pass" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_no_permission(tmp_path):
    """As an ordinary user, in a process of its own: tests may run as root, whom nothing is forbidden."""
    (tmp_path / "theirs").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    code = (
        "import os, sys, torch, ray_dcp as dcp\n"
        "dcp.save({'w': torch.ones(4)}, checkpoint_id='memory://loads-every-module', no_dist=True)\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: dcp.save({'w': torch.ones(4)}, checkpoint_id=sys.argv[1], no_dist=True)\n"
        "except dcp.CheckpointException as error: print(type(error.__cause__).__name__, error)\n"
    )
    place = tmp_path / "theirs" / "c"
    ran = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=within(120))
    assert ran.stdout.startswith("StorePermissionError"), ran.stdout + ran.stderr
    assert str(place) in ran.stdout
    assert list((tmp_path / "theirs").iterdir()) == []


def test_different_checkpoint_ids(tmp_path):
    ranks = ThreadRanks(2)
    places = [tmp_path / "a", tmp_path / "b"]
    outcomes = ranks.run(lambda rank: ranks.save_rank(rank, {"w": torch.ones(4)}, places[rank]))
    for outcome in outcomes:
        assert isinstance(outcome.__cause__, OutOfStepError)
        assert f"save of {tmp_path}/a" in str(outcome)
        assert f"save of {tmp_path}/b" in str(outcome)
    assert list(tmp_path.iterdir()) == []


def test_what_ranks_save_after_one_has_forgotten_a_save_is_whole(tmp_path):
    ranks = ThreadRanks(2)

    def save(rank: int, step: int) -> object:
        try:
            return ranks.save_rank(rank, {f"of rank {rank}": torch.full((3,), float(step))}, tmp_path / f"step-{step}")
        except CheckpointException as error:
            return error.__cause__

    def save_steps(rank: int) -> list[object]:
        return [save(rank, step) for step in (1, 2, 3)[rank:]]

    (first, second, third), (ahead, met) = ranks.run(save_steps)
    assert type(first) is type(second) is type(ahead) is OutOfStepError
    require_no_errors([third, met])
    found = [{f"of rank {rank}": torch.full((3,), torch.nan)} for rank in (0, 1)]
    require_no_errors(ranks.load(found, tmp_path / "step-3"))
    assert all(torch.equal(value, torch.full((3,), 3.0)) for state in found for value in state.values())
    assert not (tmp_path / "step-1").exists()


def test_one_rank_may_have_nothing_to_save(tmp_path):
    outcomes = ThreadRanks(2).save(lambda rank: {"w": torch.ones(4)} if rank else {}, tmp_path / "c")
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes)


def test_a_value_that_cannot_be_pickled(tmp_path):
    state = {"w": torch.ones(4), "good": [1], "bad": {"lock": threading.Lock()}, "worse": lambda: 0}
    error = save_failure(tmp_path / "c", lambda rank: state if rank == 1 else {"w": torch.ones(4)})
    assert error.failed_ranks == (1,)
    assert error.phase == "plan"
    assert "bad.lock" in str(error)
    assert "worse" in str(error)
    assert "good" not in str(error)
    assert list(tmp_path.iterdir()) == []


def test_everything_wrong_with_a_template_is_told_at_once(tmp_path):
    saved = {"w": torch.ones(4), "n": torch.ones(2, dtype=torch.int64), "p": 5, "extra": torch.ones(1)}
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    wrong = {
        "w": torch.full((2, 2), 7.0),
        "n": torch.full((2,), 7, dtype=torch.int8),
        "p": torch.full((1,), 7.0),
        "extra": "a string",
        "absent": torch.full((1,), 7.0),
    }
    outcomes = ThreadRanks(2).load([dict(wrong), {"w": torch.full((4,), 7.0)}], tmp_path / "c")
    problems = outcomes[1].__cause__.problems
    assert len(problems) == 5
    for name, words in {"w": "shape (4,)", "n": "torch.int64", "p": "Python object", "extra": "a tensor"}.items():
        assert any(p.startswith(f"{name}:") and words in p and "(rank 0)" in p for p in problems)
    assert any(p.startswith("absent: Missing key: not in the checkpoint") for p in problems)
    assert all(bool((value == 7).all()) for value in wrong.values() if isinstance(value, torch.Tensor))


def test_strict_false_loads_the_rest_and_exact_refuses_what_nobody_wants(tmp_path):
    dcp.save({"w": torch.ones(4), "a": 1, "b": 2}, checkpoint_id=tmp_path / "c", no_dist=True)
    partial = {"w": torch.zeros(4), "absent": 3}
    (report,) = ThreadRanks(1).load([partial], tmp_path / "c", strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (("w",), ("absent",), ("a", "b"))
    assert partial["absent"] == 3
    # Two ranks, each with a part: together they want all but b.
    outcomes = ThreadRanks(2).load([{"w": torch.zeros(4)}, {"a": 0}], tmp_path / "c", strict="exact")
    assert outcomes[0].__cause__.problems == ('b: in the checkpoint, but not in the template (strict="exact")',)


def test_cast_converts_only_when_asked(tmp_path):
    dcp.save({"w": torch.tensor([1.5, 300.0])}, checkpoint_id=tmp_path / "c", no_dist=True)
    half = {"w": torch.zeros(2, dtype=torch.float16)}
    (refused,) = ThreadRanks(1).load([half], tmp_path / "c")
    assert "cast=True" in str(refused)
    ThreadRanks(1).load([half], tmp_path / "c", cast=True)
    assert half["w"].tolist() == [1.5, 300.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hole_is_refused_when_saving(tmp_path, world_size):
    def with_a_hole(rank):
        rows = {(2 * rank, 0): torch.ones(2, 3)} if rank < 1 or world_size > 2 else {}
        return {"t": LocalShards((4, 3), rows)}

    outcomes = ThreadRanks(world_size).save(with_a_hole, tmp_path / "c")
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException)
        assert "t" in str(outcome)
    assert not tmp_path.joinpath("c").exists() or list(tmp_path.joinpath("c").iterdir()) == []


def test_ranks_that_mean_different_things_by_one_name(tmp_path):
    def disagreeing(rank):
        return {"w": torch.ones(4 + rank), "v": torch.ones(2, dtype=torch.float32 if rank else torch.float64)}

    error = save_failure(tmp_path / "c", disagreeing)
    assert isinstance(error.__cause__, StateDictError)
    assert [p.split(":")[0] for p in error.__cause__.problems] == ["v", "w"]
    assert "rank 0 has a tensor of shape (4,)" in str(error)


@pytest.mark.parametrize(
    ("call", "setting"),
    [
        (lambda place: dcp.save({"a": 1}, no_dist=True), "checkpoint_id"),
        (lambda place: dcp.load({"a": 1}, no_dist=True), "checkpoint_id"),
        (lambda place: dcp.save({"a": 1}, checkpoint_id=place, no_dist=True, use_collectives=False), "use_collectives"),
        (lambda place: dcp.load({"a": 1}, checkpoint_id=place, no_dist=True, strict="exactly"), "strict"),
    ],
)
def test_bad_arguments_name_the_setting(tmp_path, call, setting):
    with pytest.raises(CheckpointException) as caught:
        call(tmp_path / "c")
    assert isinstance(caught.value.__cause__, ConfigError)
    assert caught.value.__cause__.setting == setting


def test_a_list_in_place_of_a_state_dict(tmp_path):
    with pytest.raises(CheckpointException, match="state_dict is a list"):
        dcp.save([torch.ones(2)], checkpoint_id=tmp_path / "c", no_dist=True)


REFUSED_BEFORE_THE_CALL = {
    "checkpoint_id of save": lambda group, root: dcp.save({"w": torch.ones(4)}, checkpoint_id=5, group=group),
    "checkpoint_id of load": lambda group, root: dcp.load(template(), checkpoint_id=5.5, group=group),
    "metrics": lambda group, root: dcp.CheckpointManager(root, group=group).save(1, {}, metrics={"loss": object()}),
    "step of save": lambda group, root: dcp.CheckpointManager(root, group=group).async_save("1", {}),
    "step of load": lambda group, root: dcp.CheckpointManager(root, group=group).load(template(), step="1"),
}


@pytest.mark.parametrize("argument", REFUSED_BEFORE_THE_CALL)
def test_an_argument_that_one_rank_refuses_is_told_to_the_others(tmp_path, argument):
    ranks = ThreadRanks(2)
    groups = [ThreadGroup(ranks, rank) for rank in range(2)]

    def on_rank(rank):
        if rank == 1:
            return REFUSED_BEFORE_THE_CALL[argument](groups[rank], tmp_path)
        if "load" in argument:
            return dcp.load(template(), checkpoint_id=tmp_path / "c", group=groups[rank])
        return dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c", group=groups[rank])

    other, refusing = ranks.run(on_rank)
    assert isinstance(other, CheckpointException)
    assert (other.failed_ranks, other.phase) == ((1,), "collect")
    assert isinstance(refusing, TypeError | ValueError)
    own = refusing.__cause__ if isinstance(refusing, CheckpointException) else refusing
    assert type(own).__name__ in str(other)
    state = {"w": torch.ones(4)}
    saved = ranks.run(lambda rank: dcp.save(state, checkpoint_id=tmp_path / "c", group=groups[rank]))
    assert not any(isinstance(outcome, BaseException) for outcome in saved)


def test_a_python_value_that_must_not_be_loaded_leaves_all_others_alone(tmp_path):
    place = tmp_path / "c"
    dcp.save({"a": {"x": 1}, "z": Unlisted(), "n": [1]}, checkpoint_id=place, no_dist=True)
    filled = {"a": {"x": 0}, "z": None, "n": None}
    (refused,) = ThreadRanks(1).load([filled], place)
    assert "trusted=True" in str(refused)
    assert filled == {"a": {"x": 0}, "z": None, "n": None}
    dcp.load(filled, checkpoint_id=place, no_dist=True, trusted=True)
    assert (filled["a"], type(filled["z"]), filled["n"]) == ({"x": 1}, Unlisted, [1])


class Unlisted:
    """A class outside the allow-list."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("library", [torch_dcp, dcp], ids=["torch", "ray_dcp"])
@pytest.mark.parametrize("place", [None, "", "nosuchscheme://bucket/c"], ids=["no place", "empty", "unknown scheme"])
def test_a_place_that_is_none_can_be_caught_as_what_torch_raises(library, place):
    with pytest.raises(RuntimeError):
        library.save({"a": 1}, checkpoint_id=place)
    with pytest.raises(RuntimeError):
        library.load({"a": 1}, checkpoint_id=place)


@pytest.mark.parametrize(
    "calls",
    [
        lambda place, group: dcp.save({"w": torch.ones(4)}, checkpoint_id=place, group=group),
        lambda place, group: dcp.async_save({"w": torch.ones(4)}, checkpoint_id=place, group=group),
        lambda place, group: dcp.load({"w": torch.ones(4)}, checkpoint_id=place, group=group),
        lambda place, group: dcp.save({"w": torch.ones(4)}, storage_writer=dcp.StoreWriter(place), group=group),
        lambda place, group: dcp.CheckpointManager(place, group=group).save(1, {"w": torch.ones(4)}),
        lambda place, group: dcp.CheckpointManager(place, group=group).load({"w": torch.ones(4)}),
    ],
)
def test_the_ranks_of_a_group_are_told_that_memory_is_of_one_process(calls):
    ranks = ThreadRanks(2)
    for error in ranks.run(lambda rank: calls("memory://of-one/run", ThreadGroup(ranks, rank))):
        assert isinstance(error, CheckpointException)
        assert "memory://of-one/run is of one process" in str(error).replace("/step-00000001", "")
        assert "no_dist=True" in str(error)


def test_what_another_process_saved_in_memory_is_not_said_to_be_missing_without_a_word():
    with pytest.raises(
        CheckpointException, match=r"memory:// is of one process: what another one \(a rank, an actor\)"
    ):
        dcp.load(template(), checkpoint_id="memory://saved-by-an-actor/step-00000001", no_dist=True)


class OvertakenWriter(dcp.StoreWriter):
    """Another process, which has no group either, saves the same id while this one writes."""

    def write_data(self, plan, planner):
        dcp.save({"w": torch.zeros(4)}, checkpoint_id=self.checkpoint_id, no_dist=True)
        return super().write_data(plan, planner)


def test_processes_without_a_group_that_save_one_id_are_told_that_each_saves_alone(tmp_path):
    with pytest.raises(
        CheckpointException, match=r"No group here, so this process saved alone: .*RankGroup\.join"
    ) as caught:
        dcp.save({"w": torch.ones(4)}, storage_writer=OvertakenWriter(tmp_path / "c"), no_dist=True)
    assert caught.value.__cause__.world_size == 1
    with pytest.raises(CheckpointException, match="No group here, so this process saves alone") as caught:
        dcp.save({"w": LocalShards((4,), {(2,): torch.ones(2)})}, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert "w: no rank has elements 0:2" in str(caught.value)
    for error in ThreadRanks(2).save(
        lambda rank: {"w": LocalShards((6,), {(2 * rank,): torch.ones(2)})}, tmp_path / "g"
    ):
        assert "No group here" not in str(error)


NO_PLUG_INS = {
    "storage_writer": lambda place, group: dcp.save({"w": torch.ones(4)}, storage_writer=place, group=group),
    "storage_reader": lambda place, group: dcp.load({"w": torch.ones(4)}, storage_reader=place, group=group),
    "save's planner": lambda place, group: dcp.save({}, checkpoint_id=place, planner=place, group=group),
    "load's planner": lambda place, group: dcp.load(template(), checkpoint_id=place, planner=place, group=group),
}


@pytest.mark.parametrize("argument", NO_PLUG_INS)
def test_what_one_rank_passes_that_is_no_plug_in_is_told_to_the_others(tmp_path, argument):
    place = str(tmp_path / "c")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=place, no_dist=True)
    ranks = ThreadRanks(2)

    def on_rank(rank):
        group = ThreadGroup(ranks, rank)
        if rank == 1:
            return NO_PLUG_INS[argument](place, group)
        if "save" in argument or "writer" in argument:
            return dcp.save({"w": torch.ones(4)}, checkpoint_id=place, group=group)
        return dcp.load({"w": torch.zeros(4)}, checkpoint_id=place, group=group)

    for outcome in ranks.run(on_rank):
        assert isinstance(outcome, CheckpointException)
        assert 0 not in outcome.failed_ranks
