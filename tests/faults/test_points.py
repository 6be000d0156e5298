"""Every point of a save and a load, and everything that can go wrong there, in real processes.

Whatever happens: the survivors hear of it in time and by name, what was committed before is still whole, the place of
the interrupted save holds the old or the new, and the next save works at once.

A process that was killed takes seconds to replace, so `make test` kills at some of the points, `make nightly` at all of
them; at every point and in between, `tests/protocol/test_interleavings.py` kills what stands for processes there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ray_dcp import CheckpointException
from ray_dcp.format.names import parse_shard_file
from ray_dcp.trace_points import Point
from tests.faults.scene import AT_COORDINATOR, Cast, load_at, save_at, value_at, wait_until
from tests.faults.survival import DEAD_PROCESS_S, RAISED_S
from tests.shared_memory import require_none_left
from tests.slack import within

pytestmark = pytest.mark.ray

SAVE_POINTS = [point for point in Point if point.number < Point.AFTER_OPEN.number]
LOAD_POINTS = [point for point in Point if point.number >= Point.AFTER_OPEN.number]
AFTER_THE_COMMIT_BEGAN = (Point.BEFORE_MANIFEST, Point.BETWEEN_MANIFEST_AND_METADATA, Point.AFTER_METADATA)
NEW_COORDINATOR_S = 30.0
"""A new process that imports torch takes 3 to 4 s of it where the machine is free."""
KILLED_BY_DAY = {
    "kill rank": (Point.MID_WRITE, Point.BETWEEN_MANIFEST_AND_METADATA, Point.MID_READ),
    "kill coordinator": (Point.BETWEEN_MANIFEST_AND_METADATA, Point.LOAD_PLAN),
}


def everything_at(points: list[Point]) -> list[Any]:
    """(point, kind of failure) of every test; those for the night are marked."""
    return [
        pytest.param(
            point,
            kind,
            id=f"{point.title}-{kind}",
            marks=[] if point in KILLED_BY_DAY.get(kind, points) else [pytest.mark.soak],
        )
        for point in points
        for kind in ("raise", *KILLED_BY_DAY)
    ]


@pytest.fixture(scope="module")
def cast(troupe):
    own = Cast("faults", troupe=troupe)
    yield own
    own.end()
    require_none_left()


def by_title(point: Point) -> str:
    return point.title


def attempts_in(place: Path) -> set[str]:
    shards = (parse_shard_file(name) for name in os.listdir(place))
    return {shard.attempt for shard in shards if shard is not None}


def check_failure(outcome, point: Point, *, failed_ranks: tuple[int, ...], place) -> None:
    assert isinstance(outcome, CheckpointException), outcome
    assert outcome.failed_ranks == failed_ranks
    assert outcome.checkpoint_id == str(place)


@pytest.mark.parametrize(("point", "kind"), everything_at(SAVE_POINTS))
def test_a_save_in_which_something_goes_wrong(cast, tmp_path, point, kind):
    other, place, stamp = tmp_path / "step-1", tmp_path / "step-2", tmp_path / "when"
    cast.save(other, 1.0)
    cast.save(place, 2.0)
    committed = attempts_in(place)
    cast.arm(point, kind, stamp)

    without = (1,) if kind == "kill rank" else ()
    outcomes = cast.outcomes(cast.start(save_at, str(place), 3.0), stamp, without=without)

    if kind == "kill coordinator" or (kind == "kill rank" and point in AFTER_THE_COMMIT_BEGAN):
        assert set(outcomes.by_rank.values()) == {"saved"}
        assert outcomes.seconds < within(NEW_COORDINATOR_S if kind == "kill coordinator" else DEAD_PROCESS_S)
        left = 3.0
    else:
        of_coordinator = kind == "raise" and point in AT_COORDINATOR
        for outcome in outcomes.by_rank.values():
            check_failure(outcome, point, failed_ranks=() if of_coordinator else (1,), place=place)
            assert kind != "raise" or isinstance(outcome.__cause__, OSError)
        assert outcomes.seconds < within(RAISED_S if kind == "raise" else DEAD_PROCESS_S)
        left = 3.0 if point == Point.AFTER_METADATA else 2.0
    assert (value_at(other, 2), value_at(place, 2)) == (1.0, left)
    if left == 3.0:
        committed |= attempts_in(place)

    if kind == "kill rank":
        cast.replace(1)
    cast.save(place, 4.0)
    assert (value_at(other, 2), value_at(place, 2)) == (1.0, 4.0)
    # What a killed rank has left is swept behind the next save; what a load may still read stays for a while.
    wait_until(lambda: len(attempts_in(place) - committed) == 1)


@pytest.mark.parametrize(("point", "kind"), everything_at(LOAD_POINTS))
def test_a_load_in_which_something_goes_wrong(cast, tmp_path, point, kind):
    place, stamp = tmp_path / "step-2", tmp_path / "when"
    cast.save(place, 2.0)
    cast.arm(point, kind, stamp)

    without = (1,) if kind == "kill rank" else ()
    outcomes = cast.outcomes(cast.start(load_at, str(place), 2.0), stamp, without=without)

    if kind == "kill coordinator":
        assert set(outcomes.by_rank.values()) == {"loaded"}
        assert outcomes.seconds < within(NEW_COORDINATOR_S)
    else:
        of_coordinator = kind == "raise" and point in AT_COORDINATOR
        for outcome in outcomes.by_rank.values():
            check_failure(outcome, point, failed_ranks=() if of_coordinator else (1,), place=place)
        assert outcomes.seconds < within(RAISED_S if kind == "raise" else DEAD_PROCESS_S)

    if kind == "kill rank":
        cast.replace(1)
    assert [outcome for outcome, _ in cast.do(load_at, str(place), 2.0)] == ["loaded"] * 2
    cast.save(place, 4.0)
    assert value_at(place, 2) == 4.0
