"""The plain coordinator: every way a call can end, driven in one thread."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

from ray_dcp import CheckpointException, RankFailure
from ray_dcp.errors import (
    CoordinatorLostError,
    GroupError,
    RankAbsentError,
    RankConflictError,
    RankLostError,
    StaleGenerationError,
    StalledError,
)
from ray_dcp.protocol.coordinator.coordinator import CHECK_INTERVAL_S, Coordinator
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.exception import COORDINATOR
from ray_dcp.protocol.messages import CallId, decode, encode
from ray_dcp.settings import Limits


def formed(world_size: int, coordinator: Coordinator | None = None, tag: str = "a") -> Coordinator:
    coordinator = coordinator or Coordinator("g")
    for rank in range(world_size):
        coordinator.join(JoinRequest(rank, world_size, f"{tag}{rank}"))
    return coordinator


def arrive(coordinator: Coordinator, rank: int, *, number: int = 0, generation: int = 1, kind: str = "barrier"):
    phase = {"barrier": "arrive", "save": "plan", "load": "open"}[kind]
    return coordinator.contribute(CallId(generation, number, kind), rank, phase, encode(None))


def test_a_generation_forms_when_the_last_rank_joins():
    coordinator = Coordinator("g")
    first = coordinator.join(JoinRequest(0, 2, "a0"))
    assert not first.done()
    second = coordinator.join(JoinRequest(1, 2, "a1"))
    assert first.result(0) == second.result(0) == 1


def test_answers_come_when_all_parts_are_there():
    coordinator = formed(2)
    first = arrive(coordinator, 0)
    assert not first.done()
    assert decode(arrive(coordinator, 1).result(0)) is None
    assert decode(first.result(0)) is None


def test_one_ranks_failure_reaches_those_who_wait_and_those_who_come_later():
    coordinator = formed(3)
    waiting = arrive(coordinator, 0)
    failure = RankFailure.from_exception(OSError("disk full"), rank=2, phase="collect")
    coordinator.fail(CallId(1, 0, "barrier"), 2, failure)
    late = arrive(coordinator, 1)
    for future in (waiting, late):
        error = future.exception(0)
        assert isinstance(error, CheckpointException)
        assert error.failed_ranks == (2,)
        assert error.phase == "collect"
        assert isinstance(error.__cause__, OSError)


def test_the_first_failure_wins_and_the_next_call_works():
    coordinator = formed(2)
    waiting = arrive(coordinator, 0)
    for rank, message in ((1, "first"), (0, "second")):
        coordinator.fail(
            CallId(1, 0, "barrier"), rank, RankFailure.from_exception(ValueError(message), rank=rank, phase="write")
        )
    assert "first" in str(waiting.exception(0))
    next_call = [arrive(coordinator, rank, number=1) for rank in (0, 1)]
    assert next_call[0].exception(0) is None


def test_a_lost_rank_fails_the_open_call_and_all_later_ones_until_the_group_re_forms():
    coordinator = formed(2)
    waiting = arrive(coordinator, 0)
    coordinator.member_lost("a1", "killed")
    for future in (waiting, arrive(coordinator, 0, number=1)):
        error = future.exception(0)
        assert error.failed_ranks == (1,)
        assert isinstance(error.__cause__, RankLostError)
    formed(1, coordinator, tag="b")
    assert arrive(coordinator, 0, generation=2).exception(0) is None


def test_ranks_that_their_runner_calls_failed_are_lost():
    coordinator = formed(3)
    waiting = arrive(coordinator, 0)
    coordinator.ranks_failed({1: "out of memory", 7: "no such rank"})
    assert waiting.exception(0).failed_ranks == (1,)
    assert "out of memory" in str(waiting.exception(0))


def test_calls_of_an_older_generation_are_refused_by_name():
    coordinator = formed(2)
    waiting = arrive(coordinator, 0)
    formed(2, coordinator, tag="b")
    assert isinstance(waiting.exception(0).__cause__, StaleGenerationError)
    with pytest.raises(StaleGenerationError, match="generation 1, the group is at 2"):
        arrive(coordinator, 1)


def test_a_late_death_of_an_older_generations_rank_changes_nothing():
    coordinator = formed(2)
    formed(2, coordinator, tag="b")
    waiting = arrive(coordinator, 0, generation=2)
    coordinator.member_lost("a1", "killed long ago")
    arrive(coordinator, 1, generation=2)
    assert waiting.exception(0) is None


def test_two_processes_cannot_be_one_rank():
    coordinator = Coordinator("g")
    first = coordinator.join(JoinRequest(0, 2, "a0"))
    with pytest.raises(RankConflictError, match=r"two processes join as rank 0: a0 .* b0 was refused"):
        coordinator.join(JoinRequest(0, 2, "b0"))
    coordinator.join(JoinRequest(1, 2, "a1"))
    assert first.result(0) == 1


def test_different_world_sizes_are_a_conflict():
    coordinator = Coordinator("g")
    coordinator.join(JoinRequest(0, 2, "a0"))
    with pytest.raises(RankConflictError, match=r"world_size 3, rank 0 \(a0\) with 2"):
        coordinator.join(JoinRequest(1, 3, "a1"))


def test_a_dead_joiner_makes_room_for_its_successor():
    coordinator = Coordinator("g")
    coordinator.join(JoinRequest(0, 2, "a0"))
    coordinator.member_lost("a0", "killed")
    coordinator.join(JoinRequest(0, 2, "b0"))
    assert coordinator.join(JoinRequest(1, 2, "b1")).result(0) == 1


def test_withdrawing_names_who_never_came():
    coordinator = Coordinator("g")
    request = JoinRequest(1, 4, "a1")
    coordinator.join(request)
    coordinator.join(JoinRequest(3, 4, "a3"))
    assert coordinator.withdraw(request) == [0, 2]
    assert coordinator.num_members == 1


def test_a_newer_incarnation_replaces_one_that_waits_and_the_older_cannot_come_back():
    coordinator = Coordinator("g")
    left_behind = coordinator.join(JoinRequest(0, 3, "a0", incarnation="first"))
    joins = [coordinator.join(JoinRequest(r, 2, f"b{r}", incarnation="second")) for r in (0, 1)]
    assert joins[0].result(0) == 1
    assert isinstance(left_behind.exception(0), StaleGenerationError)
    with pytest.raises(StaleGenerationError):
        coordinator.join(JoinRequest(1, 3, "a1", incarnation="first"))


def test_different_calls_at_the_same_place_name_both():
    coordinator = formed(2)
    waiting = arrive(coordinator, 0, kind="barrier")
    other = arrive(coordinator, 1, kind="save")
    assert waiting.exception(0).__cause__ is other.exception(0).__cause__
    assert "rank 1 calls save while rank 0 is in barrier" in str(waiting.exception(0))


class Clock:
    """Time that passes only when told to, with the coordinator looking at its limits all the while."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def run(self, coordinator: Coordinator, seconds: float) -> None:
        for _ in range(int(seconds / CHECK_INTERVAL_S) + 1):
            self.now_s += CHECK_INTERVAL_S
            coordinator.check_limits()


def limited(world_size: int, *, beats: bool = False, **limits: float) -> tuple[Coordinator, Clock]:
    clock = Clock()
    coordinator = Coordinator("g", clock=clock)
    for rank in range(world_size):
        coordinator.join(JoinRequest(rank, world_size, f"a{rank}", limits=Limits(**limits), beats=beats))
    return coordinator, clock


def test_a_rank_that_never_calls_is_named():
    coordinator, clock = limited(3, arrival_timeout_s=600)
    waiting = arrive(coordinator, 0)
    clock.run(coordinator, 590)
    assert not waiting.done()
    clock.run(coordinator, 20)
    assert waiting.exception(0).failed_ranks == (1, 2)
    assert isinstance(waiting.exception(0).__cause__, RankAbsentError)
    assert "rank 1 did not call barrier within 600" in str(waiting.exception(0))


def test_a_rank_that_works_on_the_call_has_arrived():
    coordinator, clock = limited(2, arrival_timeout_s=10, stall_timeout_s=30)
    waiting = arrive(coordinator, 0)
    assert coordinator.report_progress(CallId(1, 0, "barrier"), 1, "collect", 0, 0) is None
    clock.run(coordinator, 29)
    assert not waiting.done()
    clock.run(coordinator, 2)
    error = waiting.exception(0)
    assert error.failed_ranks == (1,)
    assert error.phase == "collect"
    assert isinstance(error.__cause__, StalledError)


def test_a_slow_rank_that_moves_is_never_failed_and_a_silent_one_is():
    coordinator, clock = limited(2, stall_timeout_s=5)
    waiting = arrive(coordinator, 0)
    for mark in range(100):
        coordinator.report_progress(CallId(1, 0, "barrier"), 1, "write", mark, mark << 20)
        clock.run(coordinator, 4)
    assert not waiting.done()
    clock.run(coordinator, 2)
    assert (waiting.exception(0).failed_ranks, waiting.exception(0).phase) == ((1,), "write")
    assert f"after {99 << 20} bytes" in str(waiting.exception(0))


def test_a_rank_that_says_the_same_again_and_again_stands_still():
    coordinator, clock = limited(2, stall_timeout_s=5)
    waiting = arrive(coordinator, 0)
    for _ in range(3):
        coordinator.report_progress(CallId(1, 0, "barrier"), 1, "write", 7, 0)
        clock.run(coordinator, 2)
    assert isinstance(waiting.exception(0).__cause__, StalledError)


def test_a_call_that_takes_long_says_whom_it_waits_for(caplog):
    coordinator, clock = limited(3)
    arrive(coordinator, 0)
    coordinator.report_progress(CallId(1, 0, "barrier"), 1, "write", 1, 5 << 20)
    clock.run(coordinator, 29)
    assert not caplog.records
    clock.run(coordinator, 5)
    (record,) = caplog.records
    assert "waiting for 2 of 3 ranks: rank 1 is in phase 'write', 5 MiB so far, no progress for 30 s" in record.message
    assert "rank 2 has not come yet" in record.message
    clock.run(coordinator, 20)
    assert len(caplog.records) == 1


def test_a_phase_may_have_a_limit_of_its_own():
    coordinator, clock = limited(2, stall_timeout_s=5, phase_stall_timeout_s={"collect": 50})
    waiting = arrive(coordinator, 0)
    coordinator.report_progress(CallId(1, 0, "barrier"), 1, "collect", 0, 0)
    clock.run(coordinator, 45)
    assert not waiting.done()
    clock.run(coordinator, 10)
    assert waiting.exception(0).failed_ranks == (1,)


def test_a_rank_at_work_is_told_that_its_call_has_failed():
    coordinator, _ = limited(2)
    call_id = CallId(1, 0, "barrier")
    assert coordinator.report_progress(call_id, 0, "write", 0, 0) is None
    coordinator.fail(call_id, 1, RankFailure.from_exception(OSError("disk full"), rank=1, phase="write"))
    assert coordinator.report_progress(call_id, 0, "write", 1, 0).failed_ranks == (1,)


def test_a_step_of_the_coordinator_that_hangs_is_given_up():
    steps, clock = [], Clock()
    coordinator = Coordinator("g", execute=steps.append, clock=clock)
    for rank in (0, 1):
        coordinator.join(JoinRequest(rank, 2, f"a{rank}", limits=Limits(stall_timeout_s=5)))
    futures = [arrive(coordinator, rank) for rank in (0, 1)]
    clock.run(coordinator, 6)
    for future in futures:
        assert future.exception(0).rank_failures[0].rank == COORDINATOR
        assert "the coordinator made no progress" in str(future.exception(0))
    steps.pop()()  # it wakes up, too late
    assert [future.exception(0).failed_ranks for future in futures] == [(), ()]
    next_call = [arrive(coordinator, rank, number=1) for rank in (0, 1)]
    steps.pop()()
    assert [future.exception(0) for future in next_call] == [None, None]


def test_a_step_that_hangs_is_given_up_after_its_group_has_re_formed_too():
    steps, clock = [], Clock()
    coordinator = Coordinator("g", execute=steps.append, clock=clock)
    for tag in "ab":
        futures = [] if tag == "a" else [arrive(coordinator, rank) for rank in (0, 1)]
        for rank in (0, 1):
            coordinator.join(JoinRequest(rank, 2, f"{tag}{rank}", limits=Limits(stall_timeout_s=5)))
    assert coordinator.generation == 2
    assert not any(future.done() for future in futures)
    clock.run(coordinator, 6)
    assert all("the coordinator made no progress" in str(future.exception(0)) for future in futures)
    for number in range(100):
        formed_again = [arrive(coordinator, rank, generation=2, number=number) for rank in (0, 1)]
        steps.pop()()
        assert [future.exception(0) for future in formed_again] == [None, None]
    assert len(coordinator._calls) < 100


def test_nobody_is_blamed_for_the_time_in_which_the_coordinator_stood_still():
    coordinator, clock = limited(2, beats=True, stall_timeout_s=5, heartbeat_timeout_s=4)
    waiting = arrive(coordinator, 0)
    coordinator.report_progress(CallId(1, 0, "barrier"), 1, "write", 1, 0)
    clock.now_s += 3600  # its process was stopped
    coordinator.check_limits()
    assert not waiting.done()


def test_a_member_that_is_no_actor_must_be_heard_of():
    coordinator, clock = limited(2, beats=True, heartbeat_timeout_s=4)
    waiting = arrive(coordinator, 0)
    for _ in range(10):
        clock.run(coordinator, 3)
        coordinator.heartbeat("a0")
        coordinator.heartbeat("a1")
    assert not waiting.done()
    for _ in range(2):
        clock.run(coordinator, 3)
        coordinator.heartbeat("a0")
    assert waiting.exception(0).failed_ranks == (1,)
    assert coordinator.num_members == 1


def test_actors_need_no_heartbeat():
    coordinator, clock = limited(2)
    waiting = arrive(coordinator, 0)
    clock.run(coordinator, 100)
    assert not waiting.done()


def test_ranks_of_a_group_have_the_same_limits():
    coordinator = Coordinator("g")
    coordinator.join(JoinRequest(0, 2, "a0"))
    with pytest.raises(RankConflictError, match=r"stall_timeout_s=1.*all ranks need the same"):
        coordinator.join(JoinRequest(1, 2, "a1", limits=Limits(stall_timeout_s=1)))


class TestAfterARestart:
    """Another coordinator goes on with what the one before knew of the group."""

    def restarted(self, before: Coordinator) -> Coordinator:
        after = Coordinator("g")
        after.restore(pickle.loads(pickle.dumps(before.record)))
        return after

    def test_it_is_the_same_generation(self):
        after = self.restarted(formed(2))
        futures = [arrive(after, rank) for rank in (0, 1)]
        assert [future.exception(0) for future in futures] == [None, None]
        assert (after.generation, after.num_members) == (1, 2)

    def test_older_generations_are_still_refused(self):
        after = self.restarted(formed(2, formed(3), tag="b"))
        with pytest.raises(StaleGenerationError):
            arrive(after, 0, generation=1)

    def test_of_a_group_that_has_ended_no_rank_takes_part_in_the_next(self):
        """As one that was frozen meanwhile would, if that began at its own generation again."""
        after = Coordinator("g")
        after.restore(pickle.loads(pickle.dumps(formed(2, formed(3), tag="b").record.of_ended_group())))
        assert after.num_members == 0
        with pytest.raises(StaleGenerationError, match="generation 2, which has ended"):
            arrive(after, 1, generation=2)
        formed(2, after, tag="c")
        assert after.generation == 3
        arrive(after, 0, generation=3)
        with pytest.raises(StaleGenerationError, match="generation 2, the group is at 3"):
            arrive(after, 1, generation=2)

    def test_a_rank_that_has_gone_on_is_not_waited_for(self):
        """Its failure was told to the coordinator that died."""
        after = self.restarted(formed(2))
        waiting = arrive(after, 0, kind="load", number=0)
        arrive(after, 1, kind="load", number=1)
        assert waiting.exception(0).failed_ranks == (1,)
        assert "rank 1 has left this load and gone on to a later call" in str(waiting.exception(0))

    def test_a_barrier_may_be_passed_while_a_save_goes_on(self):
        after = self.restarted(formed(2))
        waiting = arrive(after, 0, kind="save", number=0)
        met = [arrive(after, rank, kind="barrier", number=1) for rank in (0, 1)]
        assert met[0].exception(0) is None
        assert not waiting.done()

    def test_what_was_lost_is_still_lost(self):
        before = formed(2)
        before.member_lost("a1", "killed")
        assert arrive(self.restarted(before), 0).exception(0).failed_ranks == (1,)

    def test_a_part_that_does_not_begin_at_the_beginning_is_refused(self):
        after = self.restarted(formed(2))
        with pytest.raises(CoordinatorLostError, match="no part before 'write'"):
            after.contribute(CallId(1, 0, "save"), 0, "write", encode([]))

    def test_an_older_incarnation_stays_shut_out(self):
        before = Coordinator("g")
        before.join(JoinRequest(0, 1, "a0", incarnation="first"))
        before.join(JoinRequest(0, 1, "b0", incarnation="second"))
        with pytest.raises(StaleGenerationError):
            self.restarted(before).join(JoinRequest(0, 1, "a1", incarnation="first"))

    def test_a_member_that_has_not_heard_that_it_joined_asks_again(self):
        before = formed(2)
        again = self.restarted(before).join(JoinRequest(1, 2, "a1"))
        assert again.result(0) == 1


def test_a_step_that_raises_fails_all_ranks_as_the_coordinators():
    coordinator = formed(2)
    futures = [arrive(coordinator, rank, kind="save") for rank in (0, 1)]  # None is no contribution to a save
    for future in futures:
        error = future.exception(0)
        assert error.failed_ranks == ()
        assert error.rank_failures[0].rank == COORDINATOR
        assert "AttributeError" in error.rank_failures[0].traceback


def test_a_rank_that_dies_during_the_commit_does_not_undo_it():
    steps = []
    coordinator = Coordinator("g", execute=steps.append)
    formed(2, coordinator)
    futures = [arrive(coordinator, rank) for rank in (0, 1)]
    coordinator.member_lost("a1", "killed")  # the step has begun: it alone decides
    steps.pop()()
    assert [future.exception(0) for future in futures] == [None, None]
    assert arrive(coordinator, 0, number=1).exception(0).failed_ranks == (1,)


def test_a_part_that_is_sent_again_gets_the_same_answer():
    coordinator = formed(2)
    first, again = arrive(coordinator, 0), arrive(coordinator, 0)
    last = arrive(coordinator, 1)
    late = arrive(coordinator, 0)
    assert {future.result(0) for future in (first, again, last, late)} == {encode(None)}


def test_a_different_part_of_one_phase_is_refused():
    coordinator = formed(2)
    arrive(coordinator, 0)
    with pytest.raises(GroupError, match="two different parts"):
        coordinator.contribute(CallId(1, 0, "barrier"), 0, "arrive", encode("something else"))


def test_closing_counts_down_the_members():
    coordinator = formed(2)
    assert coordinator.num_members == 2
    coordinator.leave(1, 0)
    coordinator.leave(1, 1)
    coordinator.leave(7, 0)
    assert coordinator.num_members == 0


def test_many_calls_do_not_pile_up():
    coordinator = formed(1)
    for number in range(500):
        arrive(coordinator, 0, number=number)
    assert len(coordinator._calls) < 100


def test_a_part_of_a_call_that_ended_long_ago_is_refused_and_the_next_generation_begins_anew():
    coordinator = formed(1)
    for number in range(500):
        arrive(coordinator, 0, number=number)
    with pytest.raises(GroupError, match="barrier #3 has ended long ago"):
        arrive(coordinator, 0, number=3)
    formed(1, coordinator, tag="b")
    for number in range(100):
        assert arrive(coordinator, 0, generation=2, number=number).exception(0) is None


def test_a_checkpoint_exception_survives_pickling_with_its_cause():
    failure = RankFailure.from_exception(OSError(28, "No space left"), rank=1, phase="write")
    error = pickle.loads(pickle.dumps(CheckpointException("save", "/c", [failure])))
    assert error.failed_ranks == (1,)
    assert error.phase == "write"
    assert error.checkpoint_id == "/c"
    assert isinstance(error.__cause__, OSError)
    assert error.failures[1][0].errno == 28


def test_an_exception_that_cannot_be_pickled_travels_as_text():
    class Local(Exception):
        pass

    failure = RankFailure.from_exception(Local("odd"), rank=0, phase="collect")
    assert failure.cause is None
    assert (failure.error_type, failure.message) == ("Local", "odd")
    assert "odd" in str(CheckpointException("save", "/c", [failure]))


def test_an_exception_whose_class_is_unknown_elsewhere_travels_as_text(monkeypatch):
    module = types.ModuleType("on_one_node_only")
    exec("class RareError(Exception): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    failure = RankFailure.from_exception(module.RareError("odd"), rank=1, phase="write")
    assert type(pickle.loads(pickle.dumps(failure)).cause) is module.RareError
    sent = pickle.dumps(CheckpointException("save", "/c", [failure]))
    monkeypatch.delitem(sys.modules, module.__name__)
    arrived = pickle.loads(sent)
    assert arrived.__cause__ is None
    assert arrived.failed_ranks == (1,)
    assert "rank 1: RareError: odd" in str(arrived)


def test_torchs_and_pythons_handlers_both_catch_it():
    from torch.distributed.checkpoint import CheckpointException as TorchCheckpointException

    failure = RankFailure.from_exception(ValueError("x"), rank=0, phase="plan")
    for handler in (TorchCheckpointException, Exception):
        with pytest.raises(handler):
            raise CheckpointException("load", "/c", [failure])
