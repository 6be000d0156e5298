"""Loads after a death, by where they took their bytes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MEMORY = "memory"
STORAGE = "storage"
COLD = "storage, not in the page cache"
SOURCES = (MEMORY, STORAGE, COLD)


@dataclass(frozen=True, slots=True)
class Fetch:
    """One load by all ranks."""

    source: str
    seconds: float
    """Of the slowest rank, from a barrier to the return of its load."""


def median_of(fetches: Sequence[Fetch], source: str) -> float | None:
    """Median of the seconds from one source; None where it was not measured."""
    seconds = [fetch.seconds for fetch in fetches if fetch.source == source]
    return median(seconds) if seconds else None
