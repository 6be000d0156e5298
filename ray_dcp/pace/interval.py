"""The number of steps between two saves, as a pure function of what saves, steps and interruptions have cost.

A save costs training the time that it stands still, and what steps take longer while it drains. A run that is
interrupted every ``mtbf_s`` seconds loses least to saves and to work done again where it saves every
``sqrt(2 * cost * mtbf_s)`` seconds (Young 1974; Daly 2006, first order). That optimum is flat, so it gives way to what
users may rely on: saves take no more than a share ``overhead`` of the time, one has drained before the next begins,
and no more than ``LONGEST_INTERVAL_S`` pass without one, unless the other two ask for it.

``Figures`` are what one rank has measured. Those of all ranks (``together``) give one ``Interval``
(``interval_from``), computed in one place and told to all: a rank never decides by figures of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray_dcp.settings import DEFAULT_OVERHEAD
from ray_dcp.wording import counted, format_seconds

STORAGE = "storage"
"""The tier of checkpoints that are committed to a store."""
MEMORY = "memory"
"""The tier of steps that stay in the memory of nodes and never go to a store."""
FIRST_AFTER_STEPS = 10
"""A run saves first after this many steps: there is nothing to go by before."""
UNMEASURED_INTERVAL_S = 300.0
"""The interval until the cost of a save has been measured."""
LONGEST_INTERVAL_S = 3600.0
RANK_MTBF_S = 54 * 86400 * 16384 / 419
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs ("The Llama 3 Herd of Models", 2024)."""
LONGEST_UNSEEN_MTBF_S = 86400.0
"""The most that is assumed before an interruption was seen: preemption and mistakes come to few ranks, too."""
_LEAST_STEP_S = 1e-6
_MOST_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What saves to one tier cost, and how often a run had to go back to it."""

    name: str
    stall_s: float | None = None
    """How long training stands still for one save; all of a synchronous one. None: not measured yet."""
    slow_down_s: float = 0.0
    """How much longer steps take in all while one save drains."""
    drain_s: float = 0.0
    """From the return of an asynchronous save to its commit."""
    interruptions: int = 0
    """How often the run was interrupted in the time observed and went on from this tier."""

    @property
    def cost_s(self) -> float | None:
        """What training loses to one save."""
        return None if self.stall_s is None else self.stall_s + self.slow_down_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rank has measured when it saves ``step``; travels with its plan."""

    step: int
    step_s: float | None = None
    """How long a step takes; None: not measured yet."""
    observed_s: float = 0.0
    """For how long the run has been watched, earlier processes of it included."""
    tiers: tuple[TierFigures, ...] = (TierFigures(STORAGE),)
    overhead: float = DEFAULT_OVERHEAD
    mtbf_s: float | None = None
    """The mean time between failures that the user has given."""
    num_ranks: int = 1

    def tier(self, name: str) -> TierFigures:
        """The figures of one tier; empty ones where there are none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        return TierFigures(name)

    def interrupted(self) -> Figures:
        """The same figures with one interruption more."""
        return replace(self, tiers=tuple(replace(one, interruptions=one.interruptions + 1) for one in self.tiers))

    def as_json(self) -> dict[str, Any]:
        """What ``from_json`` makes these figures of."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any] | None) -> Figures | None:
        """The figures that a checkpoint has kept; None where it has none, or some that make no sense here."""
        try:
            return _figures_from(kept or {})
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


@dataclass(frozen=True, slots=True)
class Interval:
    """How long to go on without a save, from the save of ``from_step`` on; the same on all ranks."""

    tier: str
    from_step: int
    steps: int
    why: str = field(compare=False)
    """One sentence with all figures."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """A time between two saves, and what asks for it."""

    seconds: float
    reason: str


def agreed_interval(of_ranks: Sequence[Figures | None]) -> Interval | None:
    """The interval of all ranks from the save that they have begun; None where no rank has figures.

    It depends on its argument alone: a coordinator that starts over comes to the same.
    """
    figures = together(of_ranks)
    return None if figures is None else interval_from(figures)


def together(of_ranks: Sequence[Figures | None]) -> Figures | None:
    """The figures of all ranks as those of one: the slowest counts, and whoever has watched the run for longest."""
    known = [figures for figures in of_ranks if figures is not None]
    if not known:
        return None
    longest = max(known, key=lambda figures: (figures.observed_s, figures.tier(STORAGE).interruptions))
    names = dict.fromkeys(tier.name for figures in known for tier in figures.tiers)
    given = [figures.mtbf_s for figures in known if figures.mtbf_s is not None]
    return Figures(
        step=max(figures.step for figures in known),
        step_s=max((one.step_s for one in known if one.step_s is not None), default=None),
        observed_s=longest.observed_s,
        tiers=tuple(_slowest(name, known, longest) for name in names),
        overhead=min(figures.overhead for figures in known),
        mtbf_s=min(given, default=None),
        num_ranks=len(of_ranks),
    )


def _slowest(name: str, known: Sequence[Figures], longest: Figures) -> TierFigures:
    tiers = [figures.tier(name) for figures in known]
    return TierFigures(
        name,
        stall_s=max((tier.stall_s for tier in tiers if tier.stall_s is not None), default=None),
        slow_down_s=max(tier.slow_down_s for tier in tiers),
        drain_s=max(tier.drain_s for tier in tiers),
        interruptions=longest.tier(name).interruptions,
    )


def interval_from(figures: Figures, tier: str = STORAGE) -> Interval:
    """The interval after the save of ``figures.step``, and why."""
    of_tier, step_s = figures.tier(tier), figures.step_s
    cost_s = of_tier.cost_s
    if step_s is None:
        why = f"save {FIRST_AFTER_STEPS} steps after the last save: no step has been timed yet"
        return Interval(tier, figures.step, FIRST_AFTER_STEPS, why)
    step_s = max(step_s, _LEAST_STEP_S)
    if cost_s is None:
        steps = _whole_steps(UNMEASURED_INTERVAL_S, step_s)
        why = f"{_every(steps, step_s)}: what a save costs is known only after the first one"
        return Interval(tier, figures.step, steps, why)
    mtbf = _mtbf(figures, of_tier)
    limit = _limit(cost_s, of_tier.drain_s, mtbf.seconds, figures.overhead)
    steps = _whole_steps(limit.seconds, step_s)
    why = (
        f"{_every(steps, step_s)}: {_cost_text(of_tier)}, an interruption is expected every "
        f"{format_seconds(mtbf.seconds)} ({mtbf.reason}), {limit.reason}; saving takes "
        f"{_percent(cost_s / (steps * step_s))} of the time of training"
    )
    return Interval(tier, figures.step, steps, why)


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """The time between saves at which a run loses least: the first order of Young and of Daly."""
    return math.sqrt(2 * cost_s * mtbf_s)


def unseen_mtbf_s(num_ranks: int) -> float:
    """The mean time between failures that is assumed of a run in which none was seen yet."""
    return min(RANK_MTBF_S / num_ranks, LONGEST_UNSEEN_MTBF_S)


def _limit(cost_s: float, drain_s: float, mtbf_s: float, overhead: float) -> _Limit:
    """The time between two saves: the optimum, or what bounds it."""
    best_s = optimum_s(cost_s, mtbf_s)
    best = f"the optimum of Young and Daly, {format_seconds(best_s)},"
    limit = _Limit(best_s, f"for which the optimum of Young and Daly is {format_seconds(best_s)}")
    if best_s > LONGEST_INTERVAL_S:
        limit = _Limit(
            LONGEST_INTERVAL_S, f"{best} is longer than the {format_seconds(LONGEST_INTERVAL_S)} that may pass"
        )
    if cost_s / overhead > limit.seconds:
        limit = _Limit(cost_s / overhead, f"{best} would take more than the {_percent(overhead)} of overhead=")
    if drain_s > limit.seconds:
        limit = _Limit(drain_s, f"{best} is shorter than a save drains")
    return limit


def _mtbf(figures: Figures, tier: TierFigures) -> _Limit:
    """The mean time between failures, and where it is from."""
    if figures.mtbf_s is not None:
        return _Limit(figures.mtbf_s, "mtbf_s=")
    if tier.interruptions:
        seen = f"{counted(tier.interruptions, 'interruption')} seen in {format_seconds(figures.observed_s)}"
        return _Limit(figures.observed_s / tier.interruptions, seen)
    assumed_s = unseen_mtbf_s(figures.num_ranks)
    if figures.observed_s > assumed_s:
        return _Limit(figures.observed_s, f"none seen in {format_seconds(figures.observed_s)}")
    return _Limit(assumed_s, f"none seen yet, assumed of {counted(figures.num_ranks, 'rank')}")


def _whole_steps(seconds: float, step_s: float) -> int:
    # A hair less, so that what is a whole number of steps but for rounding stays one.
    return max(1, math.ceil(min(_MOST_STEPS, seconds / step_s * (1 - 1e-12))))


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _every(steps: int, step_s: float) -> str:
    return f"save every {counted(steps, 'step')} ({format_seconds(steps * step_s)} at {format_seconds(step_s)} a step)"


def _cost_text(tier: TierFigures) -> str:
    assert tier.stall_s is not None
    cost = f"a save costs {format_seconds(tier.stall_s + tier.slow_down_s)}"
    if not tier.drain_s:
        return cost
    slower = f", {format_seconds(tier.slow_down_s)} of slower steps" if tier.slow_down_s else ""
    return f"{cost} ({format_seconds(tier.stall_s)} of stall{slower}) and drains for {format_seconds(tier.drain_s)}"


def _figures_from(kept: Mapping[str, Any]) -> Figures:
    tiers = tuple(
        TierFigures(
            str(one["name"]),
            _number_or_none(one["stall_s"]),
            _number(one["slow_down_s"]),
            _number(one["drain_s"]),
            int(_number(one["interruptions"])),
        )
        for one in kept["tiers"]
    )
    overhead = _number(kept["overhead"])
    num_ranks = int(_number(kept["num_ranks"]))
    if not (0 < overhead < 1 and num_ranks >= 1):
        raise ValueError("out of range")
    return Figures(
        step=int(_number(kept["step"])),
        step_s=_number_or_none(kept["step_s"]),
        observed_s=_number(kept["observed_s"]),
        tiers=tiers,
        overhead=overhead,
        mtbf_s=_number_or_none(kept["mtbf_s"]),
        num_ranks=num_ranks,
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number of what was measured")
    return value


def _number_or_none(value: Any) -> float | None:
    return None if value is None else _number(value)
