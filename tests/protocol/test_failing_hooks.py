"""Whatever a user's hook raises on one rank, and however: every rank ends at once, and the next call works."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.write.writer import StoreWriter
from tests.ranks import ThreadRanks, require_no_errors


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class UnpicklableError(Exception):
    def __reduce__(self):
        return sys.exit, (3,)


def failure_of_another_call() -> CheckpointException:
    failure = RankFailure.from_exception(ValueError("of the other"), rank=0, phase="write")
    return CheckpointException("save", "/another/checkpoint", [failure])


class Failing:
    def __init__(self, *, state_dict=None, load_state_dict=None):
        self._state_dict = state_dict
        self._load_state_dict = load_state_dict

    def state_dict(self):
        if self._state_dict is not None:
            raise self._state_dict()
        return {"w": torch.zeros(2)}

    def load_state_dict(self, state_dict):
        if self._load_state_dict is not None:
            raise self._load_state_dict()


def ended_on_all(outcomes, phase) -> list[CheckpointException]:
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes), outcomes
    assert [(outcome.phase, outcome.failed_ranks) for outcome in outcomes] == [(phase, (1,))] * 3
    return outcomes


@pytest.mark.parametrize("make", [failure_of_another_call, UnprintableError, UnpicklableError])
@pytest.mark.parametrize("hook", ["state_dict", "load_state_dict"])
def test_odd_exceptions_of_a_stateful(tmp_path, hook, make):
    ranks = ThreadRanks(3)
    require_no_errors(ranks.save(lambda rank: {"app": Failing()}, tmp_path / "c"))
    templates = [{"app": Failing(**{hook: make} if rank == 1 else {})} for rank in range(3)]
    if hook == "state_dict":
        ended_on_all(ranks.save(lambda rank: templates[rank], tmp_path / "c"), "collect")
        ended_on_all(ranks.load(templates, tmp_path / "c"), "collect")
    else:
        ended_on_all(ranks.load(templates, tmp_path / "c"), "restore")
    require_no_errors(ranks.load([{"app": Failing()} for _ in range(3)], tmp_path / "c"))


@pytest.mark.parametrize("method", ["prepare_global_plan", "finish"])
def test_an_exception_without_a_text_at_the_coordinator(tmp_path, method):
    class Writer(StoreWriter):
        pass

    def fail(self, *args):
        raise UnprintableError

    setattr(Writer, method, fail)
    ranks = ThreadRanks(3)
    outcomes = ranks.run(
        lambda rank: ranks.save_rank(rank, {"w": torch.ones(2)}, tmp_path / "c", writer=Writer(tmp_path / "c"))
    )
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes), outcomes
    assert "UnprintableError" in str(outcomes[2])
    require_no_errors(ranks.save(lambda rank: {"w": torch.ones(2)}, tmp_path / "c"))


def test_results_of_a_writer_that_cannot_be_pickled(tmp_path):
    class Writer(StoreWriter):
        def write_data(self, plan, planner):
            written = super().write_data(plan, planner)
            return written.then(lambda done: [*done.value(), threading.Lock()])

    ranks = ThreadRanks(3)
    writers = [StoreWriter(tmp_path / "c"), Writer(tmp_path / "c"), StoreWriter(tmp_path / "c")]

    def shards(rank):
        return {"w": dcp.LocalShards((3,), {(rank,): torch.ones(1)})}

    outcomes = ranks.run(lambda rank: ranks.save_rank(rank, shards(rank), tmp_path / "c", writer=writers[rank]))
    ended_on_all(outcomes, "write")
    assert not (tmp_path / "c" / ".metadata").exists()
    require_no_errors(ranks.save(shards, tmp_path / "c"))
