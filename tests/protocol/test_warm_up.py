"""Warm-ups: what the first asynchronous save needs is there before it."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import ConfigError
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.staging.buffer_errors import StagingMemoryError
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.protocol.test_async_save import _no_save_left_behind  # noqa: F401 - a fixture for this file, too
from tests.protocol.test_in_flight import Ranks, ended, staged_in
from tests.ranks import require_no_errors
from tests.slack import within

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["alone", "ranks", "agent"])
def ranks(request) -> Ranks:
    return Ranks(request.param)


def warm_up(ranks: Ranks, **options: Any) -> list[Any]:
    return ranks.do(lambda rank, group, state: dcp.warm_up(state, group=group, **options))


def refuse(nbytes):
    raise StagingMemoryError(nbytes=nbytes, available_nbytes=0, reason="it would not fit")


@pytest.mark.parametrize("num_buffers", [2, 3])
def test_saves_after_it_take_no_memory(ranks, tmp_path, monkeypatch, num_buffers):
    sizes = require_no_errors(warm_up(ranks, max_in_flight=num_buffers))
    before = staged_in(ranks)
    for group, nbytes, buffers in zip(ranks.groups, sizes, before, strict=True):
        assert len(buffers) == num_buffers
        assert group.background.buffers.nbytes == num_buffers * -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    monkeypatch.setattr(SharedBuffer, "create", refuse)
    responses = [ranks.save(f"{tmp_path}/{value}", value, max_in_flight=num_buffers) for value in range(1, 5)]
    assert [ended(of_save) for of_save in responses] == [[None] * ranks.world_size] * 4
    assert staged_in(ranks) == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1", "2", "3", "4"]


def test_each_rank_has_memory_for_what_it_writes_and_no_more(tmp_path):
    """As in data-parallel training: every rank has all, and writes a part."""
    ranks, tensors = Ranks("ranks"), {f"w{number}": torch.full((10_000,), float(number)) for number in range(8)}
    nbytes = require_no_errors(ranks.do(lambda rank, group, state: dcp.warm_up(tensors, group=group)))
    assert all(4 * 40_000 <= one < 4 * 40_000 + 10_000 for one in nbytes)
    saved = ranks.do(lambda rank, group, state: dcp.async_save(tensors, checkpoint_id=tmp_path / "c", group=group))
    assert ended(saved) == [None] * 2
    assert [one.stat().st_size for one in sorted((tmp_path / "c").glob("*.distcp"))] == nbytes


def test_the_agent_is_up_and_takes_the_first_save_before_that_returns(tmp_path):
    ranks = Ranks("agent")
    ranks.agent.is_up.clear()
    warmed: list[Any] = []
    thread = threading.Thread(target=lambda: warmed.extend(warm_up(ranks)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    ranks.agent.is_up.set()
    thread.join(within(60))
    require_no_errors(warmed)
    responses = ranks.save(f"{tmp_path}/c", 1)
    assert sorted(ranks.agent.taken) == [(0, 1), (1, 1)]
    assert ended(responses) == [None] * 2


def test_with_a_planner_of_the_users_nothing_is_known_ahead():
    class Planner(StatePlanner):
        pass

    ranks = Ranks("ranks")
    assert ranks.do(lambda rank, group, state: dcp.warm_up(state, group=group, planner=Planner())) == [0, 0]
    assert staged_in(ranks) == [set(), set()]


def test_where_there_is_no_memory_it_says_what_to_do_and_saves_go_on(ranks, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(SharedBuffer, "create", refuse)
    assert all(nbytes > 0 for nbytes in require_no_errors(warm_up(ranks)))
    assert "Give the process more memory, or have fewer saves in flight" in caplog.text
    assert ended(ranks.save(f"{tmp_path}/c", 1)) == [None] * ranks.world_size


def test_it_stays_within_the_memory_that_staging_may_take(ranks, monkeypatch):
    one = 1 << 20
    monkeypatch.setenv("RAY_DCP_STAGING_NBYTES", str(one))
    state = {"w": torch.ones(one // 5)}  # of two buffers one fits
    require_no_errors(ranks.do(lambda rank, group, _: dcp.warm_up({f"w{rank}": state["w"]}, group=group)))
    assert [len(buffers) for buffers in staged_in(ranks)] == [1] * ranks.world_size


def test_a_manager_warms_up_for_its_saves(tmp_path):
    manager, state = dcp.CheckpointManager(tmp_path, max_in_flight=3), {"w": torch.ones(1000)}
    assert manager.warm_up(state) > 4000
    from ray_dcp.api import alone

    assert len(alone.background.buffers._free) == 3
    assert manager.list() == []
    assert manager.async_save(1, state).exception(within(60)) is None


def test_a_rank_that_cannot_warm_up_tells_the_others(tmp_path):
    ranks = Ranks("ranks")

    def warm(rank, group, state):
        return dcp.warm_up(state, group=group, **({"max_in_flight": 0} if rank == 1 else {}))

    first, second = ranks.do(warm)
    assert isinstance(second, ConfigError)
    assert isinstance(first, CheckpointException)
    assert (first.kind, first.failed_ranks) == ("warm-up", (1,))
    require_no_errors(warm_up(ranks))
