"""The controller looks at its workers when it is told to, and otherwise as Ray has it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from ray_dcp.train import early_look
from ray_dcp.train.controller import listen
from tests.slack import within


class Controller:
    """As much of Ray Train's as is touched."""

    def __init__(self, interval_s: float) -> None:
        self._health_check_interval_s = interval_s
        self._latest_poll_time = float("-inf")
        self.timeouts: list[float] = []

    async def _poll_workers(self) -> int:
        await asyncio.sleep(max(0.0, self._latest_poll_time + self._health_check_interval_s - time.monotonic()))
        self.timeouts.append(self._health_check_interval_s)
        self._latest_poll_time = time.monotonic()
        return len(self.timeouts)


def test_a_controller_that_is_told_looks_at_once_and_waits_for_no_slow_answer() -> None:
    async def scenario() -> tuple[Controller, float]:
        controller = Controller(30.0)
        listen(controller)
        assert await controller._poll_workers() == 1
        started = time.monotonic()
        asyncio.get_running_loop().call_later(0.05, early_look.look_now, controller)
        assert await controller._poll_workers() == 2
        return controller, time.monotonic() - started

    controller, seconds = asyncio.run(scenario())
    assert seconds < within(5)
    assert controller.timeouts == [30.0, 0.5]
    assert controller._health_check_interval_s == 30.0


def test_a_controller_that_is_not_told_keeps_to_its_interval() -> None:
    async def scenario() -> float:
        controller = Controller(0.2)
        listen(controller)
        await controller._poll_workers()
        started = time.monotonic()
        await controller._poll_workers()
        await controller._poll_workers()
        assert controller.timeouts == [0.2] * 3
        return time.monotonic() - started

    assert asyncio.run(scenario()) >= 0.39


def test_being_told_in_between_counts_for_the_next_look() -> None:
    async def scenario() -> None:
        controller = Controller(30.0)
        listen(controller)
        early_look.look_now(controller)
        await controller._poll_workers()
        early_look.look_now(controller)
        await asyncio.wait_for(controller._poll_workers(), timeout=within(5))

    asyncio.run(scenario())


@pytest.mark.parametrize("missing", ["_poll_workers", "_health_check_interval_s", "_latest_poll_time"])
def test_a_controller_of_another_ray_is_left_as_it_is(missing: str) -> None:
    attributes: dict[str, Any] = {"_poll_workers": 1, "_health_check_interval_s": 2.0, "_latest_poll_time": 3.0}
    controller = type("Other", (), {name: value for name, value in attributes.items() if name != missing})()
    with pytest.raises(AttributeError, match=missing):
        listen(controller)
    assert vars(controller) == {}
    early_look.look_now(controller)


class Actor:
    def __init__(self) -> None:
        self.state: Any = 2

    def _get_local_state(self) -> Any:
        return self.state


def test_each_death_of_an_actor_is_told_once() -> None:
    actors, told = [Actor(), Actor(), Actor()], threading.Semaphore(0)
    watch = early_look.ActorWatch(actors, told.release)
    try:
        assert not told.acquire(timeout=0.3)
        actors[1].state = early_look._DEAD
        assert told.acquire(timeout=within(10))
        actors[0].state = early_look._DEAD
        assert told.acquire(timeout=within(10))
        assert not told.acquire(timeout=0.3)
    finally:
        watch.stop()


def test_a_watch_that_was_stopped_tells_nothing() -> None:
    actor, told = Actor(), threading.Semaphore(0)
    early_look.ActorWatch([actor], told.release).stop()
    actor.state = early_look._DEAD
    assert not told.acquire(timeout=0.3)
