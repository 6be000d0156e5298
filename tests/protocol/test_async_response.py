"""What ``async_save`` returns: torch's response and torch's future in one, and nothing that cancels a save."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import threading
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait

import cloudpickle
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse as TorchAsyncSaveResponse

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.api import alone
from ray_dcp.errors import EarlierSaveError
from ray_dcp.protocol.call import phase
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.settings import Phase
from tests.protocol.test_async_save import GatedWriter, _no_save_left_behind  # noqa: F401 - a fixture for this file, too
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors


def begin(place, *, fails=False, **options):
    """An asynchronous save that waits at its writer's gate."""
    writer = GatedWriter(place, fails=fails)
    return writer, dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True, **options)


def loaded(place):
    state = {"w": torch.full((4,), float("nan"))}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    return state["w"].tolist()


def test_it_is_torchs_response_and_a_future(tmp_path):
    writer, response = begin(tmp_path / "c", async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    assert isinstance(response, TorchAsyncSaveResponse)
    assert isinstance(response, dcp.AsyncSaveResponse)
    assert isinstance(response, Future)
    assert isinstance(response.upload_completion, Future)
    assert [field.name for field in dataclasses.fields(response)] == ["staging_completion", "upload_completion"]
    assert (response.running(), response.done(), response.cancelled()) == (True, False, False)
    assert response.staging_completion.result(0) is None
    assert "running" in repr(response)
    seen = []
    response.add_done_callback(lambda future: seen.append(future.result()))
    response.upload_completion.add_done_callback(lambda future: seen.append(future.result()))
    writer.gate.set()
    metadata = response.result(30)
    assert isinstance(metadata, Metadata)
    assert response.upload_completion.result() is metadata
    assert (response.running(), response.done(), response.exception()) == (False, True, None)
    assert seen == [metadata, metadata]
    assert {response: 1}[response] == 1


@pytest.mark.timeout(60)
def test_it_is_waited_for_as_any_future(tmp_path):
    writer, response = begin(tmp_path / "c")
    other: Future[None] = Future()
    other.set_result(None)
    assert wait([response, other], return_when=FIRST_COMPLETED).not_done == {response}
    with pytest.raises(TimeoutError):
        response.result(0.01)
    writer.gate.set()
    assert set(as_completed([response, other], timeout=30)) == {response, other}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("future", ["the response", "upload_completion", "staging_completion"])
def test_a_save_under_way_cannot_be_cancelled(tmp_path, future):
    writer, response = begin(tmp_path / "c")
    of_torch = response if future == "the response" else getattr(response, future)
    assert of_torch.cancel() is False
    assert not of_torch.cancelled()
    writer.gate.set()
    dcp.save({"w": torch.full((4,), 2.0)}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert isinstance(response.result(30), Metadata)
    assert response.cancel() is False
    assert (loaded(tmp_path / "c"), loaded(tmp_path / "d")) == ([1.0] * 4, [2.0] * 4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_that_asyncio_gives_up_changes_nothing(tmp_path, fails):
    async def wait_a_moment(response):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(response), 0.01)
        task = asyncio.ensure_future(asyncio.wrap_future(response.upload_completion))
        await asyncio.sleep(0)
        assert task.cancel()
        await asyncio.sleep(0.01)

    writer, response = begin(tmp_path / "c", fails=fails)
    asyncio.run(wait_a_moment(response))
    assert response.running()
    writer.gate.set()
    if fails:  # a wait that was given up has looked at nothing
        with pytest.raises(EarlierSaveError):
            dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "d", no_dist=True)
    else:
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "d", no_dist=True)
        assert loaded(tmp_path / "c") == [1.0] * 4


@pytest.mark.timeout(60)
def test_asyncio_awaits_it_and_has_looked(tmp_path):
    async def ended(response):
        return await asyncio.wrap_future(response)

    writer, response = begin(tmp_path / "c")
    writer.gate.set()
    assert isinstance(asyncio.run(ended(response)), Metadata)
    writer, response = begin(tmp_path / "d", fails=True)
    writer.gate.set()
    with pytest.raises(CheckpointException, match="No space left"):
        asyncio.run(ended(response))
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "e", no_dist=True)


def test_a_wait_that_is_over_too_early_has_looked_at_nothing(tmp_path):
    writer, response = begin(tmp_path / "c", fails=True)
    with pytest.raises(TimeoutError):
        response.result(0.01)
    with pytest.raises(TimeoutError):
        response.exception(0.01)
    writer.gate.set()
    with pytest.raises(EarlierSaveError):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "d", no_dist=True)


@pytest.mark.timeout(60)
def test_a_hook_of_the_save_itself_may_make_a_call(tmp_path):
    class Asking(dcp.StoreWriter):
        def write_data(self, plan, planner):
            dcp.save({"w": torch.full((4,), 2.0)}, checkpoint_id=tmp_path / "inner", no_dist=True)
            return super().write_data(plan, planner)

    dcp.async_save({"w": torch.ones(4)}, storage_writer=Asking(tmp_path / "c"), no_dist=True).result(30)
    assert (loaded(tmp_path / "c"), loaded(tmp_path / "inner")) == ([1.0] * 4, [2.0] * 4)


@pytest.mark.timeout(60)
def test_a_system_without_threads_fails_the_save_for_all_ranks(tmp_path, monkeypatch):
    ranks = ThreadRanks(2)
    groups = [ThreadGroup(ranks, rank) for rank in range(2)]
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "ray_dcp-save" and thread._args[2].rank == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    def on_rank(rank):
        return dcp.async_save({f"w{rank}": torch.ones(2)}, checkpoint_id=tmp_path / "c", group=groups[rank]).result(30)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for outcome in ranks.run(on_rank):
            assert isinstance(outcome, CheckpointException)
            assert outcome.failed_ranks == (1,)
    require_no_errors(ranks.run(on_rank))


def test_a_save_whose_thread_is_at_work_when_it_has_started_is_seen_to_be(tmp_path, monkeypatch):
    """Else the coordinator would hear of no progress, and take a long write for a stall."""
    call, at_work, looked_at = alone.start_call("save", str(tmp_path)), threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_and_wait(thread):
        start(thread)
        assert at_work.wait(30)

    def save():
        with phase(call, Phase.WRITE):
            at_work.set()
            assert looked_at.wait(30)

    with monkeypatch.context() as slow:
        slow.setattr(threading.Thread, "start", start_and_wait)
        response = BackgroundSaves().start(save, call)
    assert call.progress.phase == Phase.WRITE
    looked_at.set()
    response.result(30)
    assert call.progress.phase is None


# Stagers.


class LaterStager(AsyncStager):
    """Stages when the test lets it: a copy that overlaps with the next step of the training."""

    def __init__(self, fails=False):
        self.staging: Future = Future()
        self.fails = fails
        self.num_synchronized = 0

    def stage(self, state_dict):
        self.state_dict = state_dict
        return self.staging

    def copy(self):
        if self.fails:
            self.staging.set_exception(MemoryError("no room"))
        else:
            self.staging.set_result({key: value.clone() for key, value in self.state_dict.items()})

    def synchronize_staging(self):
        self.num_synchronized += 1

    def close(self):
        pass


@pytest.mark.timeout(60)
def test_a_stager_that_goes_on_is_not_waited_for(tmp_path):
    stager, state = LaterStager(), {"w": torch.ones(4)}
    response = dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager, no_dist=True)
    assert (response.staging_completion.done(), response.done()) == (False, False)
    assert response.staging_completion.cancel() is False
    stager.copy()
    assert response.staging_completion.result(30) is None
    state["w"].fill_(9)
    assert isinstance(response.result(30), Metadata)
    assert loaded(tmp_path / "c") == [1.0] * 4
    assert stager.num_synchronized == 0  # as torch: it has the future


@pytest.mark.timeout(60)
def test_a_stager_that_fails_later_fails_both_futures_and_all_ranks(tmp_path):
    ranks = ThreadRanks(2)
    groups = [ThreadGroup(ranks, rank) for rank in range(2)]

    def on_rank(rank):
        stager = LaterStager(fails=rank == 1)
        state = {f"w{rank}": torch.ones(2)}
        response = dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager, group=groups[rank])
        stager.copy()
        return response.staging_completion.exception(30), response.exception(30)

    (first_staged, first), (second_staged, second) = ranks.run(on_rank)
    assert first_staged is None
    assert isinstance(second_staged, MemoryError)
    assert (first.phase, first.failed_ranks, second.failed_ranks) == ("stage", (1,), (1,))
    assert not (tmp_path / "c" / ".metadata").exists()


class StagingWriter(FileSystemWriter):
    """A writer from before there were stagers: it is one itself."""

    _synchronize_after_execute = True

    def __init__(self, *args):
        super().__init__(*args)
        self.staged, self.num_synchronized = [], 0

    def stage(self, state_dict):
        self.staged.append(sorted(state_dict))
        return super().stage(state_dict)

    def synchronize_staging(self):
        self.num_synchronized += 1


def test_a_writer_that_is_a_stager_stages_by_its_own_stage(tmp_path):
    writer, state = StagingWriter(tmp_path / "c"), {"w": torch.ones(4)}
    response = dcp.async_save(state, storage_writer=writer, no_dist=True)
    state["w"].fill_(9)
    response.result(30)
    assert (writer.staged, writer.num_synchronized) == ([["w"]], 1)
    assert loaded(tmp_path / "c") == [1.0] * 4
    writer._synchronize_after_execute = False
    dcp.async_save(state, storage_writer=writer, no_dist=True).result(30)
    assert (len(writer.staged), writer.num_synchronized) == (2, 1)


def test_a_stager_that_is_given_goes_before_the_writers_own(tmp_path):
    writer, stager = StagingWriter(tmp_path / "c"), LaterStager()
    response = dcp.async_save({"w": torch.ones(4)}, storage_writer=writer, async_stager=stager, no_dist=True)
    stager.copy()
    response.result(30)
    assert writer.staged == []


def test_a_synchronous_save_stages_nothing(tmp_path):
    writer = StagingWriter(tmp_path / "c")
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, no_dist=True)
    assert writer.staged == []


def test_what_torchs_own_writer_could_not_stage_is_staged_all_the_same(tmp_path):
    chunk = torch.ones(4)
    state = {"w": LocalShards((4,), {(0,): chunk})}
    response = dcp.async_save(state, storage_writer=FileSystemWriter(tmp_path / "c"), no_dist=True)
    chunk.fill_(9)
    response.result(30)
    assert loaded(tmp_path / "c") == [1.0] * 4


def test_a_copy_is_the_response_itself_and_it_goes_to_no_other_process(tmp_path):
    """A copy stayed "running" for ever: the thread that writes does not know it."""
    writer, response = begin(tmp_path / "c")
    for future in (response, response.staging_completion):
        copies = copy.copy(future), copy.deepcopy(future), copy.deepcopy({"a": [future]})["a"][0]
        assert all(one is future for one in copies)
    told = []
    for _ in ("running", "done"):
        for dump in (pickle.dumps, cloudpickle.dumps):
            for future in (response, response.staging_completion):
                with pytest.raises(TypeError, match="goes on in the process that has begun it"):
                    dump(future)
                told.append(future)
        writer.gate.set()
        response.result(30)
    assert len(told) == 8
