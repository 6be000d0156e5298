"""Whoever stands still is named after the stall limit, and does no harm when it moves again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import ray

from ray_dcp import CheckpointException, trace_points
from ray_dcp.errors import RankAbsentError, StaleGenerationError, StalledError, SupersededError
from ray_dcp.protocol.coordinator.coordinator import CHECK_INTERVAL_S, Coordinator
from ray_dcp.protocol.exception import COORDINATOR
from ray_dcp.settings import Limits
from ray_dcp.trace_points import Point
from tests.faults.scene import AT_COORDINATOR, Cast, load_at, save_at, state_of, template_of, value_at
from tests.faults.test_points import LOAD_POINTS, SAVE_POINTS, by_title
from tests.ranks import ThreadRanks, require_no_errors
from tests.slack import within

LIMIT_S = 30.0


class Standstill:
    """Stops the thread that comes to a point, a rank 1 or the coordinator's, until ``release``."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.reached = threading.Event()
        self.released = threading.Event()
        self.rank = threading.local()

    def __call__(self, point: Point) -> None:
        here = point in AT_COORDINATOR or getattr(self.rank, "number", None) == 1
        if point == self.point and here and not self.reached.is_set():
            self.reached.set()
            assert self.released.wait(60)


def in_a_thread(step: Callable[[], None]) -> None:
    threading.Thread(target=step, daemon=True).start()


def ranks_with_a_clock(execute: Callable[[Callable[[], None]], None] = in_a_thread) -> tuple[ThreadRanks, list[float]]:
    """Two ranks whose coordinator has a clock of ours and threads for its steps, as the actor has."""
    now = [0.0]
    limits = Limits(stall_timeout_s=LIMIT_S, arrival_timeout_s=LIMIT_S)
    coordinator = Coordinator("threads", execute=execute, clock=lambda: now[0])
    return ThreadRanks(2, coordinator=coordinator, limits=limits), now


def run_with(standstill: Standstill, ranks: ThreadRanks, now: list[float], on_rank) -> list:
    """How ``on_rank`` ended on both ranks; the one that stands still moves again when the other has its answer.

    Time passes while that one waits: a rank that is at work here may take as long as the machine takes.
    """

    def numbered(rank: int):
        standstill.rank.number = rank
        try:
            return on_rank(rank)
        finally:
            if rank == 0:
                standstill.released.set()

    def pass_time() -> None:
        assert standstill.reached.wait(30)
        while not standstill.released.is_set():
            if 0 in ranks.waiting:
                now[0] += CHECK_INTERVAL_S
            ranks.coordinator.check_limits()
            time.sleep(0.001)

    clock = threading.Thread(target=pass_time)
    clock.start()
    try:
        with trace_points.observed_by(standstill):
            return ranks.run(numbered)
    finally:
        clock.join()


def check_stall(outcomes: list, point: Point) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException), outcome
        assert outcome.rank_failures[0].rank == (COORDINATOR if point in AT_COORDINATOR else 1)
        # A thread has no pulse, by which a rank that has sent nothing yet would be known to be at work.
        assert isinstance(outcome.__cause__, RankAbsentError if point == Point.BEFORE_PLAN else StalledError)
        assert str(int(LIMIT_S)) in str(outcome)


@pytest.mark.parametrize("point", SAVE_POINTS, ids=by_title)
def test_a_save_in_which_somebody_stands_still(tmp_path, point):
    place = str(tmp_path / "step-1")
    ranks, now = ranks_with_a_clock()
    require_no_errors(ranks.save(lambda rank: state_of(rank, 2, 1.0), place))

    outcomes = run_with(
        Standstill(point), ranks, now, lambda rank: ranks.save_rank(rank, state_of(rank, 2, 2.0), place)
    )

    check_stall(outcomes, point)
    assert value_at(place, 2) == (2.0 if point == Point.AFTER_METADATA else 1.0)
    require_no_errors(ranks.save(lambda rank: state_of(rank, 2, 3.0), place))
    assert value_at(place, 2) == 3.0


@pytest.mark.parametrize("point", LOAD_POINTS, ids=by_title)
def test_a_load_in_which_somebody_stands_still(tmp_path, point):
    place = str(tmp_path / "step-1")
    ranks, now = ranks_with_a_clock()
    require_no_errors(ranks.save(lambda rank: state_of(rank, 2, 1.0), place))

    templates = [template_of(rank, 2) for rank in range(2)]
    outcomes = run_with(Standstill(point), ranks, now, lambda rank: ranks.load_rank(rank, templates[rank], place))

    check_stall(outcomes, point)
    require_no_errors(ranks.load([template_of(rank, 2) for rank in range(2)], place))


def test_a_commit_that_was_given_up_and_goes_on_later_does_not_replace_a_newer_save(tmp_path):
    place = str(tmp_path / "step-1")
    frozen = Standstill(Point.BETWEEN_MANIFEST_AND_METADATA)
    finished = threading.Event()

    def step_then_note(step):
        def run():
            is_first = not frozen.reached.is_set()
            step()
            if is_first and frozen.reached.is_set():
                finished.set()

        in_a_thread(run)

    ranks, now = ranks_with_a_clock(step_then_note)

    def save_twice(rank):
        try:
            ranks.save_rank(rank, state_of(rank, 2, 2.0), place)
        except CheckpointException:
            return ranks.save_rank(rank, state_of(rank, 2, 3.0), place)

    require_no_errors(run_with(frozen, ranks, now, save_twice))
    assert finished.wait(within(10))
    assert value_at(place, 2) == 3.0


# Real processes, stopped and continued by signals: by day at one point each, the others are above in one process.


@pytest.fixture(scope="module")
def cast(troupe):
    soon = within(3.0)
    own = Cast(
        "stalls", limits=Limits(stall_timeout_s=soon, coordinator_timeout_s=soon, arrival_timeout_s=60.0), troupe=troupe
    )
    yield own
    own.end()


@pytest.mark.ray
@pytest.mark.parametrize(
    "point", [Point.MID_WRITE, pytest.param(Point.BEFORE_RESULT, marks=pytest.mark.soak)], ids=by_title
)
def test_a_frozen_rank_that_wakes_up_after_the_group_re_formed_changes_nothing(cast, tmp_path, point):
    other, place, stamp = tmp_path / "step-1", tmp_path / "step-2", tmp_path / "when"
    cast.save(other, 1.0)
    cast.save(place, 2.0)
    cast.arm(point, "stop rank", stamp)
    frozen_pid = cast.pids[1]
    calls = cast.start(save_at, str(place), 3.0)
    outcomes = cast.outcomes(calls, stamp, without=(1,))
    assert outcomes.by_rank[0].failed_ranks == (1,)
    assert isinstance(outcomes.by_rank[0].__cause__, StalledError)
    assert outcomes.seconds < cast.limits.stall_timeout_s + within(2.0)

    frozen = cast.replace(1)
    cast.save(place, 4.0)
    os.kill(frozen_pid, signal.SIGCONT)
    woken, _ = ray.get(calls[1], timeout=within(60))
    assert isinstance(woken, CheckpointException)
    assert isinstance(woken.__cause__, StaleGenerationError | StalledError | SupersededError)
    for _ in range(2):  # what it tries next is refused by name
        again, _ = ray.get(frozen.do.remote(save_at, str(place), 5.0), timeout=within(60))
        assert isinstance(again.__cause__, StaleGenerationError)
    assert (value_at(other, 2), value_at(place, 2)) == (1.0, 4.0)
    cast.save(place, 6.0)
    assert value_at(place, 2) == 6.0
    ray.kill(frozen)


@pytest.mark.ray
def test_a_rank_that_freezes_in_a_load_is_named(cast, tmp_path):
    place, stamp = tmp_path / "step-2", tmp_path / "when"
    cast.save(place, 2.0)
    cast.arm(Point.MID_READ, "stop rank", stamp)
    frozen_pid = cast.pids[1]
    outcomes = cast.outcomes(cast.start(load_at, str(place), 2.0), stamp, without=(1,))
    assert outcomes.by_rank[0].failed_ranks == (1,)
    assert outcomes.seconds < cast.limits.stall_timeout_s + within(2.0)
    ray.kill(cast.replace(1))
    os.kill(frozen_pid, signal.SIGKILL)
    assert [outcome for outcome, _ in cast.do(load_at, str(place), 2.0)] == ["loaded"] * 2


@pytest.mark.ray
@pytest.mark.parametrize(
    "point",
    [pytest.param(Point.AFTER_PLAN, marks=pytest.mark.soak), Point.BETWEEN_MANIFEST_AND_METADATA],
    ids=by_title,
)
def test_a_frozen_coordinator_is_replaced_and_the_save_commits(cast, tmp_path, point):
    place, stamp = tmp_path / "step-2", tmp_path / "when"
    cast.save(place, 2.0)
    cast.arm(point, "stop coordinator", stamp)
    outcomes = cast.outcomes(cast.start(save_at, str(place), 3.0), stamp)
    assert set(outcomes.by_rank.values()) == {"saved"}
    assert outcomes.seconds < cast.limits.coordinator_timeout_s + within(30.0)
    assert value_at(place, 2) == 3.0
