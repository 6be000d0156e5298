"""The plain coordinator: every way a call can end, driven in one thread."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

from ray_dcp import CheckpointException, RankFailure
from ray_dcp.errors import GroupError, RankConflictError, RankLostError, StaleGenerationError
from ray_dcp.protocol.coordinator import Coordinator
from ray_dcp.protocol.failures import COORDINATOR
from ray_dcp.protocol.membership import JoinRequest
from ray_dcp.protocol.wire import CallId, decode, encode


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
    coordinator.fail(CallId(1, 0, "barrier"), failure)
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
            CallId(1, 0, "barrier"), RankFailure.from_exception(ValueError(message), rank=rank, phase="write")
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
    assert waiting.exception(0) is other.exception(0)
    assert "rank 1 calls save while other ranks call barrier" in str(waiting.exception(0))


def test_a_rank_that_never_calls_is_named():
    coordinator = formed(3)
    waiting = arrive(coordinator, 0)
    coordinator.expire(CallId(1, 0, "barrier"), 600.0)
    assert waiting.exception(0).failed_ranks == (1, 2)
    assert "within 600 s" in str(waiting.exception(0))


def test_a_rank_that_has_called_may_take_its_time():
    coordinator = formed(2)
    futures = [arrive(coordinator, rank, kind="load") for rank in (0, 1)]
    coordinator.expire(CallId(1, 0, "load"), 600.0)
    assert all("within 600 s" not in str(future.exception(0)) for future in futures)


def test_expiry_after_the_end_changes_nothing():
    coordinator = formed(1)
    assert arrive(coordinator, 0).exception(0) is None
    coordinator.expire(CallId(1, 0, "barrier"), 600.0)
    assert arrive(coordinator, 0, number=1).exception(0) is None


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


def test_sending_a_part_twice_is_refused():
    coordinator = formed(2)
    arrive(coordinator, 0)
    with pytest.raises(GroupError, match="twice"):
        arrive(coordinator, 0)


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
