"""A load's last phase: there where some rank runs code to put things in place, and only there."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from ray_dcp import CheckpointException, PerRank, StoreReader
from ray_dcp.protocol.rank.remote_call import RemoteCall
from tests.ranks import ThreadRanks, require_no_errors

WITHOUT = ["open", "plan", "read"]


class Counter:
    def __init__(self):
        self.num = torch.zeros(1)

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state_dict):
        self.num = state_dict["num"]


class OwnDict(dict):
    """May do anything when something is put into it."""


@pytest.fixture
def phases(monkeypatch):
    """The phases of each rank, in order."""
    seen = defaultdict(list)
    exchange = RemoteCall.exchange

    def noted(self, one, part):
        seen[self.rank].append(one.phase)
        return exchange(self, one, part)

    monkeypatch.setattr(RemoteCall, "exchange", noted)
    return seen


def everything(rank):
    return {"w": torch.ones(2), "model": {"b": torch.ones(3)}, "step": 7, "count": Counter()}


@pytest.fixture
def saved(tmp_path):
    require_no_errors(ThreadRanks(3).save(everything, tmp_path / "c"))
    return tmp_path / "c"


def nan(*sizes):
    return torch.full(sizes, float("nan"))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_tensors_alone_are_in_place_when_all_ranks_have_read(saved, phases, kind):
    templates = [kind(w=nan(2), model={"b": nan(3)}) for _ in range(3)]
    require_no_errors(ThreadRanks(3).load(templates, saved))
    assert phases == {rank: WITHOUT for rank in range(3)}
    for template in templates:
        assert torch.equal(template["w"], torch.ones(2))
        assert torch.equal(template["model"]["b"], torch.ones(3))


def python_value():
    return {"w": nan(2), "step": None}


def stateful():
    return {"w": nan(2), "count": Counter()}


def own_dict():
    return OwnDict(w=nan(2))


@pytest.mark.parametrize("one", [python_value, stateful, own_dict])
def test_one_rank_that_runs_code_has_all_wait_for_it(saved, phases, one):
    templates = [{"w": nan(2)}, one(), {"w": nan(2)}]
    require_no_errors(ThreadRanks(3).load(templates, saved))
    assert phases == {rank: [*WITHOUT, "restore"] for rank in range(3)}
    assert all(torch.equal(template["w"], torch.ones(2)) for template in templates)


@pytest.mark.parametrize("reader", [StoreReader, FileSystemReader])
def test_a_value_that_one_rank_fails_to_reshard_fails_the_load_on_all(tmp_path, reader):
    """Also under a reader of the user's, which hands over Python values while it reads."""

    def fail(values, rank, world_size):
        raise ValueError("cannot be split")

    def template(rank):
        return {"w": nan(2), "cursor": PerRank(None, reshard=fail)} if rank == 1 else {"w": nan(2)}

    saved = ThreadRanks(2).save(lambda rank: {"w": torch.ones(2), "cursor": PerRank(rank)}, tmp_path / "c")
    require_no_errors(saved)
    ranks = ThreadRanks(3)
    place = str(tmp_path / "c")
    outcomes = ranks.run(lambda rank: ranks.load_rank(rank, template(rank), place, reader=reader(place)))
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes), outcomes
    assert {outcome.failed_ranks for outcome in outcomes} == {(1,)}
