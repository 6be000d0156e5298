"""How much of a checkpoint the ranks of a larger group read to have what each of them needs.

Nothing is timed: how many bytes are read follows from the plan, not from the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from side_by_side.rank import Load
from side_by_side.rounds import Place, Step, folder_for_once
from side_by_side.states import Layout
from side_by_side.workloads import NUM_RANKS, Spread

StartReaders = Callable[[int, str], Any]
"""A context manager around that many more ``Ranks``, with a folder for them to find each other."""


@dataclass(frozen=True, slots=True)
class BytesRead:
    """By all readers together, in one load."""

    needed_nbytes: int
    counted_nbytes: int
    """By the kernel, in the readers' processes: whatever they read, metadata too."""
    reported_nbytes: int | None
    """As the side itself says; None where it says nothing."""
    differences: tuple[str, ...]
    """Names that came out wrong."""

    @property
    def read_per_needed(self) -> float:
        """By the larger of the two counts: nobody's word is taken for it."""
        return max(self.counted_nbytes, self.reported_nbytes or 0) / self.needed_nbytes


@dataclass(frozen=True, slots=True)
class SpreadResult:
    name: str
    num_readers: int
    nbytes: int
    loads: Mapping[str, Mapping[str, BytesRead]]
    """By layout, then by side."""

    @property
    def verified(self) -> bool:
        return not any(read.differences for by_side in self.loads.values() for read in by_side.values())

    def title(self, layout: str) -> str:
        return f"{NUM_RANKS} -> {self.num_readers} ranks, {layout}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_writers": NUM_RANKS,
            "num_readers": self.num_readers,
            "nbytes": self.nbytes,
            "verified": self.verified,
            "loads": {
                layout: {side: asdict(read) | {"read_per_needed": read.read_per_needed} for side, read in loads.items()}
                for layout, loads in self.loads.items()
            },
        }


def measure_spread(
    spread: Spread, sides: Sequence[str], place: Place, start_readers: StartReaders, step: Step
) -> SpreadResult:
    """Save with the ranks in rows, and load in both layouts with ``spread.num_readers`` others."""
    ranks = place.ranks
    ranks.run("hold", spread.state)
    loads: dict[str, dict[str, BytesRead]] = {layout.name.lower(): {} for layout in Layout}
    step(f"{spread.name}: starting {spread.num_readers} ranks")
    with start_readers(spread.num_readers, f"{place.folder}/readers") as readers:
        readers.run("expect", spread.state)
        for side in sides:
            step(f"{spread.name}: {side}")
            with folder_for_once(f"{place.folder}/{side}") as checkpoints:
                readers.run("try_out", side, f"{checkpoints}/try-out")
                ranks.run("save", side, f"{checkpoints}/checkpoint")
                for layout in Layout:
                    loaded = readers.run("load", side, f"{checkpoints}/checkpoint", layout)
                    loads[layout.name.lower()][side] = bytes_read(loaded)
    return SpreadResult(spread.name, spread.num_readers, spread.state.nbytes, loads)


def num_steps(sides: Sequence[str]) -> int:
    """How many steps ``measure_spread`` takes."""
    return 1 + len(sides)


def bytes_read(loads: Sequence[Load]) -> BytesRead:
    """Of all ranks of one load."""
    reports = [load.reported_nbytes for load in loads]
    return BytesRead(
        needed_nbytes=sum(load.needed_nbytes for load in loads),
        counted_nbytes=sum(load.call.used.read_nbytes for load in loads),
        reported_nbytes=None if None in reports else sum(nbytes or 0 for nbytes in reports),
        differences=tuple(sorted({name for load in loads for name in load.differences})),
    )
