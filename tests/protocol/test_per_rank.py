"""Values that belong to one rank, through whole saves and loads: own value back, or a stated rule, or a refusal."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import CheckpointException, PerRank
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits


def rng_of(rank: int) -> dict[str, object]:
    """The states of every generator a trainer has, different on each rank."""
    torch_rng = torch.Generator().manual_seed(rank)
    return {
        "python": random.Random(rank).getstate(),
        "numpy": np.random.RandomState(rank).get_state(),
        "torch": torch_rng.get_state(),
    }


def state_of(rank: int) -> dict[str, object]:
    return {
        "rng": PerRank(rng_of(rank)),
        "loader": {"cursors": [PerRank(10 * rank), "shared"]},
        "step": 7,
        "w": torch.ones(2),
    }


def save(world_size, place):
    require_no_errors(ThreadRanks(world_size).save(state_of, place))


def template(reshard=None):
    return {
        "rng": PerRank(None, reshard),
        "loader": {"cursors": [PerRank(None, reshard), ""]},
        "step": 0,
        "w": torch.zeros(2),
    }


def same_rng(a, b) -> bool:
    return (
        a["python"] == b["python"]
        and all(np.array_equal(x, y) for x, y in zip(a["numpy"], b["numpy"], strict=True))
        and same_bits(a["torch"], b["torch"])
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_at_the_same_world_size_each_rank_gets_its_own_back(tmp_path, world_size):
    save(world_size, tmp_path)
    templates = [template() for _ in range(world_size)]
    reports = require_no_errors(ThreadRanks(world_size).load(templates, tmp_path))
    for rank, filled in enumerate(templates):
        assert same_rng(filled["rng"].value, rng_of(rank))
        assert filled["loader"]["cursors"][0].value == 10 * rank
        assert (filled["loader"]["cursors"][1], filled["step"], filled["w"].tolist()) == ("shared", 7, [1, 1])
        assert reports[rank].missing == reports[rank].unexpected == ()


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 3), (1, 3), (3, 1)])
def test_at_another_world_size_reshard_says_what_each_rank_gets(tmp_path, saving, loading):
    save(saving, tmp_path)
    templates = [template(lambda values, rank, world_size: (values, rank, world_size)) for _ in range(loading)]
    require_no_errors(ThreadRanks(loading).load(templates, tmp_path))
    for rank, filled in enumerate(templates):
        assert filled["loader"]["cursors"][0].value == ([10 * r for r in range(saving)], rank, loading)
        values, *where = filled["rng"].value
        assert where == [rank, loading]
        assert all(same_rng(value, rng_of(r)) for r, value in enumerate(values))


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 3), (1, 3), (3, 1)])
def test_without_a_rule_another_world_size_is_refused_and_both_are_named(tmp_path, saving, loading):
    save(saving, tmp_path)
    templates = [template() for _ in range(loading)]
    for outcome in ThreadRanks(loading).load(templates, tmp_path):
        assert isinstance(outcome, CheckpointException)
        assert outcome.__cause__.problems == tuple(
            f"{name}: saved by {saving} ranks, loading on {loading}: "
            "pass PerRank(..., reshard=function(values, rank, world_size)) to say what each rank gets"
            for name in ("loader.cursors.0", "rng")
        )
    for filled in templates:
        assert isinstance(filled["rng"], PerRank)
        assert filled["rng"].value is None
        assert (filled["step"], filled["w"].tolist()) == (0, [0, 0])


def test_a_reshard_that_fails_fails_the_load_on_every_rank(tmp_path):
    save(2, tmp_path)

    def only_even(values, rank, world_size):
        raise ZeroDivisionError("cannot split")

    for outcome in ThreadRanks(3).load([template(only_even) for _ in range(3)], tmp_path):
        assert isinstance(outcome, CheckpointException)
        assert "ZeroDivisionError: cannot split" in str(outcome)


class Loader:
    """A ``Stateful`` with a value of this rank alone, as a data loader has."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor

    def state_dict(self):
        return {"cursor": PerRank(self.cursor, reshard=lambda values, rank, world_size: sum(values) // world_size)}

    def load_state_dict(self, state):
        self.cursor = state["cursor"].value


@pytest.mark.parametrize(("loading", "cursors"), [(2, [0, 10]), (1, [10]), (5, [2] * 5)])
def test_a_stateful_object_can_have_them(tmp_path, loading, cursors):
    require_no_errors(ThreadRanks(2).save(lambda rank: {"loader": Loader(10 * rank)}, tmp_path))
    loaders = [Loader(-1) for _ in range(loading)]
    require_no_errors(ThreadRanks(loading).load([{"loader": loader} for loader in loaders], tmp_path))
    assert [loader.cursor for loader in loaders] == cursors


def test_ranks_may_have_different_ones(tmp_path):
    require_no_errors(
        ThreadRanks(2).save(lambda rank: {"n": 1} | ({"head": PerRank("x")} if rank == 0 else {}), tmp_path)
    )
    templates = [{"n": 0, "head": PerRank(None)}, {"n": 0}]
    outcomes = ThreadRanks(2).load(templates, tmp_path)
    assert all("head: saved by 1 ranks, loading on 2" in str(outcome) for outcome in outcomes)


def test_values_of_all_ranks_are_in_the_checkpoint_once_each(tmp_path):
    (metadata, *_) = require_no_errors(ThreadRanks(3).save(state_of, tmp_path))
    assert {name for name in metadata.state_dict_metadata if "rng" in name} == {f"rng.__rank_{r}__" for r in range(3)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_leaves_them_out_or_reads_them_by_name(tmp_path):
    save(2, tmp_path)
    rest = {"step": 0, "w": torch.zeros(2)}
    torch_dcp.load(rest, checkpoint_id=tmp_path, no_dist=True)
    assert (rest["step"], rest["w"].tolist()) == (7, [1, 1])
    named = {"rng": {"__rank_1__": ()}, "loader": {"cursors": [{"__rank_0__": ()}, ""]}}
    torch_dcp.load(named, checkpoint_id=tmp_path, no_dist=True)
    assert same_rng(named["rng"]["__rank_1__"][0], rng_of(1))
    assert named["loader"]["cursors"] == [{"__rank_0__": (0,)}, "shared"]


def test_a_background_save_takes_the_values_of_the_moment(tmp_path):
    cursor = {"position": [1]}
    saving = dcp.async_save({"cursor": PerRank(cursor)}, checkpoint_id=tmp_path, no_dist=True)
    cursor["position"].append(2)
    saving.upload_completion.result()
    filled = {"cursor": PerRank(None)}
    dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
    assert filled["cursor"].value == {"position": [1]}


def test_a_report_has_the_names_that_the_user_knows(tmp_path):
    save(2, tmp_path)
    loaded = ("loader.cursors.0", "loader.cursors.1", "rng", "step", "w")
    for world_size in (2, 1, 3):
        templates = [template(lambda values, rank, world_size: values[0]) for _ in range(world_size)]
        for report in require_no_errors(ThreadRanks(world_size).load(templates, tmp_path)):
            assert (report.loaded, report.missing, report.unexpected) == (loaded, (), ())
    lacking = {"step": 0, "more": PerRank(0)}
    (report,) = require_no_errors(ThreadRanks(1).load([lacking], tmp_path, strict=False))
    expected = (("step",), ("more",), ("loader.cursors.0", "loader.cursors.1", "rng", "w"))
    assert (report.loaded, report.missing, report.unexpected) == expected
    empty = [template() | {"loader": {}} for _ in range(2)]
    assert {report.loaded for report in require_no_errors(ThreadRanks(2).load(empty, tmp_path))} == {loaded}
