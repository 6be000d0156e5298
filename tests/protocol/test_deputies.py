"""Saves that ranks have handed over, at the coordinator: who dies, in which order, and what becomes of the save."""

from __future__ import annotations

import concurrent.futures
import pickle

import pytest
import torch

from ray_dcp import CheckpointException
from ray_dcp.errors import CoordinatorLostError, GroupError, RankLostError, StaleGenerationError, StalledError
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.protocol.coordinator.open_call import ANNOUNCE_S
from ray_dcp.protocol.deputy import DeputyCall, SealedPart
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.protocol.messages import WRITE, CallId, encode, unsealed
from ray_dcp.protocol.rank.save import plan_save
from tests.protocol.handed_saves import DirectLink, OneRank, planned
from tests.protocol.test_coordinator import arrive, formed, limited
from tests.ranks import ThreadRanks, require_no_errors, save_request

DEPUTIES = ("agent-0", "agent-1")
ORDERS = [("rank", "deputy"), ("deputy", "rank")]


def hand_over_all(coordinator: Coordinator, ranks: list[OneRank]) -> None:
    for one in ranks:
        assert coordinator.hand_over(one.call_id, one.rank, DEPUTIES[one.rank]) is None


def require_committed(place, ranks: list[OneRank]) -> None:
    """Every value of every rank is there, bit by bit."""
    template = {name: torch.zeros_like(tensor) for one in ranks for name, tensor in one.state.items()}
    require_no_errors(ThreadRanks(1).load([template], place))
    for one in ranks:
        for name, tensor in one.state.items():
            assert torch.equal(template[name], tensor)


def restarted(before: Coordinator, **options) -> Coordinator:
    after = Coordinator("g", **options)
    after.restore(pickle.loads(pickle.dumps(before.record)))
    return after


def two_handed_over(coordinator: Coordinator, folder) -> list[list[OneRank]]:
    """The saves "0" and "1" of both ranks, of which the first is handed over before the second is planned."""
    saves = []
    for number in (0, 1):
        saves.append(planned(coordinator, folder / str(number), number=number))
        hand_over_all(coordinator, saves[-1])
    return saves


ways_to_die = pytest.mark.parametrize(
    "die",
    [
        lambda coordinator: coordinator.member_lost("a1", "killed"),
        lambda coordinator: coordinator.ranks_failed({1: "killed"}),
        lambda coordinator: coordinator.leave(1, 1),
    ],
    ids=["lost", "failed", "left"],
)


@ways_to_die
def test_a_rank_that_has_handed_over_may_die(tmp_path, die):
    coordinator = formed(2)
    ranks = planned(coordinator, tmp_path / "c")
    hand_over_all(coordinator, ranks)
    die(coordinator)
    answers = [one.write(coordinator) for one in ranks]
    assert [answer.exception(0) for answer in answers] == [None, None]
    require_committed(tmp_path / "c", ranks)
    assert arrive(coordinator, 0, number=1).exception(0).failed_ranks == (1,)


@ways_to_die
def test_a_rank_that_has_not_handed_over_fails_the_save_of_those_that_have(tmp_path, die):
    coordinator = formed(2)
    ranks = planned(coordinator, tmp_path / "c")
    coordinator.hand_over(ranks[0].call_id, 0, "agent-0")
    waiting = ranks[0].write(coordinator)
    die(coordinator)
    assert waiting.exception(0).failed_ranks == (1,)
    assert not (tmp_path / "c" / ".metadata").exists()
    assert coordinator.hand_over(ranks[1].call_id, 1, "agent-1").failed_ranks == (1,)


def test_a_rank_whose_deputy_is_gone_sends_its_part_itself(tmp_path):
    coordinator = formed(2)
    ranks = planned(coordinator, tmp_path / "c")
    hand_over_all(coordinator, ranks)
    coordinator.deputy_lost("agent-1", "killed")
    first = ranks[0].write(coordinator)
    assert not first.done()
    assert ranks[1].write(coordinator).exception(0) is None
    require_committed(tmp_path / "c", ranks)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("sent", [False, True], ids=["before it has sent", "after it has sent"])
def test_a_rank_and_its_deputy_that_are_both_gone_fail_the_save(tmp_path, order, sent):
    coordinator = formed(2)
    ranks = planned(coordinator, tmp_path / "c")
    hand_over_all(coordinator, ranks)
    waiting = ranks[1].write(coordinator) if sent else ranks[0].write(coordinator)
    for who in order:
        assert not waiting.done()
        if who == "rank":
            coordinator.member_lost("a1", "killed by nobody")
        else:
            coordinator.deputy_lost("agent-1", "out of memory")
    error = waiting.exception(0)
    assert error.failed_ranks == (1,)
    assert isinstance(error.__cause__, RankLostError)
    assert "killed by nobody; agent-1, which had taken over its part, is gone, too: out of memory" in str(error)
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_deputy_that_was_called_gone_takes_nothing_more(tmp_path):
    coordinator = formed(2)
    ranks = planned(coordinator, tmp_path / "c")
    coordinator.deputy_lost("agent-1", "its node was cut off")
    with pytest.raises(GroupError, match="agent-1 is no deputy any more: its node was cut off"):
        coordinator.hand_over(ranks[1].call_id, 1, "agent-1")


def test_a_rank_may_hand_over_once_more_to_a_new_deputy(tmp_path):
    coordinator = formed(2)
    ranks = planned(coordinator, tmp_path / "c")
    hand_over_all(coordinator, ranks)
    coordinator.deputy_lost("agent-1", "killed")
    coordinator.hand_over(ranks[1].call_id, 1, "agent-2")
    coordinator.member_lost("a1", "killed")
    coordinator.deputy_lost("agent-1", "killed, once more")
    answers = [one.write(coordinator) for one in ranks]
    assert [answer.exception(0) for answer in answers] == [None, None]


def test_a_deputy_of_several_ranks_and_saves_is_gone_from_all_of_them(tmp_path):
    coordinator = formed(3)
    saves = []
    for number in (0, 1):
        saves.append(planned(coordinator, tmp_path / str(number), world_size=3, number=number))
        for one in saves[-1]:
            coordinator.hand_over(one.call_id, one.rank, DEPUTIES[one.rank > 0])
    waiting = [ranks[0].write(coordinator) for ranks in saves]
    coordinator.member_lost("a1", "killed")
    coordinator.member_lost("a2", "killed")
    coordinator.deputy_lost("agent-1", "killed")
    assert [future.exception(0).failed_ranks for future in waiting] == [(1, 2), (1, 2)]


def test_a_deputy_that_hands_back_one_save_keeps_the_others(tmp_path):
    coordinator = formed(2)
    saves = two_handed_over(coordinator, tmp_path)
    coordinator.hand_back(saves[0][1].call_id, 1, "agent-1", "its answers differ")
    waiting = saves[0][0].write(coordinator)
    assert not waiting.done()
    coordinator.member_lost("a1", "killed")
    assert "is gone, too: its answers differ" in str(waiting.exception(0))
    assert [one.write(coordinator).done() for one in saves[1]] == [False, True]
    require_committed(tmp_path / "1", saves[1])


def test_only_a_save_can_be_handed_over():
    coordinator = formed(1)
    with pytest.raises(GroupError, match="a barrier cannot be handed over"):
        coordinator.hand_over(CallId(1, 0, "barrier"), 0, "agent-0")


def test_a_rank_that_has_handed_over_may_go_on_to_its_next_calls(tmp_path):
    coordinator = formed(2)
    first = planned(coordinator, tmp_path / "1")
    hand_over_all(coordinator, first)
    assert arrive(coordinator, 0, number=1).done() != arrive(coordinator, 1, number=1).done()
    second = planned(coordinator, tmp_path / "2", number=2)
    answers = [one.write(coordinator) for one in first]
    assert [answer.exception(0) for answer in answers] == [None, None]
    assert second[0].plan_answer


def test_a_deputy_that_stands_still_fails_the_save_and_one_that_moves_does_not(tmp_path):
    coordinator, clock = limited(2, stall_timeout_s=5)
    ranks = planned(coordinator, tmp_path / "c")
    hand_over_all(coordinator, ranks)
    coordinator.member_lost("a1", "killed")
    waiting = ranks[0].write(coordinator)
    for mark in range(5):
        assert coordinator.deputy_progress(ranks[1].call_id, 1, "agent-1", mark, 0) is None
        clock.run(coordinator, 4)
    assert not waiting.done()
    clock.run(coordinator, 4)
    assert waiting.exception(0).failed_ranks == (1,)
    assert isinstance(waiting.exception(0).__cause__, StalledError)
    assert coordinator.deputy_progress(ranks[1].call_id, 1, "agent-1", 9, 0).failed_ranks == (1,)


def test_a_rank_has_its_time_when_its_deputy_is_gone(tmp_path):
    coordinator, clock = limited(2, stall_timeout_s=5)
    ranks = planned(coordinator, tmp_path / "c")
    hand_over_all(coordinator, ranks)
    waiting = ranks[0].write(coordinator)
    clock.run(coordinator, 4)
    coordinator.deputy_lost("agent-1", "killed")
    clock.run(coordinator, 4)
    assert not waiting.done()
    clock.run(coordinator, 2)
    assert isinstance(waiting.exception(0).__cause__, StalledError)


class TestSavesThatRanksWrite:
    """Several saves in flight of ranks without an agent: each writes the next one when the one before is over."""

    def test_a_later_save_does_not_stand_still_while_an_earlier_one_moves(self, tmp_path):
        """Not even the rank that is done with the earlier one: that is not committed, and others hold it up."""
        coordinator, clock = limited(2, stall_timeout_s=5)
        first = planned(coordinator, tmp_path / "1")
        second = planned(coordinator, tmp_path / "2", number=1, behind=(0,))
        done = first[0].write(coordinator)
        for mark in range(5):
            assert coordinator.report_progress(first[1].call_id, 1, "write", mark, 0) is None
            clock.run(coordinator, 4)
        assert coordinator.report_progress(second[0].call_id, 0, "write", 0, 0) is None
        first[1].write(coordinator)
        assert done.exception(0) is None
        waiting = second[0].write(coordinator)
        clock.run(coordinator, 4)
        assert not waiting.done()
        clock.run(coordinator, 4)
        assert isinstance(waiting.exception(0).__cause__, StalledError)

    def test_a_rank_has_left_what_it_does_not_name_in_its_plan_and_all_before_what_it_has_written(self, tmp_path):
        coordinators = [formed(2)]
        saves = [planned(coordinators[0], tmp_path / "0")]
        saves.append(planned(coordinators[0], tmp_path / "1", number=1, behind=(0,)))
        saves.append(planned(coordinators[0], tmp_path / "2", number=2, behind=(0, 1)))
        coordinators.append(restarted(coordinators[0]))
        after = coordinators[-1]
        # Rank 1 was told that the first one is committed; rank 0 was not, and asks for the answer again.
        saves[2][1].plan(after, again=True)
        asking = [saves[0][0].plan(after, again=True), saves[1][0].plan(after, again=True)]
        assert not any(answer.done() for answer in asking)
        saves[1][1].plan(after, again=True)
        assert asking[1].done()
        assert not asking[0].done()
        saves[1][1].write(after, again=True)
        assert asking[0].exception(0).failed_ranks == (1,)
        assert "has left this save" in str(asking[0].exception(0))


class TestOrder:
    """Saves of a group are committed in their order."""

    def test_a_save_is_not_committed_before_an_earlier_one(self, tmp_path):
        coordinator = formed(2)
        first, second = two_handed_over(coordinator, tmp_path)
        later = [one.write(coordinator) for one in second]
        coordinator.member_lost("a0", "killed")
        assert not (tmp_path / "1" / ".metadata").exists()
        assert not later[0].done()
        answers = [one.write(coordinator) for one in first]
        assert [answer.exception(0) for answer in (*answers, *later)] == [None] * 4
        require_committed(tmp_path / "0", first)
        require_committed(tmp_path / "1", second)

    def test_it_is_committed_when_the_earlier_one_has_failed(self, tmp_path):
        coordinator, clock = limited(2, stall_timeout_s=5)
        first, second = two_handed_over(coordinator, tmp_path)
        later = [one.write(coordinator) for one in second]
        earlier = first[0].write(coordinator)
        clock.run(coordinator, 6)
        assert earlier.exception(0).failed_ranks == (1,)
        assert [answer.exception(0) for answer in later] == [None, None]
        require_committed(tmp_path / "1", second)

    def test_steps_of_other_kinds_do_not_wait_and_each_commit_is_begun_once(self, tmp_path):
        steps = []
        coordinator = formed(1, Coordinator("g", execute=steps.append))
        saves = []
        for number in (0, 1):
            one = OneRank(0, CallId.named(1, number, "save", str(tmp_path / str(number))), value=number)
            answer = one.plan(coordinator)
            steps.pop()()
            one.finish_plan(answer.result(0))
            coordinator.hand_over(one.call_id, 0, "agent-0")
            saves.append(one)
        later = saves[1].write(coordinator)
        assert not steps
        earlier = saves[0].write(coordinator)
        met = arrive(coordinator, 0, number=2)
        commit, barrier = steps
        barrier()
        assert met.done()
        commit()
        assert earlier.done()
        assert not later.done()
        assert len(steps) == 3
        steps[2]()
        assert later.done()

    def test_a_deputy_that_is_busy_with_an_earlier_save_does_not_stand_still(self, tmp_path):
        coordinator, clock = limited(2, stall_timeout_s=5)
        first, second = two_handed_over(coordinator, tmp_path)
        waiting = [second[0].write(coordinator), first[0].write(coordinator)]
        for mark in range(5):
            coordinator.deputy_progress(first[1].call_id, 1, "agent-1", mark, 0)
            clock.run(coordinator, 4)
        first[1].write(coordinator)
        assert waiting[1].exception(0) is None
        clock.run(coordinator, 4)
        assert not waiting[0].done()
        clock.run(coordinator, 4)
        assert isinstance(waiting[0].exception(0).__cause__, StalledError)

    def test_who_waits_for_an_earlier_save_is_told_so(self, tmp_path, caplog):
        coordinator, clock = limited(2)
        _, second = two_handed_over(coordinator, tmp_path)
        for one in second:
            one.write(coordinator)
        clock.run(coordinator, 31)
        assert "an earlier save of the group is to be committed first" in caplog.text


class TestNextGeneration:
    """The group forms anew while a save of it is in the hands of deputies."""

    def test_a_save_goes_on_that_all_ranks_have_handed_over(self, tmp_path):
        coordinator = formed(2)
        ranks = planned(coordinator, tmp_path / "c")
        hand_over_all(coordinator, ranks)
        coordinator.member_lost("a1", "killed")
        formed(2, coordinator, tag="b")
        coordinator.member_lost("a0", "killed")
        assert coordinator.knows("b0")
        first, again = ranks[0].write(coordinator), ranks[0].write(coordinator)
        assert coordinator.deputy_progress(ranks[1].call_id, 1, "agent-1", 1, 1) is None
        assert coordinator.is_needed
        last = ranks[1].write(coordinator)
        assert first.result(0) == again.result(0) == last.result(0)
        require_committed(tmp_path / "c", ranks)
        assert ranks[0].write(coordinator).result(0) == first.result(0)
        with pytest.raises(StaleGenerationError):
            arrive(coordinator, 0, number=1)
        met = [arrive(coordinator, rank, generation=2) for rank in (0, 1)]
        assert met[0].exception(0) is None

    def test_one_that_a_rank_has_not_handed_over_ends(self, tmp_path):
        coordinator = formed(2)
        ranks = planned(coordinator, tmp_path / "c")
        coordinator.hand_over(ranks[0].call_id, 0, "agent-0")
        waiting = ranks[0].write(coordinator)
        formed(2, coordinator, tag="b")
        assert isinstance(waiting.exception(0).__cause__, StaleGenerationError)
        with pytest.raises(StaleGenerationError):
            ranks[1].write(coordinator)
        with pytest.raises(StaleGenerationError):
            coordinator.hand_over(ranks[1].call_id, 1, "agent-1")

    def test_one_of_which_a_rank_has_sent_its_part_goes_on(self, tmp_path):
        coordinator = formed(2)
        ranks = planned(coordinator, tmp_path / "c")
        coordinator.hand_over(ranks[0].call_id, 0, "agent-0")
        by_itself = ranks[1].write(coordinator)
        formed(2, coordinator, tag="b")
        assert ranks[0].write(coordinator).exception(0) is None
        assert by_itself.exception(0) is None
        require_committed(tmp_path / "c", ranks)

    @pytest.mark.parametrize("order", ORDERS, ids="-".join)
    def test_it_fails_when_a_rank_and_its_deputy_are_gone(self, tmp_path, order):
        coordinator = formed(2)
        ranks = planned(coordinator, tmp_path / "c")
        hand_over_all(coordinator, ranks)
        formed(2, coordinator, tag="b")
        waiting = ranks[0].write(coordinator)
        for who in order:
            assert coordinator.knows("a1")
            assert not waiting.done()
            if who == "rank":
                coordinator.member_lost("a1", "killed")
            else:
                coordinator.deputy_lost("agent-1", "killed")
        assert waiting.exception(0).failed_ranks == (1,)
        assert not coordinator.knows("a1")
        assert not coordinator.has_part_with("agent-0")

    def test_a_save_of_the_next_generation_is_committed_after_it(self, tmp_path):
        coordinator = formed(2)
        older = planned(coordinator, tmp_path / "1")
        hand_over_all(coordinator, older)
        formed(1, coordinator, tag="b")
        (newer,) = planned(coordinator, tmp_path / "2", world_size=1, generation=2)
        later = newer.write(coordinator)
        assert not later.done()
        for one in older:
            one.write(coordinator)
        assert later.exception(0) is None
        require_committed(tmp_path / "1", older)
        require_committed(tmp_path / "2", [newer])

    def test_its_limits_hold(self, tmp_path):
        coordinator, clock = limited(2, stall_timeout_s=5)
        ranks = planned(coordinator, tmp_path / "c")
        hand_over_all(coordinator, ranks)
        for rank in (0, 1):
            coordinator.join(pickle.loads(pickle.dumps(coordinator.record.membership.members[rank])))
        coordinator.member_lost("a0", "killed")
        coordinator.member_lost("a1", "killed")
        formed(1, coordinator, tag="b")
        waiting = ranks[0].write(coordinator)
        clock.run(coordinator, 900)
        assert waiting.exception(0).failed_ranks == (1,)


class TestAfterARestart:
    """Another coordinator knows nothing of who has handed over, until deputies say so."""

    def test_a_lost_rank_does_not_fail_a_save_before_its_deputy_has_come(self, tmp_path):
        before = formed(2)
        ranks = planned(before, tmp_path / "c")
        hand_over_all(before, ranks)
        before.member_lost("a0", "killed")
        before.member_lost("a1", "killed")
        after = restarted(before)
        for one in ranks:
            assert after.hand_over(one.call_id, one.rank, DEPUTIES[one.rank]) is None
            answer = one.plan(after, again=True)
        assert answer.result(0) == ranks[1].plan_answer
        answers = [one.write(after, again=True) for one in ranks]
        assert [one.exception(0) for one in answers] == [None, None]
        require_committed(tmp_path / "c", ranks)

    def test_what_a_deputy_fails_with_is_told_and_not_that_its_rank_is_lost(self, tmp_path):
        """It was the first that the new coordinator heard of the save, and that found the rank lost before all else."""
        before = formed(1)
        (one,) = planned(before, tmp_path / "c", world_size=1)
        hand_over_all(before, [one])
        before.member_lost("a0", "killed")
        coordinator = restarted(before)
        full = RankFailure.from_exception(OSError(28, "No space left on device"), rank=0, phase="write")
        coordinator.fail(one.call_id, 0, full)
        failed = one.write(coordinator, again=True).exception(0)
        assert [failure.error_type for failure in failed.rank_failures] == ["OSError"]

    def test_progress_of_a_deputy_announces_it_too(self, tmp_path):
        before = formed(2)
        ranks = planned(before, tmp_path / "c")
        hand_over_all(before, ranks)
        before.member_lost("a1", "killed")
        after = restarted(before)
        assert after.report_progress(ranks[0].call_id, 0, "write", 1, 0) is None
        assert after.deputy_progress(ranks[1].call_id, 1, "agent-1", 1, 0) is None
        assert after.has_part_with("agent-1")

    def test_it_does_not_wait_for_ever_for_a_deputy(self, tmp_path):
        now_s = [0.0]
        before = formed(2)
        ranks = planned(before, tmp_path / "c")
        hand_over_all(before, ranks)
        before.member_lost("a1", "killed")
        after = restarted(before, clock=lambda: now_s[0])
        after.hand_over(ranks[0].call_id, 0, "agent-0")
        waiting = ranks[0].plan(after, again=True)
        while now_s[0] < ANNOUNCE_S:
            assert not waiting.done()
            now_s[0] += 0.5
            after.check_limits()
        now_s[0] += 1
        after.check_limits()
        assert waiting.exception(0).failed_ranks == (1,)

    def test_a_rank_that_has_gone_on_is_not_missed_before_its_deputy_has_come(self, tmp_path):
        before = formed(2)
        ranks = planned(before, tmp_path / "1")
        hand_over_all(before, ranks)
        after = restarted(before)
        following = OneRank(1, CallId.named(1, 1, "save", str(tmp_path / "2")), value=1)
        following.plan(after, again=True)
        waiting = ranks[0].plan(after, again=True)
        assert not waiting.done()
        after.hand_over(ranks[1].call_id, 1, "agent-1")
        ranks[1].plan(after, again=True)
        assert waiting.result(0) == ranks[0].plan_answer

    def test_where_nobody_hands_over_a_lost_rank_fails_a_save_at_once(self, tmp_path):
        before = formed(2)
        ranks = planned(before, tmp_path / "c")
        before.member_lost("a1", "killed")
        assert ranks[0].plan(restarted(before), again=True).exception(0).failed_ranks == (1,)

    def test_a_new_save_fails_at_once(self, tmp_path):
        before = formed(2)
        ranks = planned(before, tmp_path / "c")
        hand_over_all(before, ranks)
        before.member_lost("a1", "killed")
        new = OneRank(0, CallId.named(1, 1, "save", str(tmp_path / "d")), value=1)
        assert new.plan(restarted(before)).exception(0).failed_ranks == (1,)

    def test_a_save_of_an_older_generation_is_refused(self, tmp_path):
        before = formed(2)
        ranks = planned(before, tmp_path / "c")
        hand_over_all(before, ranks)
        formed(1, before, tag="b")
        with pytest.raises(StaleGenerationError, match="generation 1, the group is at 2"):
            restarted(before).hand_over(ranks[0].call_id, 0, "agent-0")


class TestDeputyCall:
    """What a deputy does, with coordinators that die."""

    def test_it_is_told_the_answer_of_the_rank(self, tmp_path):
        coordinator = formed(1)
        (one,) = planned(coordinator, tmp_path / "c", world_size=1)
        call = DeputyCall(one.handed_over, DirectLink([coordinator], "agent-0"))
        assert not call.hand_over().failed
        coordinator.member_lost("a0", "killed")
        told = call.deliver(one.write_message)
        assert not told.failed
        assert not told.started_over
        assert told.answer == one.write(coordinator).result(0)
        require_committed(tmp_path / "c", [one])

    def test_it_sends_again_to_a_coordinator_that_starts_over(self, tmp_path):
        coordinators = [formed(1)]
        (one,) = planned(coordinators[0], tmp_path / "c", world_size=1)
        deaths = ["write", "plan", "hand over"]

        def die(what):
            if deaths and what == deaths[0]:
                deaths.pop(0)
                coordinators[-1].member_lost("a0", "killed")
                coordinators.append(restarted(coordinators[-1]))
                raise CoordinatorLostError("died", group="g")

        call = DeputyCall(one.handed_over, link := DirectLink(coordinators, "agent-0", die))
        call.hand_over()
        told = call.deliver(one.write_message)
        assert not deaths
        assert not told.failed
        assert told.started_over
        assert link.sent[-3:] == [("hand over", 0, 0), ("plan", 0, 0), ("write", 0, 0)]
        require_committed(tmp_path / "c", [one])

    def test_it_gives_the_part_back_where_the_answers_differ(self, tmp_path):
        coordinators = [formed(1)]
        (one,) = planned(coordinators[0], tmp_path / "c", world_size=1)
        handed_over = one.handed_over
        other = type(handed_over)(
            handed_over.call_id, 0, (type(handed_over.exchanged[0])("plan", one.plan_message, b"another"),)
        )
        call = DeputyCall(other, link := DirectLink(coordinators, "agent-0"))
        call.hand_over()
        coordinators.append(restarted(coordinators[0]))
        told = call.deliver(one.write_message)
        assert told.taken_back
        assert "came to another result in 'plan'" in told.text
        assert link.sent[-1] == ("hand back", 0, 0)
        assert not coordinators[-1].has_part_with("agent-0")
        assert one.write(coordinators[-1]).exception(0) is None

    def test_where_the_rank_is_gone_too_the_save_fails_then(self, tmp_path):
        coordinators = [formed(2)]
        ranks = planned(coordinators[0], tmp_path / "c")
        hand_over_all(coordinators[0], ranks)
        coordinators[0].member_lost("a1", "killed")
        coordinators[0].hand_back(ranks[1].call_id, 1, "agent-1", "no way")
        told = DeputyCall(ranks[0].handed_over, DirectLink(coordinators, "agent-0")).deliver(ranks[0].write_message)
        assert isinstance(pickle.loads(told.failure), CheckpointException)
        assert "rank 1: RankLostError" in told.text

    def test_it_gives_up_a_coordinator_that_dies_again_and_again(self, tmp_path):
        coordinator = formed(1)
        (one,) = planned(coordinator, tmp_path / "c", world_size=1)

        def die(what):
            if what != "hand back":
                raise CoordinatorLostError("died", group="g")

        call = DeputyCall(one.handed_over, DirectLink([coordinator], "agent-0", die))
        told = call.deliver(one.write_message)
        assert told.taken_back
        assert "its coordinator is gone (died)" in told.text
        with pytest.raises(CoordinatorLostError):
            call.hand_over()

    def test_it_tells_of_what_keeps_it_from_writing(self, tmp_path):
        coordinator = formed(2)
        ranks = planned(coordinator, tmp_path / "c")
        hand_over_all(coordinator, ranks)
        waiting = ranks[0].write(coordinator)
        call = DeputyCall(ranks[1].handed_over, DirectLink([coordinator], "agent-1"))
        told = call.fail(OSError(28, "No space left on device"))
        assert told.failed
        error = waiting.exception(0)
        assert (error.failed_ranks, error.phase, error.__cause__.errno) == ((1,), "write", 28)
        assert "OSError" in error.rank_failures[0].traceback

    def test_of_several_saves_the_earlier_one_is_announced_first(self, tmp_path):
        coordinators = [formed(1)]
        link, saves, calls = DirectLink(coordinators, "agent-0"), [], []
        for number in (0, 1):
            saves += planned(coordinators[0], tmp_path / str(number), world_size=1, number=number)
            calls.append(DeputyCall(saves[-1].handed_over, link, after=calls[-1] if calls else None))
            calls[-1].hand_over()
        earlier, later = calls
        link.sent.clear()
        coordinators.append(restarted(coordinators[0]))
        with pytest.raises(concurrent.futures.TimeoutError):  # it waits for the earlier one, and this link does not
            later.deliver(saves[1].write_message)
        assert link.sent[1:3] == [("hand over", 0, 0), ("hand over", 1, 0)]
        assert not earlier.deliver(saves[0].write_message).failed
        assert not later.deliver(saves[1].write_message).failed
        require_committed(tmp_path / "1", saves[1:])

    def test_a_later_save_that_another_coordinator_has_planned_brings_the_earlier_one_along(self, tmp_path):
        """That coordinator knew nothing of the earlier save, and committed the later one before it."""
        coordinators = [formed(1)]
        link = DirectLink(coordinators, "agent-0")
        (first,) = planned(coordinators[0], tmp_path / "0", world_size=1)
        earlier = DeputyCall(first.handed_over, link)
        earlier.hand_over()
        coordinators.append(restarted(coordinators[0]))
        (second,) = planned(coordinators[1], tmp_path / "1", world_size=1, number=1, behind=(0,))
        later = DeputyCall(second.handed_over, link, after=earlier)
        assert not later.hand_over().failed
        with pytest.raises(concurrent.futures.TimeoutError):  # it waits for the earlier one, and this link does not
            later.deliver(second.write_message)
        assert not (tmp_path / "1" / ".metadata").exists()
        assert not earlier.deliver(first.write_message).failed
        assert not later.deliver(second.write_message).failed
        require_committed(tmp_path / "0", [first])
        require_committed(tmp_path / "1", [second])


def test_a_sealed_part_is_what_the_rank_has_written(tmp_path):
    coordinator = formed(1)
    (one,) = planned(coordinator, tmp_path / "c", world_size=1, num_values=(5 << 20) // 4)
    part = pickle.loads(one.write_message)
    assert isinstance(part, SealedPart)
    assert one.write_message == encode(part) == part.encoded()
    assert any(part.crcs)
    blank, whole = pickle.loads(part.prepared), unsealed(part)
    assert set(blank.crcs_of(0)) == {0}
    assert whole.crcs_of(0) == tuple(memoryview(part.crcs).cast("I"))
    assert one.write(coordinator).exception(0) is None
    require_committed(tmp_path / "c", [one])


def test_a_rank_that_takes_its_part_back_looks_whether_the_coordinator_is_of_one_mind_with_the_one_before(tmp_path):
    """Its deputy had sent the plan to a coordinator that started over, which had seen a newer attempt meanwhile."""
    ranks = ThreadRanks(1, coordinator=Coordinator("g"))
    call = ranks.call(0, "save", str(tmp_path / "c"))
    steps = plan_save(save_request({"w": torch.ones(2)}, str(tmp_path / "c"), call), call)
    with torch.no_grad():
        results = steps.write()
    exchanged = call.handed_over(CallId.named(1, 0, "save", str(tmp_path / "c"))).exchanged
    ranks.coordinator = restarted(ranks.coordinator)
    require_no_errors(ThreadRanks(1).save(lambda rank: {"w": torch.zeros(2)}, tmp_path / "c"))
    call_id = CallId.named(1, 0, "save", str(tmp_path / "c"))
    assert ranks.coordinator.contribute(call_id, 0, "plan", exchanged[0].message, again=True).result(0)
    call.take_back()
    with pytest.raises(CheckpointException, match="its successor came to another result in 'plan'"):
        call.exchange(WRITE, results)
