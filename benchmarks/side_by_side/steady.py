"""What many asynchronous saves in a row take of memory: of the ranks and of the processes that work for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from side_by_side.process_use import kept_nbytes
from side_by_side.rounds import Place, Step, folder_for_once
from side_by_side.sides import RAY_DCP
from side_by_side.spread import StartReaders
from side_by_side.workloads import NUM_RANKS, Steady

NUM_BUFFERS = 2
"""Staging buffers of a rank, by default."""
_NUM_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory that no file backs, of all processes together."""

    private_nbytes: int
    shared_nbytes: int


@dataclass(frozen=True, slots=True)
class SteadyResult:
    name: str
    nbytes: int
    before: Kept
    """Before the first save."""
    kept: Sequence[Kept]
    """After each save but the first few."""
    taken_nbytes: Sequence[int]
    """In each of these saves, by the rank that took most anew."""
    differences: tuple[str, ...]

    @property
    def verified(self) -> bool:
        return not self.differences

    @property
    def staging_per_buffers(self) -> float:
        """Shared memory at the end, in as many times the state as there are staging buffers."""
        return (self.kept[-1].shared_nbytes - self.before.shared_nbytes) / (self.nbytes * NUM_BUFFERS)

    @property
    def grown_nbytes(self) -> int:
        """From the first counted save to the last one, or to the largest between."""
        totals = [one.private_nbytes + one.shared_nbytes for one in self.kept]
        return max(totals) - totals[0]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "verified": self.verified,
            "staging_per_buffers": self.staging_per_buffers,
            "grown_nbytes": self.grown_nbytes,
        }


def num_steps(steady: Steady) -> int:
    """How many steps ``measure_steady`` takes."""
    return _NUM_WARM_UP + steady.num_saves


def measure_steady(
    steady: Steady,
    place: Place,
    start_ranks: StartReaders,
    helpers_of: Callable[[Any], list[int]],
    step: Step,
) -> SteadyResult:
    """Have new ranks save ``steady.num_saves`` times after a few to warm up, to a new folder each time.

    ``helpers_of`` them are the processes that work for them.
    """
    kept: list[Kept] = []
    taken: list[int] = []
    wrong: set[str] = set()
    with start_ranks(NUM_RANKS, f"{place.folder}/steady-ranks") as ranks:
        ranks.run("hold", steady.state)
        ranks.run("end_warm_up")
        pids = ranks.run("pid")
        before = _kept_by([*pids, *helpers_of(ranks)])
        for number in range(-_NUM_WARM_UP, steady.num_saves):
            step(f"{steady.name}, save {number + 1} of {steady.num_saves}")
            with folder_for_once(f"{place.folder}/steady") as folder:
                saves = ranks.run("async_save", RAY_DCP, f"{folder}/checkpoint", False)
                if number >= 0:
                    kept.append(_kept_by([*pids, *helpers_of(ranks)]))
                    taken.append(max(save.durable.used.extra_nbytes for save in saves))
                if number in (-_NUM_WARM_UP, steady.num_saves - 1):
                    wrong.update(*ranks.run("differences_in", f"{folder}/checkpoint"))
    return SteadyResult(steady.name, steady.state.nbytes, before, kept, taken, tuple(sorted(wrong)))


def _kept_by(pids: Sequence[int]) -> Kept:
    sizes = [kept_nbytes(pid) for pid in pids]
    return Kept(sum(private for private, _ in sizes), sum(shared for _, shared in sizes))
