"""Asynchronous saves: the values at the call, one at a time, in order, no failure lost."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import wait

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import EarlierSaveError
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.write.writer import StoreWriter
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors


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

    monkeypatch.setattr(api.alone, "background", BackgroundSaves())


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


def fail_unseen(place):
    """An asynchronous save of ``place`` that fails, at which nobody looks."""
    writer = GatedWriter(place, fails=True)
    writer.gate.set()
    wait([dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)])  # that is no look


NEXT_CALLS = {
    "save": lambda place: dcp.save({"w": torch.ones(4), "list": 1}, checkpoint_id=place, no_dist=True),
    "async_save": lambda place: dcp.async_save({"w": torch.ones(4), "list": 1}, checkpoint_id=place, no_dist=True),
    "manager.save": lambda place: manager_of(place).save(7, {"w": torch.ones(4), "list": 1}),
    "manager.async_save": lambda place: manager_of(place).async_save(7, {"w": torch.ones(4), "list": 1}),
}


def manager_of(place):
    return dcp.CheckpointManager(place.parent)


@pytest.mark.parametrize("call", NEXT_CALLS)
def test_a_failure_nobody_awaited_is_raised_by_the_next_call_when_that_has_done_its_work(tmp_path, call):
    fail_unseen(tmp_path / "failed")
    place = tmp_path / "step-00000007"
    with pytest.raises(EarlierSaveError, match=r"has succeeded.*failed.*No space left") as caught:
        NEXT_CALLS[call](place)
    result = caught.value.result
    if "async" in call:
        assert isinstance(result, dcp.AsyncSaveResponse)
        result = result.result(30)
    assert isinstance(result, dcp.CheckpointInfo if call == "manager.save" else Metadata)
    assert load(place) == ([1.0] * 4, 1)  # and it is raised once
    NEXT_CALLS[call](place)


def test_the_error_of_a_later_call_has_the_facts_of_the_save_that_failed(tmp_path):
    fail_unseen(tmp_path / "failed")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c", no_dist=True)
    error = caught.value
    assert (error.checkpoint_id, error.phase, error.failed_ranks) == (str(tmp_path / "failed"), "write", (0,))
    assert isinstance(error, OSError)
    assert isinstance(error.__cause__, CheckpointException)
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), arrived.phase) == (type(error), str(error), "write")
    assert arrived.result.state_dict_metadata.keys() == {"w"}


def test_a_response_does_not_leave_the_process_with_the_error(tmp_path):
    fail_unseen(tmp_path / "failed")
    with pytest.raises(EarlierSaveError) as caught:
        dcp.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert pickle.loads(pickle.dumps(caught.value)).result is None
    caught.value.result.result(30)


def test_a_load_fills_and_then_raises_what_nobody_awaited(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(4)})
    for loads, result in (
        (lambda state: dcp.load(state, checkpoint_id=tmp_path / "step-00000001", no_dist=True), dcp.LoadReport),
        (lambda state: manager.load(state), int),
        (lambda state: manager.load(state, step=1, fallback=True), int),
    ):
        fail_unseen(tmp_path / "failed")
        state = {"w": torch.full((4,), float("nan"))}
        with pytest.raises(EarlierSaveError) as caught:
            loads(state)
        assert isinstance(caught.value.result, result)
        assert state["w"].tolist() == [1.0] * 4


def test_a_manager_that_finds_no_step_tells_of_the_one_that_failed(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    fail_unseen(tmp_path / "failed")
    with pytest.raises(EarlierSaveError):
        manager.load({"w": torch.ones(4)})
    assert manager.load({"w": torch.ones(4)}) is None


def test_a_call_that_fails_itself_raises_its_own_error_and_notes_the_earlier_one(tmp_path):
    fail_unseen(tmp_path / "failed")
    with pytest.raises(CheckpointException, match="no checkpoint at") as caught:
        load(tmp_path / "nowhere")
    assert not isinstance(caught.value, EarlierSaveError)
    assert "No space left" in str(caught.value)
    assert caught.value.earlier.checkpoint_id == str(tmp_path / "failed")
    with pytest.raises(EarlierSaveError):  # it may have been caught by somebody who looked for something else
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c", no_dist=True)


def test_a_damaged_step_that_is_passed_over_takes_no_earlier_failure_along(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    (shard,) = (tmp_path / "step-00000002").glob("*.distcp")
    shard.write_bytes(bytes(len(shard.read_bytes())))
    fail_unseen(tmp_path / "failed")
    state = {"w": torch.zeros(4)}
    with pytest.raises(EarlierSaveError) as caught:
        manager.load(state, fallback=True)
    assert (caught.value.result, state["w"].tolist()) == (1, [1.0] * 4)


def test_what_a_manager_told_once_its_wait_and_close_do_not_tell_again(tmp_path, monkeypatch):
    manager = dcp.CheckpointManager(tmp_path)
    monkeypatch.setenv("RAY_DCP_AGENTS", "0")  # a thread of this process writes

    def refuse(writer, file, memory, *, again=False):
        raise OSError("cannot be written")

    for tell in (manager.wait, manager.close, lambda: manager.save(2, {"w": torch.ones(4)})):
        with monkeypatch.context() as broken:
            broken.setattr(StoreWriter, "write_staged", refuse)
            wait([manager.async_save(1, {"w": torch.ones(4)})])
        with pytest.raises(CheckpointException, match=r"step-00000001.*cannot be written"):
            tell()
        manager.wait()
        manager.close()
        manager.save(3, {"w": torch.ones(4)})


def test_ranks_where_somebody_looked_go_on_and_the_others_are_told_after_the_next_save(tmp_path):
    ranks = ThreadRanks(3)
    groups = [ThreadGroup(ranks, rank) for rank in range(3)]

    def on_rank(rank):
        writer = GatedWriter(tmp_path / "failed", fails=rank == 2)
        writer.gate.set()
        response = dcp.async_save({f"w{rank}": torch.ones(2)}, storage_writer=writer, group=groups[rank])
        if rank == 0:
            assert isinstance(response.exception(30), CheckpointException)
        outcomes = []
        for call in (dcp.save, dcp.async_save, dcp.save):
            state = {f"w{rank}": torch.ones(2)}
            try:
                outcomes.append(call(state, checkpoint_id=tmp_path / f"c{len(outcomes)}", group=groups[rank]))
            except EarlierSaveError as error:
                outcomes.append((error.result, error.failed_ranks))
        return outcomes

    for rank, outcomes in enumerate(require_no_errors(ranks.run(on_rank))):
        first, second, third = outcomes
        if rank:
            first, failed_ranks = first
            assert failed_ranks == (2,)
        assert isinstance(first, Metadata)
        assert isinstance(second.result(30), Metadata)
        assert isinstance(third, Metadata)
    for number in range(3):
        state = {f"w{rank}": torch.zeros(2) for rank in range(3)}
        dcp.load(state, checkpoint_id=tmp_path / f"c{number}", no_dist=True)
        assert all(one.tolist() == [1.0, 1.0] for one in state.values())


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
