"""A container of a template that takes no value is refused before anything is filled, where it is to get one."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, PerRank
from ray_dcp.errors import StateDictError
from tests.ranks import ThreadRanks, require_no_errors

NAN = float("nan")


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("this dict is frozen")

    def update(self, *args, **kwargs):
        raise TypeError("this dict is frozen")


class FrozenList(list):
    def __setitem__(self, key, value):
        raise TypeError("this list is frozen")

    def extend(self, values):
        raise TypeError("this list is frozen")


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


READ_ONLY = pytest.mark.parametrize("kind", [MappingProxyType, Frozen])


def saved(place, *, world_size=1):
    m = {"n": 5, "t": torch.ones(2), "below": {"k": 1}, "l": [torch.ones(2), 7], "c": Counter(3)}
    state = {"w": torch.ones(3), "m": m}
    require_no_errors(ThreadRanks(world_size).save(lambda rank: {**state, "m": {**m, "p": PerRank(rank)}}, place))


def refused(place, m, *, names, ranks=1, **options):
    templates = [{"w": torch.full((3,), NAN), "m": m()} for _ in range(ranks)]
    of_ranks = ThreadRanks(ranks)
    outcomes = of_ranks.run(lambda rank: of_ranks.load_rank(rank, templates[rank], place, **options))
    for template, outcome in zip(templates, outcomes, strict=True):
        assert isinstance(outcome, CheckpointException), outcome
        assert isinstance(outcome.__cause__, StateDictError)
        assert [line.partition(":")[0] for line in outcome.__cause__.problems] == names
        assert template["w"].isnan().all()
        assert template["w"]._version == 0
    return templates[0]


@READ_ONLY
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_python_value_in_it(tmp_path, kind, ranks):
    saved(tmp_path, world_size=ranks)
    refused(tmp_path, lambda: kind({"n": 0, "t": torch.full((2,), NAN)}), names=["m.n"], ranks=ranks)


@READ_ONLY
def test_a_tensor_on_meta_in_it(tmp_path, kind):
    saved(tmp_path)
    refused(tmp_path, lambda: kind({"t": torch.empty(2, device="meta")}), names=["m.t"])


@READ_ONLY
def test_an_empty_place_in_it(tmp_path, kind):
    saved(tmp_path)
    refused(tmp_path, lambda: kind({"below": None}), names=["m.below"])


@READ_ONLY
def test_one_that_is_empty_itself(tmp_path, kind):
    saved(tmp_path)
    refused(tmp_path, lambda: {"below": kind({})}, names=["m.below"])


@READ_ONLY
def test_a_value_beside_a_stateful_of_which_the_load_fills_a_copy(tmp_path, kind):
    saved(tmp_path)
    template = refused(tmp_path, lambda: kind({"n": 0, "c": Counter()}), names=["m.n"])
    assert template["m"]["c"].count == 0


@READ_ONLY
def test_a_per_rank_in_it(tmp_path, kind):
    saved(tmp_path)
    first = PerRank("old")
    template = refused(tmp_path, lambda: {"a": first, "b": kind({"p": PerRank("old")})}, names=["m.b.p"])
    assert template["m"]["a"] is first


def test_a_list_that_takes_none(tmp_path):
    saved(tmp_path)
    refused(tmp_path, lambda: {"l": FrozenList([torch.zeros(2), 0])}, names=["m.l.1"])
    refused(tmp_path, lambda: {"l": FrozenList()}, names=["m.l"])


@READ_ONLY
def test_what_is_filled_in_place_may_lie_in_it_and_so_may_what_is_left_out(tmp_path, kind):
    saved(tmp_path)
    template = {"m": kind({"n": 0, "t": torch.zeros(2), "c": Counter()})}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True, skip="m.n")
    assert (template["m"]["n"], template["m"]["t"].tolist(), template["m"]["c"].count) == (0, [1.0, 1.0], 3)
