"""The sweep behind a save: what a failed one left is gone after the next, and nothing else."""

from __future__ import annotations

import os

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, StoreWriter
from ray_dcp.format.names import new_attempt
from ray_dcp.maintenance.sweep.after_save import SweepAfterSave
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.reads.checkpoint import open_checkpoint
from ray_dcp.reads.reader import StoreReader
from ray_dcp.store.location.urls import join_url, split_url
from ray_dcp.store.open import open_store
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


def saved_behind(state, **where):
    dcp.async_save(state, **where).result()


@pytest.mark.parametrize("save_alone", [dcp.save, saved_behind])
def test_one_process_alone_sweeps_too(tmp_path, save_alone):
    from ray_dcp import api

    store = open_store(tmp_path)
    store.put(f"step-2/__0_0_{OLD}.distcp", b"of a run long ago")
    os.utime(tmp_path / f"step-2/__0_0_{OLD}.distcp", (1.0, 1.0))
    save_alone({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    api.alone.sweep.wait()
    assert os.listdir(tmp_path) == ["step-3"]


def test_a_root_that_cannot_be_listed_fails_no_save(ranks, tmp_path, monkeypatch, caplog):
    def refuse(*args, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr("ray_dcp.maintenance.sweep.after_save.delete_leftovers", refuse)
    save(ranks, tmp_path / "step-1")
    assert "out of order" in caplog.text


@pytest.mark.parametrize("name", ["latest", "step-00000007"])
def test_ten_saves_of_one_id_leave_the_files_of_the_last_and_of_the_one_before(ranks, tmp_path, name):
    place = tmp_path / name
    for value in range(10):
        before = sorted(shard_files(place), key=lambda name: name.split("_")[-1])
        save(ranks, place, float(value))
        assert set(before[-2:]) < set(shard_files(place)), "what may be read still is there"
    assert len(shard_files(place)) == 4
    template = {"w": torch.full((4, 2), float("nan"))}
    dcp.load(template, checkpoint_id=place, no_dist=True)
    assert template["w"].eq(9.0).all()


def test_ten_saves_by_one_process_alone_leave_two_files(tmp_path):
    from ray_dcp import api

    place = tmp_path / "best"
    for value in range(5):
        dcp.async_save({"w": torch.full((2,), value)}, checkpoint_id=place, no_dist=True).upload_completion.result()
        dcp.save({"w": torch.full((2,), value)}, checkpoint_id=place, no_dist=True)
    api.alone.sweep.wait()
    assert len(shard_files(tmp_path / "best")) == 2


def test_a_load_that_had_opened_the_replaced_checkpoint_ends_as_it_began(ranks, tmp_path):
    place = tmp_path / "latest"
    for value in (1.0, 2.0, 3.0):
        save(ranks, place, value)
    opened = open_checkpoint(place)
    save(ranks, place, 4.0)
    reader = StoreReader(place)
    reader.adopt(opened)
    template = {"w": torch.full((4, 2), float("nan"))}
    dcp.load(template, storage_reader=AsOpened(reader), no_dist=True)
    assert template["w"].eq(3.0).all()


class AsOpened(dcp.StorageReader):
    """A user's reader, so that nobody opens the newest checkpoint in its place."""

    def __init__(self, reader):
        self.reader = reader

    def __getattr__(self, name):
        return getattr(self.reader, name)

    def reset(self, checkpoint_id=None):
        pass

    def read_metadata(self, *args, **options):
        return self.reader.read_metadata()

    def set_up_storage_reader(self, metadata, is_coordinator):
        self.reader.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan):
        return self.reader.prepare_local_plan(plan)

    def prepare_global_plan(self, plans):
        return self.reader.prepare_global_plan(plans)

    def read_data(self, plan, planner):
        return self.reader.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def test_the_files_of_a_failed_save_do_not_count_as_those_of_the_replaced_one(ranks, tmp_path):
    place = tmp_path / "latest"
    save(ranks, place, 1.0)
    committed = shard_files(place)
    fail_to_save(ranks, place)
    save(ranks, place, 2.0)
    assert set(committed) < set(shard_files(place))
    assert len(shard_files(place)) == 4


def test_what_a_checkpoint_beside_it_names_stays_and_what_is_not_ours_too(ranks, tmp_path):
    place = tmp_path / "latest"
    save(ranks, place, 1.0)
    first = shard_files(place)
    (tmp_path / "pinned").mkdir()
    (tmp_path / "pinned" / ".metadata").write_bytes(f"names ../latest/{first[0]}".encode())
    for name in ("notes.txt", "__0_0.distcp", "__1_0.distcp"):
        (place / name).write_bytes(b"of torch, or of the user")
    for value in (2.0, 3.0, 4.0):
        save(ranks, place, value)
    assert set(first) < set(shard_files(place))
    assert {"notes.txt", "__0_0.distcp", "__1_0.distcp"} < set(os.listdir(place))
    assert len(shard_files(place)) == 2 + 3 * 2


def test_behind_a_link_nothing_is_removed(ranks, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to("real")
    for value in (1.0, 2.0, 3.0):
        save(ranks, tmp_path / "latest", value)
    assert len(shard_files(tmp_path / "real")) == 6


@pytest.mark.parametrize(
    "url",
    [
        *("/a/b", "/a", "a", "memory://a/b", "memory://a", "s3://bucket/a/b", "s3://bucket"),
        "s3://bucket/a?endpoint_override=x:1&r=y",
    ],
)
def test_a_url_that_is_split_can_be_joined_again(url):
    assert join_url(*split_url(url)).removeprefix("./") == url
