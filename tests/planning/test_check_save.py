"""What the coordinator finds wrong with the plans of all ranks, before a byte is written."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan

from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import StateDictError
from ray_dcp.planning.save_plan.check_save import require_agreeing_plans, require_whole_tensors
from tests.ranks import ThreadRanks


def plans_of(*states):
    plans = []
    for state in states:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, None, False)
        plans.append(planner.create_local_plan())
    return plans


def problems(check, argument):
    with pytest.raises(StateDictError) as caught:
        check(argument)
    return caught.value.problems


def rows(start, stop, size=(4, 3), **options):
    return LocalShards(size, {(start, 0): torch.ones(stop - start, *size[1:])}, **options)


def test_ranks_that_agree_pass():
    require_agreeing_plans(
        plans_of(
            {"w": rows(0, 2), "plain": torch.ones(3), "n": 1, "only_here": torch.ones(1)},
            {"w": rows(2, 4), "plain": torch.zeros(3), "n": 1},
            {},
        )
    )


def test_every_disagreement_is_told_with_the_ranks_of_each_side():
    found = problems(
        require_agreeing_plans,
        plans_of(
            {"w": torch.ones(4), "v": torch.ones(2), "k": torch.ones(1), "same": 1},
            {"w": torch.ones(5), "v": torch.ones(2, dtype=torch.float64), "k": 3, "same": 2},
            {"w": torch.ones(4), "v": torch.ones(2), "k": torch.ones(1), "same": 3},
        ),
    )
    assert found == (
        "k: ranks 0, 2 have a tensor of shape (1,) and torch.float32; rank 1 has a Python object",
        "v: ranks 0, 2 have a tensor of shape (2,) and torch.float32; "
        "rank 1 has a tensor of shape (2,) and torch.float64",
        "w: ranks 0, 2 have a tensor of shape (4,) and torch.float32; "
        "rank 1 has a tensor of shape (5,) and torch.float32",
    )


def test_shards_disagree_by_the_whole_size_and_not_by_their_own():
    require_agreeing_plans(plans_of({"w": rows(0, 1)}, {"w": rows(1, 4)}))
    assert problems(require_agreeing_plans, plans_of({"w": rows(0, 2)}, {"w": rows(2, 4, size=(5, 3))})) == (
        "w: rank 0 has a tensor of shape (4, 3) and torch.float32; "
        "rank 1 has a tensor of shape (5, 3) and torch.float32",
    )


def test_a_rank_with_several_chunks_is_named_once():
    both = LocalShards((4,), {(0,): torch.ones(1), (1,): torch.ones(1)})
    (problem,) = problems(require_agreeing_plans, plans_of({"w": both}, {"w": torch.ones(3)}))
    assert problem.startswith("w: rank 0 has a tensor of shape (4,)")


def test_holes_are_named_with_their_size():
    _, metadata = create_default_global_save_plan(
        plans_of({"w": rows(0, 2), "whole": torch.ones(3), "zero": torch.tensor(1.0), "n": 1, "e": torch.ones(0, 3)})
    )
    assert problems(require_whole_tensors, metadata) == ("w: no chunk holds rows 2:4",)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_hole_reaches_a_file(tmp_path, world_size):
    outcomes = ThreadRanks(world_size).save(lambda rank: {"w": rows(rank, rank + 1), "n": 1}, tmp_path / "c")
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException)
        assert outcome.phase == "plan"
        assert "w" in str(outcome)
    assert not list(tmp_path.glob("c/*"))


def test_no_overlap_between_ranks_reaches_a_file(tmp_path):
    spans = [(0, 3), (2, 4)]
    outcomes = ThreadRanks(2).save(lambda rank: {"w": rows(*spans[rank])}, tmp_path / "c")
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException)
        assert outcome.phase == "plan"
        assert "w: rank 0 and rank 1 both have rows 2:3" in str(outcome)
    assert not list(tmp_path.glob("c/*"))


def test_an_overlap_as_large_as_a_hole_reaches_no_file(tmp_path):
    spans = [(0, 2), (1, 3)]
    outcomes = ThreadRanks(2).save(lambda rank: {"w": rows(*spans[rank])}, tmp_path / "c")
    told = "w: rank 0 and rank 1 both have rows 1:2; no rank has rows 3:4"
    assert all(told in str(outcome) for outcome in outcomes)
    assert not list(tmp_path.glob("c/*"))


def test_the_same_chunk_on_several_ranks_is_saved_once(tmp_path):
    outcomes = ThreadRanks(3).save(lambda rank: {"w": rows(0, 2) if rank < 2 else rows(2, 4)}, tmp_path / "c")
    assert [tuple(chunk.offsets) for chunk in outcomes[0].state_dict_metadata["w"].chunks] == [(0, 0), (2, 0)]


def test_every_tensor_with_a_hole_is_named_however_many_there_are(tmp_path):
    def many(rank):
        return {f"layer.{n}.weight": LocalShards((6, 2), {(2 * rank, 0): torch.ones(2, 2)}) for n in range(40)}

    for outcome in ThreadRanks(2).save(many, tmp_path / "c"):
        problems = outcome.__cause__.problems
        assert len(problems) == 40
        assert all(any(f"layer.{n}.weight" in problem for problem in problems) for n in range(40))
