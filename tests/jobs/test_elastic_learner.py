"""The learner of the elastic job on several ranks, with FSDP2 and dropout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ray_dcp as dcp
from tests.interop import layouts

pytestmark = pytest.mark.ray
JOBS = Path(__file__).parents[2] / "jobs"


def learner(rank: int, world_size: int) -> Any:
    sys.path.insert(0, str(JOBS))
    import torch
    from elastic.gpt import GptShape
    from elastic.learner import Course, Learner

    shape = GptShape(num_layers=1, width=32, context=16, dropout=0.2)
    return Learner(Course(num_steps=12, shape=shape), torch.device("cpu"), rank=rank, world_size=world_size)


def steps(one: Any, num_steps: int) -> tuple[list[float], list[list[int]]]:
    """The losses, and which samples this rank had."""
    had: list[list[int]] = []
    batches = one._batches
    one._batches = iter(lambda: had.append(next(batches)) or had[-1], None)
    return [one.train_one_step() for _ in range(num_steps)], had


def train_save_and_resume(rank: int, folder: Path) -> tuple[Any, Any, Any]:
    """Six steps, and three of them again from the checkpoint of the third."""
    first = learner(rank, 2)
    before = steps(first, 3)
    dcp.save({"learner": first.state}, checkpoint_id=folder)
    expected = steps(first, 3)
    second = learner(rank, 2)
    dcp.load({"learner": second.state}, checkpoint_id=folder)
    return before, expected, steps(second, 3)


def resume_alone(rank: int, folder: Path) -> tuple[list[float], list[list[int]]]:
    one = learner(0, 1)
    dcp.load({"learner": one.state}, checkpoint_id=folder, no_dist=True)
    assert one.step == 3
    return steps(one, 3)


def test_a_resumed_learner_is_exact_on_as_many_ranks_and_sees_the_same_samples_on_fewer(
    ranks: Any, tmp_path: Path
) -> None:
    outcomes = layouts.in_group(ranks, 2, train_save_and_resume, tmp_path, tmp_path / "c")
    for _, expected, resumed in outcomes:
        assert resumed == expected
    assert outcomes[0][1][1] != outcomes[1][1][1]
    [(_, alone)] = layouts.in_group(ranks, 1, resume_alone, tmp_path, tmp_path / "c")
    together = [of_0 + of_1 for of_0, of_1 in zip(*(expected[1] for _, expected, _ in outcomes), strict=True)]
    assert alone == together
    seen = [batch for before, _, _ in outcomes for batch in before[1]]
    assert len({sample for batch in seen + alone for sample in batch}) == 6 * 12
