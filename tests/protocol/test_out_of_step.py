"""A rank forgets a call, makes one twice, or two the wrong way round: all are told at once, and are in step again."""

from __future__ import annotations

import pickle
from concurrent.futures import Future

import pytest

from ray_dcp import CheckpointException, RankFailure
from ray_dcp.errors import OutOfStepError, RankAbsentError
from ray_dcp.protocol.coordinator.calls import PATIENCE_S
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.coordinator.small_sessions import SESSIONS, BarrierSession
from ray_dcp.protocol.messages import CallId, encode
from ray_dcp.settings import Limits
from tests.protocol.test_coordinator import Clock

FIRST_PHASE = {"save": "plan", "load": "open", "newest": "choose", "barrier": "arrive"}


@pytest.fixture(autouse=True)
def calls_of_one_phase(monkeypatch) -> None:
    """Which call is which does not depend on what happens in it."""
    for kind, phase in FIRST_PHASE.items():
        monkeypatch.setitem(SESSIONS, kind, type("OnePhase", (BarrierSession,), {"first_phase": phase}))


class Ranks:
    """Ranks that number their calls, and their coordinator."""

    def __init__(self, world_size: int) -> None:
        self.clock = Clock()
        self.num_calls = [0] * world_size
        self.coordinator = self._new_coordinator()
        for rank in range(world_size):
            limits = Limits(arrival_timeout_s=100, stall_timeout_s=50)
            self.coordinator.join(JoinRequest(rank, world_size, f"a{rank}", limits=limits))
        self.coordinator.keep_record()

    def _new_coordinator(self) -> Coordinator:
        return Coordinator("g", clock=self.clock, keep=self._keep)

    def _keep(self, record) -> None:
        self.kept = pickle.dumps(record)

    def restart(self) -> None:
        kept = self.kept
        self.coordinator = self._new_coordinator()
        self.coordinator.restore(pickle.loads(kept))

    def call(self, rank: int, kind: str, about: str = "") -> Future[bytes]:
        call_id = CallId(1, self.num_calls[rank], kind, about)
        self.num_calls[rank] += 1
        return self.send(call_id, rank)

    def send(self, call_id: CallId, rank: int) -> Future[bytes]:
        return self.coordinator.contribute(call_id, rank, FIRST_PHASE[call_id.kind], encode(None))

    def fail(self, rank: int, kind: str, about: str) -> None:
        call_id = CallId(1, self.num_calls[rank], kind, about)
        self.num_calls[rank] += 1
        failure = RankFailure.from_exception(OSError("disk full"), rank=rank, phase="collect")
        self.coordinator.fail(call_id, rank, failure)

    def all_call(self, kind: str, about: str = "", order=(0, 1)) -> None:
        """The next call of all, to which each comes by itself: it works."""
        futures = [self.call(rank, kind, about) for rank in order]
        assert [future.exception(0) for future in futures] == [None] * len(futures)


def told(future: Future[bytes]) -> OutOfStepError:
    """What a call that failed at once has failed with."""
    error = future.exception(0)
    assert isinstance(error, CheckpointException)
    assert isinstance(error.__cause__, OutOfStepError)
    return error.__cause__


in_either_order = pytest.mark.parametrize("order", [(0, 1), (1, 0)])


@in_either_order
def test_who_forgets_a_save_and_who_waits_are_told_at_once_and_the_next_save_works(order):
    ranks = Ranks(2)
    waiting, ahead = ranks.call(0, "save", "/step-1"), ranks.call(1, "save", "/step-2")
    for future in (waiting, ahead):
        error = told(future)
        assert (error.rank, error.call) == (1, "save of /step-2")
        assert (error.others, error.others_call) == ((0,), "save of /step-1")
    assert waiting.exception(0).checkpoint_id == "/step-1"
    assert ahead.exception(0).checkpoint_id == "/step-2"
    ranks.all_call("save", "/step-3", order)
    ranks.all_call("load", "/step-3", order)


def test_who_was_left_behind_is_told_so_at_each_call_that_the_other_has_made_without_it():
    """Both go on by themselves, the one always a call ahead of the other: until they meet."""
    ranks = Ranks(2)
    ranks.call(0, "save", "/step-1")
    told(ranks.call(1, "save", "/step-2"))
    behind = ranks.call(0, "save", "/step-2")
    ahead = ranks.call(1, "save", "/step-3")
    assert told(behind).others_call == "save of /step-1"
    assert not ahead.done()
    assert ranks.call(0, "save", "/step-3").exception(0) is None
    assert ahead.exception(0) is None


@in_either_order
def test_a_call_made_twice(order):
    ranks = Ranks(2)
    ranks.all_call("save", "/step-1", order)
    again, next_one = ranks.call(1, "save", "/step-1"), ranks.call(0, "save", "/step-2")
    assert told(again).others_call == told(next_one).others_call == "save of /step-1"
    ranks.all_call("save", "/step-3", order)


@in_either_order
def test_two_calls_the_wrong_way_round(order):
    ranks = Ranks(2)
    first = [ranks.call(0, "save", "/step-1"), ranks.call(1, "barrier")]
    assert {told(future).call for future in first} == {"barrier"}
    second = {0: "barrier", 1: "save"}
    for rank in order:
        ranks.call(rank, second[rank], "" if rank == 0 else "/step-1")
    ranks.all_call("save", "/step-2", order)


@in_either_order
def test_a_rank_that_catches_an_error_and_tries_again_alone(order):
    ranks = Ranks(2)
    ranks.fail(0, "save", "/step-1")
    assert isinstance(ranks.call(1, "save", "/step-1").exception(0).__cause__, OSError)
    again, next_one = ranks.call(1, "save", "/step-1"), ranks.call(0, "save", "/step-2")
    assert told(again).call == told(next_one).call == "save of /step-2"
    ranks.all_call("save", "/step-3", order)


def test_a_rank_that_fails_in_another_call_than_the_others_is_told_of_with_its_own_error():
    ranks = Ranks(2)
    waiting = ranks.call(0, "save", "/step-1")
    ranks.fail(1, "save", "/stepp-1")
    assert [failure.error_type for failure in waiting.exception(0).rank_failures] == ["OSError", "OutOfStepError"]
    ranks.all_call("save", "/step-1")


def test_a_rank_that_was_not_among_those_out_of_step_makes_the_next_call_with_them():
    ranks = Ranks(3)
    ranks.all_call("barrier", order=(0, 1, 2))
    ranks.call(1, "save", "/step-1")
    told(ranks.call(2, "save", "/step-2"))
    ranks.all_call("save", "/step-3", order=(0, 1, 2))


@in_either_order
def test_ranks_that_all_try_again(order):
    ranks = Ranks(2)
    ranks.fail(0, "save", "/step-1")
    assert isinstance(ranks.call(1, "save", "/step-1").exception(0).__cause__, OSError)
    ranks.all_call("save", "/step-1", order)


def test_each_rank_in_another_call():
    ranks = Ranks(3)
    waiting = [ranks.call(rank, "save", f"/of-rank-{rank}") for rank in range(3)]
    assert [told(future).rank for future in waiting[:2]] == [1, 1]
    ranks.clock.run(ranks.coordinator, PATIENCE_S + 1)  # the others may come to the third as well
    assert told(waiting[2]).rank == 1
    ranks.all_call("save", "/step-1", order=(2, 0, 1))


@in_either_order
def test_after_a_rank_did_not_come_in_time_the_next_call_of_all_works_at_once(order):
    ranks = Ranks(2)
    waiting = ranks.call(0, "save", "/step-1")
    ranks.clock.run(ranks.coordinator, 105)
    assert isinstance(waiting.exception(0).__cause__, RankAbsentError)
    ranks.all_call("save", "/step-2", order)
    ranks.all_call("barrier", order=order)


def test_a_rank_that_comes_too_late_is_told_how_its_call_has_failed_and_joins_no_later_one_of_the_same_name():
    """It would save what it held then, with what the others hold now."""
    ranks = Ranks(2)
    ranks.call(0, "save", "/latest")
    ranks.clock.run(ranks.coordinator, 105)
    going_on = ranks.call(0, "save", "/latest")
    assert isinstance(ranks.call(1, "save", "/latest").exception(0).__cause__, RankAbsentError)
    assert not going_on.done()
    assert ranks.call(1, "save", "/latest").exception(0) is None
    assert going_on.exception(0) is None


def test_a_rank_does_not_wait_long_in_a_call_in_which_the_others_were_before_it():
    """They may make it once more, or not."""
    ranks = Ranks(2)
    ranks.call(0, "save", "/step-1")
    told(ranks.call(1, "save", "/step-2"))
    behind = ranks.call(0, "save", "/step-2")
    assert not behind.done()
    ranks.clock.run(ranks.coordinator, PATIENCE_S + 1)
    assert told(behind).call == "save of /step-2"
    ranks.all_call("save", "/step-3")


def test_a_call_that_all_make_once_more_may_take_as_long_as_it_takes(monkeypatch):
    monkeypatch.setattr(SESSIONS["save"], "next_phase", lambda self, phase: "write" if phase == "plan" else None)
    ranks = Ranks(2)
    ranks.call(0, "save", "/step-1")
    ranks.call(1, "save", "/step-2")
    ranks.all_call("save", "/step-2")
    ranks.clock.run(ranks.coordinator, PATIENCE_S + 1)
    written = [
        ranks.coordinator.contribute(CallId(1, 1, "save", "/step-2"), rank, "write", encode(None)) for rank in (0, 1)
    ]
    assert [future.exception(0) for future in written] == [None, None]


def test_a_rank_whose_argument_was_wrong_is_in_the_call_of_the_others():
    """It does not even know which checkpoint that is about."""
    ranks = Ranks(2)
    waiting = ranks.call(0, "save", "/step-1")
    ranks.fail(1, "save", "")
    assert isinstance(waiting.exception(0).__cause__, OSError)
    ranks.all_call("save", "/step-2")


def test_progress_of_a_rank_in_another_call_is_enough_to_tell_all():
    """It may collect a state dict for minutes before it sends anything."""
    ranks = Ranks(2)
    waiting = ranks.call(0, "save", "/step-1")
    call_id = CallId(1, ranks.num_calls[1], "save", "/step-2")
    failure = ranks.coordinator.report_progress(call_id, 1, "collect", 0, 0)
    assert failure is not None
    assert isinstance(failure.__cause__, OutOfStepError)
    assert told(waiting).call == "save of /step-2"


class TestWhereTheCoordinatorStartsOver:
    @in_either_order
    def test_ranks_that_were_out_of_step_are_not_so_again(self, order):
        ranks = Ranks(2)
        ranks.call(0, "save", "/step-1")
        ranks.clock.run(ranks.coordinator, 105)
        ranks.all_call("save", "/step-2", order)
        ranks.restart()
        ranks.all_call("save", "/step-3", order)

    def test_a_call_that_has_failed_stays_so(self):
        """Rank 0 was told; the answer to rank 1 got lost, or was never asked for."""
        ranks = Ranks(2)
        ranks.fail(0, "save", "/step-1")
        ranks.restart()
        assert isinstance(ranks.call(1, "save", "/step-1").exception(0).__cause__, OSError)
        ranks.all_call("save", "/step-1")

    @pytest.mark.parametrize("kind", ["save", "load", "barrier"])
    def test_who_waits_for_an_answer_that_the_others_have_is_told_and_in_the_next_call_with_them(self, kind):
        ranks = Ranks(2)
        about = "" if kind == "barrier" else "/step-1"
        ranks.all_call(kind, about)
        ranks.restart()
        gone_on = ranks.call(0, "save", "/step-2")
        asks_again = ranks.send(CallId(1, 0, kind, about), 1)
        assert "rank 0 has left this" in str(asks_again.exception(0))
        assert not gone_on.done()
        assert ranks.call(1, "save", "/step-2").exception(0) is None
        assert gone_on.exception(0) is None

    def test_a_save_in_the_background_is_not_left_by_a_barrier(self):
        ranks = Ranks(2)
        ranks.call(0, "save", "/step-1")
        ranks.restart()
        waiting = ranks.call(0, "barrier")
        saves = [ranks.send(CallId(1, 0, "save", "/step-1"), 0), ranks.call(1, "save", "/step-1")]
        assert [future.exception(0) for future in saves] == [None, None]
        assert not waiting.done()
        assert ranks.call(1, "barrier").exception(0) is None


def test_a_save_goes_on_in_the_background_while_one_rank_forgets_a_barrier(monkeypatch):
    monkeypatch.setattr(SESSIONS["save"], "next_phase", lambda self, phase: "write" if phase == "plan" else None)
    ranks = Ranks(2)
    ranks.all_call("save", "/step-1")
    waiting = ranks.call(0, "barrier")
    # It says that it works on its load, in which it waits for its save.
    ahead = ranks.coordinator.report_progress(CallId(1, 1, "load", "/step-0"), 1, "collect", 0, 0)
    ranks.num_calls[1] += 1
    assert told(waiting).others_call == ahead.__cause__.others_call == "barrier"
    written = [
        ranks.coordinator.contribute(CallId(1, 0, "save", "/step-1"), rank, "write", encode(None)) for rank in (0, 1)
    ]
    assert [future.exception(0) for future in written] == [None, None]
    ranks.all_call("barrier")
