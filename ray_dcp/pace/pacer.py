"""``Pacer``: one rank's stopwatch. It times steps, saves and drains, and answers whether a save is due.

What it has measured leaves with the plan of each save (``figures``); what comes back is the interval of all ranks
(``take``). In between it answers by that interval and the step alone, so all ranks answer alike, whatever their clocks
say.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_dcp.pace.interval import (
    FIRST_AFTER_STEPS,
    MEMORY,
    STORAGE,
    Figures,
    Interval,
    TierFigures,
    interval_from,
)
from ray_dcp.settings import PaceSettings

Forming = tuple[str, int]
"""One forming of a group: its name and generation."""
_WARM_UP_STEPS = 3
"""The first steps of a process, in which things are compiled and allocated, are not counted."""
_LEAST_QUIET_STEPS = 3
"""Fewer steps without a drain say too little of how long a step takes, to tell how much slower others were."""
_RECENT = 5
"""The cost of a save is the median of so many: one slow one changes nothing."""


@dataclass(frozen=True, slots=True)
class Due:
    """The answer of ``CheckpointManager.due``: true where a save is due at ``step``."""

    now: bool
    step: int
    next_step: int
    """The first step at which a save to storage is due."""
    interval: Interval | None
    """What all ranks agreed on at their last save; None before that."""
    tier: str | None = None
    """Where the step is to be kept: "storage", or "memory" alone (``memory_every``); None where no save is due."""
    memory_every: int | None = None
    """Every how many steps one is to be kept in memory."""

    def __bool__(self) -> bool:
        return self.now

    @property
    def why(self) -> str:
        """One sentence: when a save is due, and the figures by which."""
        due = f"the next save is due at step {self.next_step}"
        if self.tier == MEMORY:
            due = f"a save in memory is due (memory_every={self.memory_every}), one to storage at step {self.next_step}"
        elif self.now:
            due = "a save is due"
        when = f"step {self.step}: {due}"
        if self.interval is None:
            return f"{when}; the first comes after {FIRST_AFTER_STEPS} steps, to see what a step and a save take"
        return f"{when}; {self.interval.why}"


class Drain:
    """The time from the return of an asynchronous save to its end, which another thread tells."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._ended: float | None = None

    def end(self) -> None:
        """Note that it is over."""
        self._ended = self._clock()

    @property
    def goes_on(self) -> bool:
        return self._ended is None

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (self._clock() if self._ended is None else self._ended) - self._began


class Pacer:
    """What one rank knows of its steps and saves. One thread uses it; only a ``Drain`` may be ended by another."""

    def __init__(
        self, settings: PaceSettings, clock: Callable[[], float] = time.monotonic, *, memory_every: int | None = None
    ) -> None:
        """``memory_every``: every how many steps one is to be kept in memory, where it does not go to storage."""
        self.interval: Interval | None = None
        self._settings = settings
        self._clock = clock
        self._memory_every = memory_every
        self._steps = _StepTimes()
        self._from_step: int | None = None
        self._forming: Forming | None = None
        self._was_asked = False
        self._tier = TierFigures(STORAGE)
        self._stalls: deque[float] = deque(maxlen=_RECENT)
        self._drains: deque[float] = deque(maxlen=_RECENT)
        self._slow_downs: deque[float] = deque(maxlen=_RECENT)
        self._open_drains: list[Drain] = []
        self._slow_down_s = 0.0
        """What steps took longer since the last drain had ended."""
        self._began: float | None = None
        self._observed_before_s = 0.0

    def due(self, step: int, forming: Forming | None) -> Due:
        """Whether a save is due at ``step``. Makes no call, takes no lock, and decides by steps alone."""
        now = self._clock()
        self._was_asked = True
        if self._began is None:
            self._began = now
        self._notice(forming)
        self._steps.reached(step, now, drains=any(drain.goes_on for drain in self._open_drains))
        if self._from_step is None or step < self._from_step:
            self._from_step = step
        next_step = self._from_step + (FIRST_AFTER_STEPS if self.interval is None else self.interval.steps)
        tier = STORAGE if step >= next_step else None
        if tier is None and self._memory_every is not None and step % self._memory_every == 0:
            tier = MEMORY
        return Due(tier is not None, step, next_step, self.interval, tier, self._memory_every)

    def figures(self, step: int, forming: Forming | None) -> Figures:
        """What this rank has measured, as it begins to save ``step``. Times of steps begin anew."""
        self._notice(forming)
        if self._began is None:
            self._began = self._clock()
        window = self._steps.end_window()
        going_on = [drain for drain in self._open_drains if drain.goes_on]
        over = [drain for drain in self._open_drains if not drain.goes_on]
        self._open_drains = going_on
        self._slow_down_s += window.slow_down_s  # of steps that end in drains, so it is never longer
        self._drains.extend(drain.seconds for drain in over)
        if over:
            self._slow_downs.extend([self._slow_down_s / len(over)] * len(over))
            self._slow_down_s = 0.0
        drains = [*self._drains, *(drain.seconds for drain in going_on)]
        slow_downs = [*self._slow_downs, *([self._slow_down_s] if going_on else [])]
        if self._stalls:
            self._tier = dataclasses.replace(
                self._tier,
                stall_s=statistics.median(self._stalls),
                slow_down_s=statistics.median(slow_downs) if slow_downs else 0.0,
                drain_s=statistics.median(drains) if drains else 0.0,
            )
        return Figures(
            step=step,
            step_s=window.step_s,
            observed_s=self._observed_s,
            tiers=(self._tier,),
            overhead=self._settings.overhead,
            mtbf_s=self._settings.mtbf_s,
        )

    def take(self, interval: Interval | None, forming: Forming | None) -> bool:
        """Go by ``interval``, the answer to a plan, from now on; returns whether that changes anything to be told.

        None where no answer came: then all stays as it was, and the save is still due.
        """
        self._notice(forming)
        if interval is None:
            return False
        changes = self._was_asked and (self.interval is None or self.interval.steps != interval.steps)
        self.interval, self._from_step = interval, interval.from_step
        return changes

    def saved(self, step: int, began: float, *, succeeded: bool) -> None:
        """Note that training goes on after a save of ``step`` that stood in its way since ``began``."""
        now = self._clock()
        if succeeded:
            self._stalls.append(now - began)
        self._steps.go_on_from(step, now)

    def now(self) -> float:
        """The time by this rank's clock."""
        return self._clock()

    def drain_begins(self) -> Drain:
        """The drain of the save that has just returned."""
        self._open_drains.append(Drain(self._clock))
        return self._open_drains[-1]

    def loaded(
        self, step: int, kept: Mapping[str, Any] | None, forming: Forming | None, *, stored_step: int | None = None
    ) -> None:
        """Go on from a checkpoint of ``step``, with which ``kept`` was stored; all ranks have the same.

        ``stored_step`` is the newest in storage, where that is another one: the next save there counts from it.

        Work since that step is lost, so it counts as an interruption, unless the group has formed anew for it, which
        has been counted.
        """
        re_formed = self._notice(forming)
        self._from_step = step if stored_step is None else stored_step
        self._steps.forget()
        figures = Figures.from_json(kept)
        if figures is not None:
            figures = figures.interrupted()
            self.interval = interval_from(dataclasses.replace(figures, step=step))
        if figures is not None and figures.observed_s > self._observed_s:
            self._observed_before_s += figures.observed_s - self._observed_s
            self._tier = figures.tier(STORAGE)
        elif self._was_asked and not re_formed:
            self._interrupted(1)

    @property
    def _observed_s(self) -> float:
        return self._observed_before_s + (self._clock() - self._began if self._began is not None else 0.0)

    def _interrupted(self, times: int) -> None:
        self._tier = dataclasses.replace(self._tier, interruptions=self._tier.interruptions + times)

    def _notice(self, forming: Forming | None) -> bool:
        """Whether the group has formed anew. Then ranks may be new, which know of no interval: all begin without."""
        before = self._forming
        if forming is None or forming == before:
            return False
        self._forming = forming
        if before is None:
            return False  # the group was joined at the first save
        self.interval = self._from_step = None
        self._open_drains, self._slow_down_s = [], 0.0
        self._steps.forget()
        self._interrupted(max(1, forming[1] - before[1]) if forming[0] == before[0] else 1)
        return True


@dataclass(frozen=True, slots=True)
class _Window:
    """The steps from one save to the next."""

    step_s: float | None
    slow_down_s: float
    """How much longer steps took in all while a save drained."""


class _Sum:
    """How many steps, and how long in all."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps += steps
        self.seconds += seconds


class _StepTimes:
    """How long steps take, from the times at which they were reached."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._to_skip = _WARM_UP_STEPS
        self._step_s: float | None = None
        self._quiet, self._draining = _Sum(), _Sum()

    def reached(self, step: int, now: float, *, drains: bool) -> None:
        last = self._last
        if last is None or step < last[0]:
            self._last = (step, now)
        elif step > last[0]:
            self._last = (step, now)
            if self._to_skip > 0:
                self._to_skip -= step - last[0]
            else:
                (self._draining if drains else self._quiet).add(step - last[0], now - last[1])

    def go_on_from(self, step: int, now: float) -> None:
        """The time since the last step was a save's."""
        self._last = (step, now)

    def forget(self) -> None:
        """The time since the last step was something else's."""
        self._last = None

    def end_window(self) -> _Window:
        """The steps since the last window; where there are none, a step takes what it took before."""
        quiet, draining = self._quiet, self._draining
        self._quiet, self._draining = _Sum(), _Sum()
        if quiet.steps or draining.steps:
            counted = quiet if quiet.steps >= _LEAST_QUIET_STEPS or not draining.steps else draining
            self._step_s = counted.seconds / counted.steps
        slow_down_s = 0.0
        if quiet.steps >= _LEAST_QUIET_STEPS:
            slow_down_s = max(0.0, draining.seconds - draining.steps * quiet.seconds / quiet.steps)
        return _Window(self._step_s, slow_down_s)
