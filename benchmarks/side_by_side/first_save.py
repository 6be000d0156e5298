"""The first asynchronous save of new processes, from the call until the checkpoint is durable.

Whatever a side starts for asynchronous saves it starts there, unless it has something to be done before training
(``Side.warm_up``), which is not timed. All else that a side imports has been imported.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from side_by_side.rank import AsyncSave
from side_by_side.rounds import Place, Step, folder_for_once
from side_by_side.spread import StartReaders
from side_by_side.timed_call import wall_s
from side_by_side.workloads import NUM_RANKS, First


@dataclass(frozen=True, slots=True)
class FirstSample:
    """One first save: of the rank that took longest."""

    stalled_s: float
    durable_s: float
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FirstResult:
    name: str
    nbytes: int
    samples: Mapping[str, Sequence[FirstSample]]
    """By side."""

    @property
    def verified(self) -> bool:
        return not any(sample.differences for samples in self.samples.values() for sample in samples)

    def durable_runs_s(self, side: str) -> list[float]:
        return [sample.durable_s for sample in self.samples[side]]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "nbytes": self.nbytes,
            "verified": self.verified,
            "sides": {
                side: {"median_s": median(self.durable_runs_s(side)), "runs": [asdict(one) for one in samples]}
                for side, samples in self.samples.items()
            },
        }


def num_steps(sides: Sequence[str], num_runs: int) -> int:
    """How many steps ``measure_first`` takes."""
    return num_runs * len(sides)


def measure_first(
    first: First, sides: Sequence[str], place: Place, start_ranks: StartReaders, num_runs: int, seed: int, step: Step
) -> FirstResult:
    """Start ranks anew for each of ``num_runs`` saves of each side, in an order by ``seed``."""
    chance = random.Random(f"{seed} {first.name}")
    samples: dict[str, list[FirstSample]] = {side: [] for side in sides}
    for number in range(num_runs):
        for side in chance.sample(sides, len(sides)):
            step(f"{first.name}, run {number + 1} of {num_runs}: {side}")
            with folder_for_once(f"{place.folder}/first-{number}-{side}") as folder:
                samples[side].append(_sample(first, side, start_ranks, folder))
    return FirstResult(first.name, first.state.nbytes, samples)


def _sample(first: First, side: str, start_ranks: StartReaders, folder: str) -> FirstSample:
    with start_ranks(NUM_RANKS, f"{folder}/ranks") as ranks:
        ranks.run("try_out", side, f"{folder}/try-out")
        ranks.run("hold", first.state)
        ranks.run("end_warm_up")
        ranks.run("warm_up", side, f"{folder}/checkpoint")
        saves: list[AsyncSave] = ranks.run("async_save", side, f"{folder}/checkpoint")
        wrong = ranks.run("differences_in", f"{folder}/checkpoint")
    names = tuple(sorted({name for of_rank in wrong for name in of_rank}))
    return FirstSample(max(save.stalled_s for save in saves), wall_s([save.durable for save in saves]), names)
