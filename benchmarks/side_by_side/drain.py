"""How fast the ranks compute while an asynchronous save drains behind them, as a share of what they do when idle.

From the return of ``async_save`` until the checkpoint is durable, a loop runs in every rank; right before, the same
loop runs for a while with nothing beside it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from side_by_side.loops import LOOPS
from side_by_side.rank import Computed
from side_by_side.rounds import Place, Step, folder_for_once
from side_by_side.workloads import Drain


@dataclass(frozen=True, slots=True)
class DrainSample:
    """One save of one side, and the loop meanwhile: of the rank that was held up most."""

    idle_per_s: float
    meanwhile_per_s: float
    seconds: float
    """From the return of the call until the checkpoint was durable."""
    differences: tuple[str, ...]

    @property
    def share(self) -> float:
        return self.meanwhile_per_s / self.idle_per_s


@dataclass(frozen=True, slots=True)
class DrainResult:
    name: str
    nbytes: int
    samples: Mapping[str, Mapping[str, Sequence[DrainSample]]]
    """By loop, then by side."""

    @property
    def verified(self) -> bool:
        every = [one for by_side in self.samples.values() for of_side in by_side.values() for one in of_side]
        return not any(sample.differences for sample in every)

    def shares(self, loop: str, side: str) -> list[float]:
        return [sample.share for sample in self.samples[loop][side]]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "nbytes": self.nbytes,
            "verified": self.verified,
            "loops": {
                loop: {
                    side: {
                        "median_share": median(self.shares(loop, side)),
                        "runs": [asdict(one) | {"share": one.share} for one in samples],
                    }
                    for side, samples in by_side.items()
                }
                for loop, by_side in self.samples.items()
            },
        }


def num_steps(sides: Sequence[str], num_runs: int) -> int:
    """How many steps ``measure_drain`` takes."""
    return (num_runs + 1) * len(sides)


def measure_drain(
    drain: Drain, sides: Sequence[str], place: Place, num_runs: int, seed: int, step: Step
) -> DrainResult:
    """Measure each loop ``num_runs`` times on all sides, after one round to warm up, in an order by ``seed``."""
    place.ranks.run("hold", drain.state)
    samples: dict[str, dict[str, list[DrainSample]]] = {loop: {side: [] for side in sides} for loop in LOOPS}
    chance = random.Random(f"{seed} {drain.name}")
    for number in range(num_runs + 1):
        for side in chance.sample(sides, len(sides)):
            step(f"{drain.name}, " + (f"run {number} of {num_runs}: {side}" if number else f"warming up: {side}"))
            for loop in chance.sample(list(LOOPS), len(LOOPS)):
                sample = _sample(side, loop, place)
                if number:
                    samples[loop][side].append(sample)
        place.ranks.run("end_warm_up")
    return DrainResult(drain.name, drain.state.nbytes, samples)


def _sample(side: str, loop: str, place: Place) -> DrainSample:
    with folder_for_once(f"{place.folder}/{side}") as folder:
        computed: list[Computed] = place.ranks.run("compute_while_saving", side, f"{folder}/checkpoint", loop)
        wrong = place.ranks.run("differences_in", f"{folder}/checkpoint")
    slowest = min(computed, key=lambda one: one.meanwhile_per_s / one.idle_per_s)
    names = tuple(sorted({name for of_rank in wrong for name in of_rank}))
    return DrainSample(slowest.idle_per_s, slowest.meanwhile_per_s, slowest.seconds, names)
