"""A user's planner, writer or reader that cannot be pickled: its global steps run on rank 0."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.settings import Limits
from tests.ranks import ThreadRanks, require_no_errors


class LockedPlanner(DefaultSavePlanner):
    """Its global step uses what only the rank's own instance knows."""

    def __init__(self):
        super().__init__(flatten_state_dict=False)
        self.lock = threading.Lock()
        self.global_steps = 0

    def create_local_plan(self):
        self.names = sorted(self.state_dict)
        return super().create_local_plan()

    def create_global_plan(self, all_plans):
        with self.lock:
            self.global_steps += 1
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data=self.names)


class LockedLoadPlanner(DefaultLoadPlanner):
    def __init__(self):
        super().__init__(flatten_state_dict=False)
        self.lock = threading.Lock()
        self.global_steps = 0

    def create_global_plan(self, all_plans):
        self.global_steps += 1
        return super().create_global_plan(all_plans)


class LockedWriter(FileSystemWriter):
    def __init__(self, path, fails=False):
        super().__init__(path)
        self.lock = threading.Lock()
        self.fails = fails
        self.calls = []

    def prepare_global_plan(self, plans):
        self.calls.append("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def finish(self, metadata, results):
        self.calls.append("finish")
        if self.fails:
            raise OSError(5, "Input/output error")
        return super().finish(metadata, results)


class LockedReader(FileSystemReader):
    def __init__(self, path):
        super().__init__(path)
        self.lock = threading.Lock()
        self.global_steps = 0

    def prepare_global_plan(self, plans):
        self.global_steps += 1
        return super().prepare_global_plan(plans)


def shards(rank, fill):
    return {"t": dcp.LocalShards((4, 2), {(2 * rank, 0): torch.full((2, 2), fill)}), f"p{rank}": rank}


def test_planner_writer_and_reader_with_locks_save_and_load_on_two_ranks(tmp_path):
    place = tmp_path / "c"
    ranks = ThreadRanks(2)
    planners, writers = [LockedPlanner(), LockedPlanner()], [LockedWriter(place), LockedWriter(place)]
    saved = ranks.run(
        lambda rank: ranks.save_rank(
            rank, shards(rank, float(rank)), place, planner=planners[rank], writer=writers[rank]
        )
    )
    assert require_no_errors(saved)[1].planner_data == ["p0", "t"]
    assert [planner.global_steps for planner in planners] == [1, 0]
    assert [writer.calls for writer in writers] == [["prepare_global_plan", "finish"], []]

    templates = [shards(rank, float("nan")) for rank in (1, 0)]  # each rank takes what the other one saved
    load_planners, readers = [LockedLoadPlanner(), LockedLoadPlanner()], [LockedReader(place), LockedReader(place)]
    loads = ThreadRanks(2)
    require_no_errors(
        loads.run(
            lambda rank: loads.load_rank(
                rank, templates[rank], place, planner=load_planners[rank], reader=readers[rank]
            )
        )
    )
    assert [float(t["t"].chunks[2 * rank, 0][0, 0]) for rank, t in zip((1, 0), templates, strict=True)] == [1.0, 0.0]
    assert [planner.global_steps for planner in load_planners] == [1, 0]
    assert [reader.global_steps for reader in readers] == [1, 0]


def test_our_own_writer_commits_for_a_planner_that_stays(tmp_path):
    ranks = ThreadRanks(2)
    require_no_errors(
        ranks.run(lambda rank: ranks.save_rank(rank, shards(rank, 1.0), tmp_path / "c", planner=LockedPlanner()))
    )
    whole = {"t": torch.zeros(4, 2), "p0": None, "p1": None}
    dcp.load(whole, checkpoint_id=tmp_path / "c", no_dist=True)
    assert whole["t"].unique().tolist() == [1.0]
    assert (whole["p0"], whole["p1"]) == (0, 1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_commit_that_fails_on_rank_zero_fails_all(tmp_path, world_size):
    ranks = ThreadRanks(world_size)
    outcomes = ranks.run(
        lambda rank: ranks.save_rank(rank, {"w": torch.ones(2)}, tmp_path, writer=LockedWriter(tmp_path, fails=True))
    )
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException)
        assert outcome.phase == "commit"
        assert outcome.failed_ranks == (0,)
        assert outcome.__cause__.errno == 5


def test_a_global_plan_with_a_hole_is_refused_also_there(tmp_path):
    def with_a_hole(rank):
        return {"t": dcp.LocalShards((6, 2), {(2 * rank, 0): torch.ones(2, 2)})}

    class Lenient(LockedPlanner):
        def create_global_plan(self, all_plans):
            from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

            return create_default_global_save_plan(all_plans)

    ranks = ThreadRanks(2)
    outcomes = ranks.run(lambda rank: ranks.save_rank(rank, with_a_hole(rank), tmp_path / "c", planner=Lenient()))
    for outcome in outcomes:
        assert "t: no rank has rows 4:6" in str(outcome)
    assert not (tmp_path / "c").exists()


def test_a_global_plan_there_has_a_limit_of_its_own(tmp_path):
    now, goes_on = [0.0], threading.Event()
    coordinator = Coordinator("threads", clock=lambda: now[0])
    limits = Limits(stall_timeout_s=1000, phase_stall_timeout_s={"global plan": 5})
    ranks = ThreadRanks(2, coordinator=coordinator, limits=limits)

    class Slow(LockedPlanner):
        def create_global_plan(self, all_plans):
            while not goes_on.is_set():
                now[0] += 1
                coordinator.check_limits()
                goes_on.wait(0.001)
            return super().create_global_plan(all_plans)

    def save(rank):
        try:
            return ranks.save_rank(rank, shards(rank, 1.0), tmp_path / "c", planner=Slow())
        finally:
            goes_on.set()  # the other rank is told

    for outcome in ranks.run(save):
        assert isinstance(outcome, CheckpointException)
        assert "made no progress in phase 'global plan'" in str(outcome)
    assert now[0] < 100
