"""What was measured, and what follows from it: minima, medians, ratios, shares of the limit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from side_by_side.orders import Order
from side_by_side.probes import Limit
from side_by_side.sides import RAY_DCP

MAX_PERCENT = 105.0
"""Nothing is quicker than its limit by more than noise: a figure above this is a bug of the benchmark."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call on all ranks."""

    seconds: float
    extra_nbytes: int
    """Of the process that took most: a rank, or ray_dcp's coordinator."""
    cpu_s: float
    """User and system time of all these processes."""
    differences: tuple[str, ...]
    """Names that came out wrong; empty where the result is right to the bit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One side of one measure: its timed samples, and the one of the round to warm up."""

    samples: Sequence[Sample]
    warm_up: Sample

    @property
    def runs_s(self) -> list[float]:
        return [sample.seconds for sample in self.samples]

    @property
    def minimum_s(self) -> float:
        return min(self.runs_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(sample.cpu_s for sample in self.samples)

    @property
    def minimum_cpu_s(self) -> float:
        return min(sample.cpu_s for sample in self.samples)

    @property
    def peak_extra_nbytes(self) -> int:
        """The round to warm up counts too: there, freed memory was given back, and buffers that are kept are new."""
        return max(sample.extra_nbytes for sample in (self.warm_up, *self.samples))

    @property
    def differences(self) -> list[str]:
        return sorted({name for sample in (self.warm_up, *self.samples) for name in sample.differences})

    @property
    def num_verified(self) -> int:
        return sum(not sample.differences for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Measure:
    """What both sides did, and what the machine could have done at most."""

    name: str
    nbytes: int
    limit: Limit
    limit_runs_s: Sequence[float]
    figures: Mapping[str, Figure]

    @property
    def limit_s(self) -> float:
        return min(self.limit_runs_s)

    @property
    def median_limit_s(self) -> float:
        return statistics.median(self.limit_runs_s)

    def percent_by_minima(self, side: str) -> float:
        """How much of what the machine can do at most this side has got: its best run beside the limit's best."""
        return 100 * self.limit_s / self.figures[side].minimum_s

    def percent_by_medians(self, side: str) -> float:
        return 100 * self.median_limit_s / self.figures[side].median_s

    def beats_limit(self, side: str) -> bool:
        """Whether this side's figure cannot be."""
        return self.limit is not Limit.COPY and self.percent_by_minima(side) > MAX_PERCENT

    def ratio_of_minima(self, other: str) -> float:
        """How many times as fast as ``other`` ray_dcp is."""
        return self.figures[other].minimum_s / self.figures[RAY_DCP].minimum_s

    def ratio_of_medians(self, other: str) -> float:
        return self.figures[other].median_s / self.figures[RAY_DCP].median_s

    def times_as_long_as(self, other: str) -> float:
        """How ray_dcp compares with a side that shares its turns: the median of the ratios of each round."""
        pairs = zip(self.figures[RAY_DCP].runs_s, self.figures[other].runs_s, strict=True)
        return statistics.median(own_s / other_s for own_s, other_s in pairs)


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    name: str
    title: str
    nbytes: int
    measures: Sequence[Measure]
    disk_nbytes: Mapping[str, int]
    """Of all files of a checkpoint, by side."""
    orders: Sequence[Order]
    """Of the timed rounds."""

    @property
    def others(self) -> list[str]:
        """The sides that ray_dcp is compared with."""
        return [side for side in self.disk_nbytes if side != RAY_DCP]

    def ratio_of_sizes(self, other: str) -> float:
        """How large a checkpoint of ray_dcp is, in checkpoints of ``other``."""
        return self.disk_nbytes[RAY_DCP] / self.disk_nbytes[other]

    @property
    def by_name(self) -> dict[str, Measure]:
        return {measure.name: measure for measure in self.measures}

    @property
    def verified(self) -> bool:
        return not any(figure.differences for measure in self.measures for figure in measure.figures.values())

    def as_json(self) -> dict[str, Any]:
        """The same data as the tables show, with every single run."""
        return {
            "name": self.name,
            "title": self.title,
            "nbytes": self.nbytes,
            "verified": self.verified,
            "disk_nbytes": dict(self.disk_nbytes),
            "ratio_of_sizes": {other: self.ratio_of_sizes(other) for other in self.others},
            "orders": self.orders,
            "measures": [_measure_as_json(measure) for measure in self.measures],
        }


def _measure_as_json(measure: Measure) -> dict[str, Any]:
    return {
        "name": measure.name,
        "nbytes": measure.nbytes,
        "limit": {
            "name": measure.limit.value,
            "min_s": measure.limit_s,
            "median_s": measure.median_limit_s,
            "runs_s": list(measure.limit_runs_s),
        },
        "sides": {side: _figure_as_json(measure, side) for side in measure.figures},
        "ratio": {
            other: {"min": measure.ratio_of_minima(other), "median": measure.ratio_of_medians(other)}
            for other in measure.figures
            if other != RAY_DCP
        },
    }


def _figure_as_json(measure: Measure, side: str) -> dict[str, Any]:
    figure = measure.figures[side]
    return {
        "min_s": figure.minimum_s,
        "median_s": figure.median_s,
        "runs_s": figure.runs_s,
        "warm_up_s": figure.warm_up.seconds,
        "percent_of_limit": {
            "min": measure.percent_by_minima(side),
            "median": measure.percent_by_medians(side),
        },
        "beats_limit": measure.beats_limit(side),
        "cpu_runs_s": [sample.cpu_s for sample in figure.samples],
        "peak_extra_nbytes": figure.peak_extra_nbytes,
        "num_verified": figure.num_verified,
        "differences": figure.differences,
    }
