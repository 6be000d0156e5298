"""A rank that forks: a DataLoader worker, say. The fork is no rank, and has no connection to Ray."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.errors import ForkedProcessError

pytestmark = pytest.mark.ray


def in_fork(told, place):
    """What each call gives here; a call that hung would leave the queue empty."""
    group = dcp.current_group()
    state = {"w": torch.ones(2)}
    calls = {
        "save": lambda: dcp.save(state, checkpoint_id=f"{place}-fork"),
        "async_save": lambda: dcp.async_save(state, checkpoint_id=f"{place}-fork"),
        "load": lambda: dcp.load(state, checkpoint_id=f"{place}-fork"),
        "manager": lambda: dcp.CheckpointManager(place).load(state),
        "barrier": group.barrier,
        "join": lambda: dcp.RankGroup.join("another", rank=0, world_size=1),
        "close": group.close,
        "alone": lambda: dcp.save(state, checkpoint_id=f"{place}-fork-{group.rank}", no_dist=True),
    }
    seen = {}
    for name, call in calls.items():
        try:
            seen[name] = type(call()).__name__
        except ForkedProcessError as error:
            seen[name] = "refused" if "spawn" in str(error) and "no_dist=True" in str(error) else str(error)
    told.put(seen)


def fork_during_a_save(rank, world_size, place):
    gate = threading.Event()

    class Gated(dcp.StoreWriter):
        def write_data(self, plan, planner):
            assert gate.wait(60)
            return super().write_data(plan, planner)

    response = dcp.async_save({f"w{rank}": torch.ones(2)}, storage_writer=Gated(place))
    fork = multiprocessing.get_context("fork")
    told = fork.SimpleQueue()
    child = fork.Process(target=in_fork, args=(told, place))
    child.start()
    child.join(60)
    seen = None if told.empty() else told.get()
    child.kill()
    gate.set()
    response.result(60)
    dcp.save({f"w{rank}": torch.ones(2)}, checkpoint_id=f"{place}-after")
    return seen


def test_a_fork_of_a_rank_is_told_at_once_and_may_save_alone(ranks, tmp_path):
    refused = dict.fromkeys(("save", "async_save", "load", "manager", "barrier", "join"), "refused")
    for seen in ranks.ok(2, fork_during_a_save, str(tmp_path / "c")):
        assert seen == {**refused, "close": "NoneType", "alone": "CommittedMetadata"}
    filled = {"w0": torch.zeros(2), "w1": torch.zeros(2)}
    for place in ("c", "c-after"):
        dcp.load(filled, checkpoint_id=tmp_path / place, no_dist=True)
        assert filled["w1"].tolist() == [1.0, 1.0]
