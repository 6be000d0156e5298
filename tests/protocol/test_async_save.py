"""Asynchronous saves: the values at the call, one at a time, in order, no failure lost."""

from __future__ import annotations

import threading

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.dcp_io.store_writer import StoreWriter
from ray_dcp.errors import EarlierSaveError


class GatedWriter(StoreWriter):
    """A writer that waits to be let go: a slow disk whose speed the test decides."""

    def __init__(self, *args, fails=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = threading.Event()
        self.fails = fails

    def write_data(self, plan, planner):
        assert self.gate.wait(30)
        if self.fails:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


@pytest.fixture(autouse=True)
def _no_save_left_behind(monkeypatch):
    """Each test has asynchronous saves of its own: what one leaves failed is no business of the next."""
    from ray_dcp import api
    from ray_dcp.protocol.background import BackgroundSaves

    monkeypatch.setattr(api, "_solo_saves", BackgroundSaves())


def load(place):
    state = {"w": torch.full((4,), float("nan")), "list": None}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    return state["w"].tolist(), state["list"]


def test_the_values_at_the_call_are_saved(tmp_path):
    writer = GatedWriter(tmp_path / "c")
    state = {"w": torch.ones(4), "list": [1, [2]]}
    response = dcp.async_save(state, storage_writer=writer, no_dist=True)
    assert response.staging_completion.done()
    state["w"].fill_(9)
    state["list"][1][0] = 9
    writer.gate.set()
    response.upload_completion.result(30)
    assert load(tmp_path / "c") == ([1.0] * 4, [1, [2]])


def test_the_next_save_waits_for_the_one_before(tmp_path):
    first = GatedWriter(tmp_path / "c")
    dcp.async_save({"w": torch.ones(4), "list": []}, storage_writer=first, no_dist=True)
    done = []

    def save_again():
        dcp.save({"w": torch.full((4,), 2.0), "list": []}, checkpoint_id=tmp_path / "c", no_dist=True)
        done.append(True)

    thread = threading.Thread(target=save_again)
    thread.start()
    thread.join(0.2)
    assert not done
    first.gate.set()
    thread.join(30)
    assert done
    assert load(tmp_path / "c")[0] == [2.0] * 4


def test_a_load_right_after_waits_for_the_save(tmp_path):
    writer = GatedWriter(tmp_path / "c")
    dcp.async_save({"w": torch.ones(4), "list": []}, storage_writer=writer, no_dist=True)
    threading.Timer(0.1, writer.gate.set).start()
    assert load(tmp_path / "c")[0] == [1.0] * 4


def test_a_failure_nobody_awaited_is_raised_by_the_next_call_once(tmp_path):
    writer = GatedWriter(tmp_path / "c", fails=True)
    writer.gate.set()
    dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match="No space left") as caught:
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert isinstance(caught.value.__cause__, EarlierSaveError)
    dcp.save({"w": torch.ones(4), "list": 1}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert load(tmp_path / "d") == ([1.0] * 4, 1)


def test_a_failure_that_was_looked_at_is_not_raised_again(tmp_path):
    writer = GatedWriter(tmp_path / "c", fails=True)
    writer.gate.set()
    response = dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match="No space left"):
        response.upload_completion.result(30)
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "d", no_dist=True)


def test_a_value_that_cannot_be_saved_is_told_by_the_call_itself(tmp_path):
    with pytest.raises(CheckpointException, match="cannot be pickled"):
        dcp.async_save({"f": lambda: 0}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert list(tmp_path.iterdir()) == []


def test_a_users_stager_stages(tmp_path):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    state = {"w": torch.ones(4), "list": [1]}
    writer = GatedWriter(tmp_path / "c")
    response = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    state["w"].fill_(9)
    writer.gate.set()
    response.upload_completion.result(30)
    stager.close()
    assert load(tmp_path / "c") == ([1.0] * 4, [1])
