"""The sweep behind a save: what a failed one left is gone after the next, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, StoreWriter
from ray_dcp.layout import new_attempt
from ray_dcp.maintenance.after_save import SweepAfterSave
from ray_dcp.protocol.coordinator import Coordinator
from ray_dcp.storage.open import open_store
from ray_dcp.storage.urls import join_url, split_url
from tests.ranks import ThreadRanks, require_no_errors

OLD = "0000000000000001deadbeef"  # an attempt of 1970


@pytest.fixture
def ranks():
    """Two ranks whose coordinator sweeps as the actor does."""
    coordinator = Coordinator("threads", on_save_ended=lambda *ended, **how: sweep.save_ended(*ended, **how))
    sweep = SweepAfterSave(lambda: coordinator.attempts)
    own = ThreadRanks(2, coordinator=coordinator)
    own.sweep = sweep
    return own


def state_of(rank: int, value: float = 1.0):
    return {"w": LocalShards((4, 2), {(2 * rank, 0): torch.full((2, 2), value)})}


def save(ranks, place, value=1.0):
    require_no_errors(ranks.save(lambda rank: state_of(rank, value), place))
    ranks.sweep.wait()


class DiesAfterWriting(StoreWriter):
    """As if the process were killed: the file stays, no result comes."""

    def write_data(self, plan, planner):
        super().write_data(plan, planner)
        self._written_key = None
        raise OSError("killed")


def fail_to_save(ranks, place):
    outcomes = ranks.run(
        lambda rank: ranks.save_rank(
            rank, state_of(rank, 9.0), place, writer=(DiesAfterWriting if rank else StoreWriter)(place)
        )
    )
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes)


def shard_files(place):
    return sorted(name for name in os.listdir(place) if name.endswith(".distcp")) if os.path.isdir(place) else []


def test_what_a_failed_save_left_goes_with_the_next_under_that_root(ranks, tmp_path):
    save(ranks, tmp_path / "step-1")
    fail_to_save(ranks, tmp_path / "step-2")
    assert shard_files(tmp_path / "step-2")
    save(ranks, tmp_path / "step-3")
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


def test_what_a_failed_save_left_beside_a_committed_one_goes_and_the_committed_stays(ranks, tmp_path):
    save(ranks, tmp_path / "step-1")
    committed = shard_files(tmp_path / "step-1")
    save(ranks, tmp_path / "step-2")
    fail_to_save(ranks, tmp_path / "step-1")
    assert len(shard_files(tmp_path / "step-1")) == len(committed) + 1
    save(ranks, tmp_path / "step-3")
    assert shard_files(tmp_path / "step-1") == committed
    template = {"w": torch.full((4, 2), float("nan"))}
    dcp.load(template, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert template["w"].eq(1.0).all()


def test_a_group_that_has_re_formed_still_knows_what_it_left(ranks, tmp_path):
    fail_to_save(ranks, tmp_path / "step-2")
    again = ThreadRanks(2, coordinator=ranks.coordinator, tag="again")
    again.sweep = ranks.sweep
    save(again, tmp_path / "step-3")
    assert os.listdir(tmp_path) == ["step-3"]


def test_files_of_nobody_known_wait_for_the_grace(ranks, tmp_path):
    store = open_store(tmp_path)
    young = f"step-1/__0_0_{new_attempt()}.distcp"
    store.put(young, b"of another run's save")
    store.put(f"step-2/__0_0_{OLD}.distcp", b"of a run long ago")
    os.utime(tmp_path / f"step-2/__0_0_{OLD}.distcp", (1.0, 1.0))
    save(ranks, tmp_path / "step-3")
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    assert (tmp_path / young).exists()


def test_beside_a_checkpoint_that_is_no_step_nothing_is_touched(ranks, tmp_path):
    store = open_store(tmp_path)
    store.put(f"step-2/__0_0_{OLD}.distcp", b"somebody's")
    os.utime(tmp_path / f"step-2/__0_0_{OLD}.distcp", (1.0, 1.0))
    save(ranks, tmp_path / "best")
    assert os.listdir(tmp_path / "step-2")


def test_one_process_alone_sweeps_too(tmp_path):
    from ray_dcp import api

    store = open_store(tmp_path)
    store.put(f"step-2/__0_0_{OLD}.distcp", b"of a run long ago")
    os.utime(tmp_path / f"step-2/__0_0_{OLD}.distcp", (1.0, 1.0))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    api._solo_sweep.wait()
    assert os.listdir(tmp_path) == ["step-3"]


def test_a_root_that_cannot_be_listed_fails_no_save(ranks, tmp_path, monkeypatch, caplog):
    def refuse(*args, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr("ray_dcp.maintenance.after_save.delete_leftovers", refuse)
    save(ranks, tmp_path / "step-1")
    assert "out of order" in caplog.text


@pytest.mark.parametrize("url", ["/a/b", "memory://a/b", "s3://bucket/a/b", "s3://bucket/a?endpoint_override=x:1&r=y"])
def test_a_url_that_is_split_can_be_joined_again(url):
    assert join_url(*split_url(url)) == url
