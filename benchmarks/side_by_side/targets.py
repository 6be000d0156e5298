"""What must hold, line by line, and whether it does.

Verdicts are by medians of the interleaved runs, or of their ratios round by round where two share a turn. Ratios are to
torch's default call; the same by minima, and to torch at its best, stand beside them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from side_by_side.drain import DrainResult
from side_by_side.first_save import FirstResult
from side_by_side.results import MAX_PERCENT, Measure, WorkloadResult
from side_by_side.sides import OVERLAPPED, RAY_DCP, TORCH, TORCH_BEST, UNCHECKED, UNCOMPARED
from side_by_side.spread import SpreadResult
from side_by_side.steady import SteadyResult

_TIMES_AS_FAST = {
    "large": {"save": 1.5, "unsynced": 2.5, "load": 1.5, "reshard": 2.0},
    "small": {"save": 8.0, "load": 8.0},
}
_PERCENT_OF_LIMIT = {"large": {"save": 80.0, "load": 70.0}}
_SCALARS_TIMES_AS_FAST = 10.0
_SCALARS_MAX_NBYTES = 12e6
_MAX_READ_PER_NEEDED = 1.1
_MAX_CHECKED_PER_UNCHECKED = 1.1
_MAX_COMPARED_PER_UNCOMPARED = 1.03
_MAX_CPU_PER_TORCH = 0.6
_MAX_EXTRA_NBYTES = 64 * 2**20
_MAX_STALL_PER_COPY = 1.15
_STALL_TIMES_AS_SHORT = {"async": 2.0, "async_replicas": 6.0}
_MAX_OVERLAPPED_STALL_S = 0.015
_DURABLE_TIMES_AS_FAST_AS_BEST = 2.5
_FIRST_TIMES_AS_FAST_AS_BEST = 3.0
_MIN_COMPUTING_SHARE = {"matmul": 0.7, "python": 0.9}
_MAX_STAGING_PER_BUFFERS = 1.1
_MAX_GROWN_NBYTES = 40 * 10**6
_MAX_TAKEN_NBYTES = 16 * 2**20
"""By a save in steady state: what a plan and its messages take for a while, and no staging memory."""

OtherResult = SpreadResult | DrainResult | FirstResult | SteadyResult
"""What is measured otherwise than in rounds of the same calls."""


class Unit(enum.Enum):
    """What a figure is in; the value is how many bytes, or whatever is counted, are one."""

    TIMES = "x", 1
    PERCENT = " %", 1
    MB = " MB", 10**6
    MIB = " MiB", 2**20
    MS = " ms", 1e-3

    def show(self, figure: float) -> str:
        return f"{figure / self.value[1]:.4g}{self.value[0]}"


class Verdict(enum.Enum):
    MET = "met"
    MISSED = "missed"
    NOT_VALID = "not valid"
    """Measured while the machine had other work, on small states, with wrong results, or above its limit."""


@dataclass(frozen=True, slots=True)
class Line:
    """One target, and what was measured of it."""

    name: str
    bound: float
    at_least: bool
    """Otherwise at most."""
    unit: Unit
    measured: float
    """By medians."""
    by_minima: float | None = None
    to_torch_best: float | None = None
    """By medians, with torch's best configuration in place of its default."""

    @property
    def figures(self) -> tuple[float, float | None, float | None]:
        """All that was measured: the one that decides, by minima, to torch at its best."""
        return self.measured, self.by_minima, self.to_torch_best

    def verdict(self, *, valid: bool) -> Verdict:
        beats_limit = self.unit is Unit.PERCENT and self.measured > MAX_PERCENT
        if not valid or beats_limit:
            return Verdict.NOT_VALID
        met = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        return Verdict.MET if met else Verdict.MISSED


def lines_of(results: Sequence[WorkloadResult], others: Sequence[OtherResult]) -> list[Line]:
    """The lines that the workloads which were chosen have something to say to."""
    lines: list[Line] = []
    for result in results:
        measures = result.by_name
        for name, bound in _TIMES_AS_FAST.get(result.name, {}).items():
            lines.append(_speed(f"{result.name} {name}: speed to torch", measures[name], bound))
            if name in _PERCENT_OF_LIMIT.get(result.name, {}):
                lines.append(_share_of_limit(result.name, measures[name], _PERCENT_OF_LIMIT[result.name][name]))
        if result.name == "large":
            lines += [_cost_of_checksums(measures[name]) for name in measures if UNCHECKED in measures[name].figures]
            lines += [_cpu_of_save(measures["save"]), _memory_of_save(measures["save"])]
        if result.name == "replicas":
            lines.append(_cost_of_comparing(measures["save"]))
        if result.name == "scalars":
            lines += [_scalars_speed(result), _scalars_size(result)]
        if result.name in _STALL_TIMES_AS_SHORT:
            lines += _of_async_saves(result)
    return lines + [line for other in others for line in _LINES_OF[type(other)](other)]


def as_json(line: Line, *, valid: bool) -> dict[str, Any]:
    return {
        "line": line.name,
        "at_least" if line.at_least else "at_most": line.bound,
        "unit": "bytes" if line.unit in (Unit.MB, Unit.MIB) else line.unit.value[0].strip(),
        "measured": line.measured,
        "by_minima": line.by_minima,
        "to_torch_best": line.to_torch_best,
        "verdict": line.verdict(valid=valid).value,
    }


def _speed(name: str, measure: Measure, bound: float) -> Line:
    best = measure.ratio_of_medians(TORCH_BEST) if TORCH_BEST in measure.figures else None
    return Line(name, bound, True, Unit.TIMES, measure.ratio_of_medians(TORCH), measure.ratio_of_minima(TORCH), best)


def _share_of_limit(workload: str, measure: Measure, bound: float) -> Line:
    name = f"{workload} {measure.name}: of raw {measure.limit.value}"
    by_minima = measure.percent_by_minima(RAY_DCP)
    return Line(name, bound, True, Unit.PERCENT, measure.percent_by_medians(RAY_DCP), by_minima)


def _cost_of_checksums(measure: Measure) -> Line:
    name = f"large {measure.name}: checksums on / off"
    measured, by_minima = measure.times_as_long_as(UNCHECKED), 1 / measure.ratio_of_minima(UNCHECKED)
    return Line(name, _MAX_CHECKED_PER_UNCHECKED, False, Unit.TIMES, measured, by_minima)


def _cost_of_comparing(save: Measure) -> Line:
    measured, by_minima = save.times_as_long_as(UNCOMPARED), 1 / save.ratio_of_minima(UNCOMPARED)
    name = "replicas save: compared / not compared"
    return Line(name, _MAX_COMPARED_PER_UNCOMPARED, False, Unit.TIMES, measured, by_minima)


def _cpu_of_save(save: Measure) -> Line:
    own, default, best = save.figures[RAY_DCP], save.figures[TORCH], save.figures.get(TORCH_BEST)
    return Line(
        name="large save: CPU time / torch's",
        bound=_MAX_CPU_PER_TORCH,
        at_least=False,
        unit=Unit.TIMES,
        measured=own.median_cpu_s / default.median_cpu_s,
        by_minima=own.minimum_cpu_s / default.minimum_cpu_s,
        to_torch_best=best and own.median_cpu_s / best.median_cpu_s,
    )


def _memory_of_save(save: Measure) -> Line:
    """By the peak of all runs: that is what there has to be room for."""
    peak_nbytes = save.figures[RAY_DCP].peak_extra_nbytes
    return Line("large save: extra memory a process", _MAX_EXTRA_NBYTES, False, Unit.MIB, peak_nbytes)


def _scalars_speed(result: WorkloadResult) -> Line:
    own, default = _save_and_load_s(result, RAY_DCP), _save_and_load_s(result, TORCH)
    best = _save_and_load_s(result, TORCH_BEST) if TORCH_BEST in result.others else None
    return Line(
        name="scalars save + load: speed to torch",
        bound=_SCALARS_TIMES_AS_FAST,
        at_least=True,
        unit=Unit.TIMES,
        measured=median(default) / median(own),
        by_minima=min(default) / min(own),
        to_torch_best=best and median(best) / median(own),
    )


def _scalars_size(result: WorkloadResult) -> Line:
    return Line("scalars: size on disk", _SCALARS_MAX_NBYTES, False, Unit.MB, result.disk_nbytes[RAY_DCP])


def _save_and_load_s(result: WorkloadResult, side: str) -> list[float]:
    """Of each round, both together."""
    runs_s = [measure.figures[side].runs_s for measure in result.measures]
    return [sum(of_round) for of_round in zip(*runs_s, strict=True)]


def _read_per_needed(spread: SpreadResult) -> list[Line]:
    return [
        Line(
            name=f"{spread.title(layout)}: read / needed",
            bound=_MAX_READ_PER_NEEDED,
            at_least=False,
            unit=Unit.TIMES,
            measured=by_side[RAY_DCP].read_per_needed,
        )
        for layout, by_side in spread.loads.items()
    ]


def _of_async_saves(result: WorkloadResult) -> list[Line]:
    stall, durable = result.by_name["stall"], result.by_name["durable"]
    lines = [_speed(f"{result.name} stall: shorter than torch's", stall, _STALL_TIMES_AS_SHORT[result.name])]
    if result.name != "async":
        return lines
    per_copy = stall.figures[RAY_DCP].median_s / stall.median_limit_s
    by_minima = stall.figures[RAY_DCP].minimum_s / stall.limit_s
    lines.append(Line("async stall / memory copy", _MAX_STALL_PER_COPY, False, Unit.TIMES, per_copy, by_minima))
    lines += _of_overlapped(stall)
    if TORCH_BEST in durable.figures:
        name, to_best = "async durable: speed to torch's best", durable.ratio_of_medians(TORCH_BEST)
        by_minima = durable.ratio_of_minima(TORCH_BEST)
        lines.append(Line(name, _DURABLE_TIMES_AS_FAST_AS_BEST, True, Unit.TIMES, to_best, by_minima, to_best))
    return lines


def _of_overlapped(stall: Measure) -> list[Line]:
    if OVERLAPPED not in stall.figures:
        return []
    own, name = stall.figures[OVERLAPPED], "async stall, staged beside the training"
    lines = [Line(name, _MAX_OVERLAPPED_STALL_S, False, Unit.MS, own.median_s, own.minimum_s)]
    if TORCH_BEST in stall.figures:
        best = stall.figures[TORCH_BEST]
        per_best, by_minima = own.median_s / best.median_s, own.minimum_s / best.minimum_s
        lines.append(Line("the same / torch's best", 1.0, False, Unit.TIMES, per_best, by_minima, per_best))
    return lines


def _of_drain(result: DrainResult) -> list[Line]:
    lines = []
    for loop, by_side in result.samples.items():
        own = median(result.shares(loop, RAY_DCP))
        best = median(result.shares(loop, TORCH_BEST)) if TORCH_BEST in by_side else None
        name = f"computing while a save drains: {loop}, of idle"
        lines.append(Line(name, _MIN_COMPUTING_SHARE[loop], True, Unit.TIMES, own))
        if best is not None and loop == "matmul":
            lines.append(Line(f"the same to torch's best: {loop}", 1.0, True, Unit.TIMES, own / best))
    return lines


def _of_first(result: FirstResult) -> list[Line]:
    if TORCH_BEST not in result.samples:
        return []
    own, best = result.durable_runs_s(RAY_DCP), result.durable_runs_s(TORCH_BEST)
    to_best = median(best) / median(own)
    name = "first async save: speed to torch's best"
    return [Line(name, _FIRST_TIMES_AS_FAST_AS_BEST, True, Unit.TIMES, to_best, min(best) / min(own), to_best)]


def _of_steady(result: SteadyResult) -> list[Line]:
    of_buffers = result.staging_per_buffers
    taken = median(result.taken_nbytes)
    return [
        Line("steady: shared memory / staging buffers", _MAX_STAGING_PER_BUFFERS, False, Unit.TIMES, of_buffers),
        Line("steady: grown over all saves", _MAX_GROWN_NBYTES, False, Unit.MB, result.grown_nbytes),
        Line("steady: memory taken in a save", _MAX_TAKEN_NBYTES, False, Unit.MIB, taken),
    ]


_LINES_OF: Mapping[type[Any], Callable[[Any], list[Line]]] = {
    SpreadResult: _read_per_needed,
    DrainResult: _of_drain,
    FirstResult: _of_first,
    SteadyResult: _of_steady,
}
