"""Overlapped staging: the copy goes on behind the call, and nothing that changes the state gets ahead of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import ConfigError
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.protocol.rank import overlap
from ray_dcp.staging.buffer_errors import StagingMemoryError, TornStagingError
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.write.staged_file import FileToStage
from tests.protocol.gated_store import Gates
from tests.protocol.test_async_save import _no_save_left_behind  # noqa: F401 - a fixture for this file, too
from tests.protocol.test_in_flight import STEPS, Ranks, ended, require_saved, staged_in
from tests.ranks import require_no_errors
from tests.slack import within

pytestmark = pytest.mark.timeout(120)


class Copying:
    """The copies of all saves: each waits until it is let go, or fails."""

    def __init__(self, monkeypatch) -> None:
        self.go, self.fails_with = threading.Event(), None
        copy_to = FileToStage.copy_to

        def wait_and_copy(file, memory):
            assert self.go.wait(within(60))
            if self.fails_with is not None:
                raise self.fails_with
            return copy_to(file, memory)

        monkeypatch.setattr(FileToStage, "copy_to", wait_and_copy)


@pytest.fixture
def copying(monkeypatch) -> Copying:
    assert not overlap._under_way, "a test before has left a staging"
    yield Copying(monkeypatch)
    overlap._under_way.clear()


@pytest.fixture(params=["alone", "ranks", "agent"])
def ranks(request) -> Ranks:
    return Ranks(request.param)


def begin(ranks: Ranks, place: str, value: int, **options: Any) -> list[Any]:
    """The responses of overlapped saves of ``value``; Python values are others by then, tensors are not."""
    ranks.change_to(value)

    def save(rank, group, state):
        response = dcp.async_save(state, checkpoint_id=place, group=group, overlap=True, **options)
        state["list"][0] = state["list"][1][0] = -1
        return response

    return require_no_errors(ranks.do(save))


def test_it_returns_before_the_copy_and_saves_what_was_there_at_the_call(ranks, tmp_path, copying):
    gates = Gates(tmp_path, open=True)
    for value, folder in enumerate(STEPS, 1):
        copying.go.clear()
        responses = begin(ranks, gates.url(folder), value, max_in_flight=3)
        assert not any(one.staging_completion.done() or one.done() for one in responses)
        copying.go.set()
        with dcp.staged():
            assert all(one.staging_completion.done() for one in responses)
            ranks.change_to(-1)
        assert not overlap._under_way
    ranks.do(lambda rank, group, state: group.background.settle())
    assert ended(responses) == [None] * ranks.world_size
    assert gates.committed == list(STEPS)
    for value, folder in enumerate(STEPS, 1):
        require_saved(gates, folder, value)


OPTIMIZERS = [{}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("options", OPTIMIZERS, ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("is_registered", [False, True], ids=["", "staged(optimizer)"])
def test_a_step_of_an_optimizer_waits_for_it(tmp_path, copying, options, is_registered):
    """Torch does not count what a fused one changes in place: nobody would see that the copy is torn."""
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0, **options)
    hook = dcp.staged(optimizer) if is_registered else None
    weight.grad = torch.ones(1000)
    response = dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "c", no_dist=True, overlap=True)
    step = threading.Thread(target=optimizer.step)
    step.start()
    step.join(0.05)
    assert step.is_alive()
    assert weight[0] == 1
    copying.go.set()
    step.join(within(60))
    assert response.exception(within(60)) is None
    assert weight[0] == 0
    loaded = {"w": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(loaded["w"], torch.ones(1000))
    if hook is not None:
        hook.remove()
        assert not optimizer._optimizer_step_pre_hooks


def test_what_was_changed_meanwhile_is_not_committed_on_any_rank(ranks, tmp_path, copying):
    responses = begin(ranks, f"{tmp_path}/c", 1)
    buffers = staged_in(ranks)
    ranks.states[-1]["all"].add_(1)
    with torch.no_grad():
        next(iter(ranks.states[-1]["rows"].chunks.values()))[0].fill_(7)  # a view of it
    copying.go.set()
    for error in ended(responses):
        assert isinstance(error.__cause__, TornStagingError)
        assert (error.phase, error.failed_ranks) == ("stage", (ranks.world_size - 1,))
        assert "rows" in error.__cause__.names
    assert not (tmp_path / "c" / ".metadata").exists()
    with pytest.raises(CheckpointException, match="changed in place while they were copied"):
        dcp.staged().wait()
    copying.go.set()
    again = begin(ranks, f"{tmp_path}/d", 2)
    assert ended(again) == [None] * ranks.world_size
    assert staged_in(ranks) == buffers


def test_a_small_tensor_that_shares_the_record_of_an_equal_one_is_watched_too(tmp_path, copying):
    state = {f"step{number}": torch.tensor(5.0) for number in range(3)}
    response = dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True, overlap=True)
    state["step2"].add_(1)
    copying.go.set()
    assert response.exception(within(60)).__cause__.names == ("step2",)


def test_a_copy_that_fails_is_told_by_the_response_and_by_who_waits_once(tmp_path, copying):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3)
    hook = dcp.staged(optimizer)
    copying.fails_with = MemoryError("no room")
    copying.go.set()
    response = dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "c", no_dist=True, overlap=True)
    with pytest.raises(CheckpointException, match="no room") as caught:
        optimizer.step()
    assert weight[0] == 1
    assert response.exception() is caught.value
    assert isinstance(response.staging_completion.exception(), CheckpointException)
    optimizer.step()
    hook.remove()
    assert weight[0] == 0
    copying.fails_with = None
    dcp.save({"w": weight}, checkpoint_id=tmp_path / "d", no_dist=True)  # it was told


def test_an_optimizer_that_is_not_asked_for_waits_and_raises_nothing(tmp_path, copying):
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    copying.fails_with = MemoryError("no room")
    copying.go.set()
    response = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True, overlap=True)
    other.step()
    assert response.staging_completion.done()
    assert response.exception(within(60)).phase == "stage"


def test_with_a_planner_of_the_users_nothing_overlaps(tmp_path):
    class Planner(StatePlanner):
        pass

    weight = torch.ones(3)
    response = dcp.async_save(
        {"w": weight}, checkpoint_id=tmp_path / "c", no_dist=True, overlap=True, planner=Planner()
    )
    assert response.staging_completion.done()
    weight.zero_()
    assert response.exception(within(60)) is None
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert loaded["w"].tolist() == [1.0] * 3


def test_without_memory_it_is_written_before_the_call_returns(tmp_path, monkeypatch):
    def refuse(nbytes):
        raise StagingMemoryError(nbytes=nbytes, available_nbytes=0, reason="it would not fit")

    monkeypatch.setattr(SharedBuffer, "create", refuse)
    ranks = Ranks("ranks")
    responses = begin(ranks, f"{tmp_path}/c", 1)
    assert all(one.staging_completion.done() for one in responses)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2
    assert ended(responses) == [None] * 2


def test_a_thing_that_is_no_optimizer_is_refused():
    with pytest.raises(ConfigError, match="it takes no step hooks"):
        dcp.staged(torch.nn.Linear(1, 1))
