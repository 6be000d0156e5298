"""Several asynchronous saves in flight: each with its own values, in order, none in the way of another."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import ConfigError, EarlierSaveError
from ray_dcp.protocol.rank import remote_call
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.protocol.solo import SoloGroup
from ray_dcp.staging.buffer_errors import SavesInFlightError, SaveSkippedError
from tests.protocol.agents_in_process import ThreadAgent
from tests.protocol.gated_store import Gates
from tests.protocol.test_async_save import _no_save_left_behind  # noqa: F401 - a fixture for this file, too
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors
from tests.slack import within

pytestmark = pytest.mark.timeout(120)
ROWS, COLUMNS = 4, 3
STEPS = ("step-00000001", "step-00000002", "step-00000003")


class Ranks:
    """Two ranks with an agent or without, or one process alone: whoever writes, the same must come of it."""

    def __init__(self, who: str) -> None:
        self.world_size = 1 if who == "alone" else 2
        self.groups: list[Any] = [SoloGroup()]
        self.agent = None
        if who != "alone":
            ranks = ThreadRanks(2)
            self.coordinator = ranks.coordinator
            self.agent = ThreadAgent([ranks.coordinator]) if who == "agent" else None
            self.groups = [ThreadGroup(ranks, rank, self.agent) for rank in range(2)]
            self._ranks = ranks
        self.states = [self._state(rank) for rank in range(self.world_size)]

    def _state(self, rank: int) -> dict[str, Any]:
        share = ROWS // self.world_size
        rows = torch.zeros(share, COLUMNS)
        shards = LocalShards((ROWS, COLUMNS), {(rank * share, 0): rows})
        return {"rows": shards, "list": [0, [0]], "all": torch.zeros(5)}

    def change_to(self, value: int) -> None:
        """All ranks' values, in place."""
        for state in self.states:
            for chunk in state["rows"].chunks.values():
                chunk.fill_(value)
            state["all"].fill_(value)
            state["list"][0] = state["list"][1][0] = value

    def do(self, on_rank) -> list[Any]:
        """What ``on_rank(rank, group, state)`` returns or raises on each rank."""
        outcome: list[Any] = [None] * self.world_size

        def run(rank: int) -> None:
            try:
                outcome[rank] = on_rank(rank, self.groups[rank], self.states[rank])
            except BaseException as error:
                outcome[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(within(60))
            assert not thread.is_alive(), "a rank does not come back"
        return outcome

    def save(self, place: str, value: int, **options: Any) -> list[Any]:
        """The responses of a save of ``value``; the state is another one as soon as they are there."""
        self.change_to(value)
        saved = self.do(lambda rank, group, state: dcp.async_save(state, checkpoint_id=place, group=group, **options))
        self.change_to(-1)
        return saved


@pytest.fixture(params=["alone", "ranks", "agent"])
def ranks(request) -> Ranks:
    return Ranks(request.param)


@pytest.fixture
def gates(tmp_path) -> Gates:
    return Gates(tmp_path)


def ended(responses: list[Any]) -> list[Any]:
    """How saves ended: None or the failure."""
    return [one.exception(within(60)) for one in responses]


def require_saved(gates: Gates, folder: str, value: int) -> None:
    whole = {"rows": torch.full((ROWS, COLUMNS), -2.0), "list": None, "all": torch.zeros(5)}
    dcp.load(whole, checkpoint_id=gates.url(folder), no_dist=True)
    assert torch.equal(whole["rows"], torch.full((ROWS, COLUMNS), float(value)))
    assert (whole["list"], whole["all"].tolist()) == ([value, [value]], [float(value)] * 5)


def test_each_of_three_has_the_values_of_its_call_and_they_are_committed_in_order(ranks, gates):
    """The gates open the wrong way round: a later one could be there first."""
    manager = dcp.CheckpointManager(gates.root, group=ranks.groups[0])
    seen = []
    gates.on_commit = lambda: seen.append(manager.latest().step)
    responses = []
    for value, folder in enumerate(STEPS, 1):
        responses.append(ranks.save(gates.url(folder), value, max_in_flight=3))
    require_no_errors([one for of_save in responses for one in of_save])
    assert manager.latest() is None
    assert not any(one.done() for of_save in responses for one in of_save)
    gates.open(STEPS[2], STEPS[1])
    assert not any(one.done() for of_save in responses for one in of_save)
    gates.open(STEPS[0])
    assert [ended(of_save) for of_save in responses] == [[None] * ranks.world_size] * 3
    assert gates.committed == list(STEPS)
    assert seen == [1, 2, 3]
    for value, folder in enumerate(STEPS, 1):
        require_saved(gates, folder, value)


def test_one_that_fails_does_not_take_the_next_with_it_and_is_told_once(ranks, gates):
    gates.fail(STEPS[1])
    responses = [ranks.save(gates.url(folder), value, max_in_flight=3) for value, folder in enumerate(STEPS, 1)]
    gates.open()
    assert ended(responses[0]) == ended(responses[2]) == [None] * ranks.world_size
    wait(responses[1], timeout=within(60))  # nobody looks
    assert gates.committed == [STEPS[0], STEPS[2]]
    require_saved(gates, STEPS[0], 1)
    require_saved(gates, STEPS[2], 3)
    for told in ranks.save(gates.url("step-00000004"), 4):
        assert isinstance(told, EarlierSaveError)
        assert "No space left" in str(told)
        assert told.result.exception(within(60)) is None
    require_no_errors(ranks.save(gates.url("step-00000005"), 5))


def test_a_manager_waits_for_all_and_tells_of_each_that_failed(gates):
    gates.fail(STEPS[0])
    gates.fail(STEPS[2])
    manager = dcp.CheckpointManager(gates.root, max_in_flight=3)
    responses = [manager.async_save(step, {"w": torch.full((3,), float(step))}) for step in (1, 2, 3)]
    gates.open()
    for step in (1, 3):
        with pytest.raises(CheckpointException, match=f"step-0000000{step}"):
            manager.wait()
        assert all(one.done() for one in responses)
    manager.wait()
    assert [info.step for info in manager.list()] == [2]
    manager.close()


def begun(ranks: Ranks, place: str, value: int, **options: Any) -> tuple[threading.Thread, list[Any]]:
    """A save that is on its way, in a thread, and the list in which its responses will be."""
    responses: list[Any] = []
    thread = threading.Thread(target=lambda: responses.extend(ranks.save(place, value, **options)))
    thread.start()
    return thread, responses


def test_one_more_waits_until_another_has_ended(ranks, gates):
    first, second = (ranks.save(gates.url(folder), value) for value, folder in enumerate(STEPS[:2], 1))
    thread, third = begun(ranks, gates.url(STEPS[2]), 3)
    thread.join(0.2)
    assert thread.is_alive()
    assert not third
    gates.open(STEPS[0])
    thread.join(within(60))
    assert [one.done() for one in (*first, *second, *third)] == [
        *[True] * ranks.world_size,
        *[False] * (2 * ranks.world_size),
    ]
    gates.open()
    assert ended(third) == [None] * ranks.world_size
    for value, folder in enumerate(STEPS, 1):
        require_saved(gates, folder, value)


def test_one_more_is_skipped_by_all_where_one_rank_is_busy(ranks, gates):
    """Ranks hear of a commit one after the other: what each would decide by itself is not the same."""
    first = ranks.save(gates.url(STEPS[0]), 1)
    busy_rank = ranks.world_size - 1

    def save_unless_busy(rank, group, state):
        limit = 1 if rank == busy_rank else 7
        return dcp.async_save(
            state, checkpoint_id=gates.url(STEPS[1]), group=group, max_in_flight=limit, when_busy="skip"
        )

    skipped = require_no_errors(ranks.do(save_unless_busy))
    for response in skipped:
        assert response.skipped
        assert response.done()
        assert response.staging_completion.done()
        with pytest.raises(SaveSkippedError, match="max_in_flight allows") as caught:
            response.result()
        assert (caught.value.max_in_flight, caught.value.busy_ranks) == (1, (busy_rank,))
    gates.open()
    assert ended(first) == [None] * ranks.world_size
    assert not first[0].skipped
    third = require_no_errors(ranks.save(gates.url(STEPS[2]), 3, max_in_flight=1, when_busy="skip"))
    assert not any(one.skipped for one in third)
    assert ended(third) == [None] * ranks.world_size
    assert gates.committed == [STEPS[0], STEPS[2]]


def test_one_more_raises_on_all_ranks_alike(ranks, gates):
    first = ranks.save(gates.url(STEPS[0]), 1, max_in_flight=1)
    for error in ranks.save(gates.url(STEPS[1]), 2, max_in_flight=1, when_busy="error"):
        assert isinstance(error, CheckpointException)
        assert isinstance(error.__cause__, SavesInFlightError)
        assert (error.phase, error.__cause__.max_in_flight) == ("plan", 1)
    gates.open()
    assert ended(first) == [None] * ranks.world_size
    require_no_errors(ranks.save(gates.url(STEPS[2]), 3, max_in_flight=1, when_busy="error"))


def test_a_save_or_load_that_is_not_asynchronous_waits_for_all(ranks, gates):
    responses = [ranks.save(gates.url(folder), value) for value, folder in enumerate(STEPS[:2], 1)]
    found: list[Any] = []

    def load(rank, group, state):
        dcp.load(state, checkpoint_id=gates.url(STEPS[1]), group=group)
        return all(one[rank].done() for one in responses), state["list"]

    thread = threading.Thread(target=lambda: found.extend(ranks.do(load)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gates.open()
    thread.join(within(60))
    assert found == [(True, [2, [2]])] * ranks.world_size


@pytest.mark.parametrize("settings", [{"max_in_flight": 0}, {"max_in_flight": True}, {"when_busy": "drop"}], ids=repr)
def test_a_limit_that_makes_no_sense_is_refused_for_all_ranks(settings, tmp_path):
    ranks = Ranks("ranks")

    def save(rank, group, state):
        return dcp.async_save(state, checkpoint_id=tmp_path / "c", group=group, **(settings if rank == 1 else {}))

    first, second = ranks.do(save)
    assert isinstance(second, ConfigError)
    assert second.setting == next(iter(settings))
    assert isinstance(first, CheckpointException)
    assert first.failed_ranks == (1,)
    require_no_errors(ranks.save(tmp_path / "d", 1))


def test_what_the_variables_say_holds_where_no_argument_does(gates, monkeypatch):
    monkeypatch.setenv("RAY_DCP_MAX_IN_FLIGHT", "1")
    monkeypatch.setenv("RAY_DCP_WHEN_BUSY", "skip")
    manager = dcp.CheckpointManager(gates.root)
    assert not manager.async_save(1, {"w": torch.ones(2)}).skipped
    assert manager.async_save(2, {"w": torch.ones(2)}).skipped
    monkeypatch.setenv("RAY_DCP_WHEN_BUSY", "drop")
    with pytest.raises(ConfigError, match=r"RAY_DCP_WHEN_BUSY: 'drop' is none of 'wait', 'skip', 'error'"):
        dcp.CheckpointManager(gates.root)
    gates.open()
    manager.close()


def test_a_skipped_step_stays_due_and_costs_nothing(gates):
    manager = dcp.CheckpointManager(gates.root, max_in_flight=1, when_busy="skip")
    state = {"w": torch.ones(2)}
    manager.async_save(1, state)
    num_stalls = len(manager._pacer._stalls)
    until = next(step for step in range(2, 100) if manager.due(step))
    assert manager.async_save(until, state).skipped
    assert manager.due(until + 1)
    assert len(manager._pacer._stalls) == num_stalls
    gates.open()
    manager.wait()
    assert not manager.async_save(until + 1, state).skipped
    assert not manager.due(until + 2)
    manager.close()


# With an agent.


def staged_in(ranks: Ranks) -> list[set[int]]:
    """The buffers of each rank, by inode."""
    return [
        {one.name.inode for one in (*group.background.buffers._free, *group.background.buffers._taken)}
        for group in ranks.groups
    ]


def test_there_are_as_many_buffers_as_saves_in_flight_and_they_are_used_again(gates):
    ranks = Ranks("agent")
    gates.open()
    for value in range(1, 7):
        require_no_errors(ranks.save(gates.url(f"step-{value:08}"), value))
        if value == 2:
            ranks.do(lambda rank, group, state: group.background.settle())
            before = staged_in(ranks)
    ranks.do(lambda rank, group, state: group.background.settle())
    assert [len(one) for one in before] <= [2, 2]
    assert all(len(one | other) <= 2 for one, other in zip(before, staged_in(ranks), strict=True))
    assert gates.committed == [f"step-{value:08}" for value in range(1, 7)]


def test_saves_whose_agent_is_gone_are_written_by_their_ranks_in_order(gates):
    ranks = Ranks("agent")
    responses = [ranks.save(gates.url(folder), value, max_in_flight=3) for value, folder in enumerate(STEPS[:2], 1)]
    gates.wait_for_waiting(2)
    ranks.agent.die()
    responses.append(ranks.save(gates.url(STEPS[2]), 3, max_in_flight=3))
    gates.open()
    assert [ended(of_save) for of_save in responses] == [[None] * 2] * 3
    assert gates.committed == list(STEPS)
    for value, folder in enumerate(STEPS, 1):
        require_saved(gates, folder, value)


def test_a_save_is_not_handed_over_before_an_earlier_one(gates):
    """The agent has jobs in the order in which they come: it would wait for the commit of a save it is yet to get."""
    ranks = Ranks("agent")
    ranks.agent.is_up.clear()
    first = ranks.save(gates.url(STEPS[0]), 1)
    take, waits = ranks.agent.take, ranks.agent.is_up.wait
    ranks.agent.is_up.wait = lambda timeout: True if timeout == 0 else waits(timeout)  # it is up for who comes now
    second = ranks.save(gates.url(STEPS[1]), 2)
    assert ranks.agent.taken == []
    assert take
    ranks.agent.is_up.set()
    gates.open()
    assert ended([*first, *second]) == [None] * 4
    numbers = {rank: [number for one, number in ranks.agent.taken if one == rank] for rank in (0, 1)}
    assert numbers == {0: [0, 1], 1: [0, 1]}
    assert gates.committed == list(STEPS[:2])


@pytest.mark.parametrize("speaks", [True, False], ids=["", "unless its agent says nothing"])
def test_the_memory_of_a_save_that_failed_elsewhere_is_used_again(gates, monkeypatch, speaks):
    """It was left to the agent for good, and the next save took memory anew."""
    monkeypatch.setattr(remote_call, "DEPUTY_ENDS_IN_S", 60.0 if speaks else 0.1)
    ranks = Ranks("agent")
    gates.fail(STEPS[0], rank=1)
    first = ranks.save(gates.url(STEPS[0]), 1, max_in_flight=1)
    before = staged_in(ranks)
    gates.wait_for_waiting(2)
    gates.open_for(STEPS[0], 1)
    error = first[1].exception(within(60))
    call = next(one for one in ranks._ranks.calls if one.rank == 0)
    call.progress.interrupt(call.as_failed(error))  # as its pulse does, which hears of it before the agent may
    assert [error.failed_ranks for error in ended(first)] == [(1,), (1,)]
    buffers = ranks.groups[0].background.buffers
    assert (len(buffers._taken), len(buffers._free)) == (1, 0)
    if speaks:
        gates.open_for(STEPS[0], 0)  # and the agent hears of it there
    with buffers._changed:
        assert buffers._changed.wait_for(lambda: not buffers._taken, timeout=within(60))
    gates.open()
    second = require_no_errors(ranks.save(gates.url(STEPS[1]), 2, max_in_flight=1))
    assert ended(second) == [None] * 2
    after = staged_in(ranks)
    assert (after[0] == before[0], after[1] == before[1]) == (speaks, True)


def test_what_a_child_process_writes_is_committed_in_order(tmp_path):
    group, state = SoloGroup(), {"w": torch.zeros(1000)}
    dcp.async_save(state, checkpoint_id=tmp_path / "first", group=group).result(within(60))  # the child is up by then
    responses = []
    for value in (1, 2, 3):
        state["w"].fill_(value)
        responses.append(dcp.async_save(state, checkpoint_id=tmp_path / f"{value}", group=group, max_in_flight=3))
    assert ended(responses) == [None] * 3
    times = []
    for value in (1, 2, 3):
        dcp.load(state, checkpoint_id=tmp_path / f"{value}", no_dist=True)
        assert torch.equal(state["w"], torch.full((1000,), float(value)))
        times.append((tmp_path / f"{value}" / ".metadata").stat().st_mtime_ns)
    assert times == sorted(times)


# What is the user's.


def test_a_writer_has_one_save_at_a_time(gates):
    writer, group = dcp.StoreWriter(gates.url(STEPS[0])), SoloGroup()
    first = dcp.async_save({"w": torch.ones(2)}, storage_writer=writer, group=group)
    thread = threading.Thread(
        target=lambda: dcp.async_save({"w": torch.zeros(2)}, storage_writer=writer, group=group, when_busy="skip")
    )
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    other = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=gates.url(STEPS[1]), group=group)
    assert not other.done()
    gates.open()
    thread.join(within(60))
    assert not thread.is_alive()
    assert first.exception(within(60)) is None


def test_numbers_of_saves_in_flight_are_those_before_a_call():
    saves, release = BackgroundSaves(), threading.Event()
    group = SoloGroup()
    for number in (3, 5):
        call = group.start_call("save")
        call.number = number
        saves.start(lambda: release.wait(within(60)), call)
    assert (saves.numbers_in_flight(9), saves.numbers_in_flight(5), saves.numbers_in_flight(3)) == ((3, 5), (3,), ())
    release.set()
    saves.settle()
    assert saves.numbers_in_flight(9) == ()
