"""How a store is best read: how much at once, what is read together, and how many reads are under way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.store.ranges import joined
from ray_dcp.store.store import StoreTraits

_CACHED_UNIT_NBYTES = BLOCK_NBYTES
"""Stays in a core's own cache until it is checked and copied on; a whole block, so that no damage gets further.

1 GiB read, checked and copied as columns by two ranks: a quarter 264 ms, half 246, one block 250, two 281.
"""
_CACHED_PIECE_NBYTES = BLOCK_NBYTES // 2
"""Stays in a core's own cache; measured against an eighth, a quarter, one and two blocks."""
_ONE_THREAD_BATCH_NBYTES = 512 * BLOCK_NBYTES
_BATCH_NBYTES = 64 * BLOCK_NBYTES
"""Where several threads read: small enough that all of them find something to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShape:
    """How a store is best read."""

    unit_nbytes: int
    """Of a large payload at once, where it passes through memory of the reader's."""
    piece_nbytes: int
    """Of one that goes straight to where it belongs."""
    run_nbytes: int
    """Of small payloads at once."""
    max_gap_nbytes: int
    """Between two of them: more is left out."""
    num_in_flight: int
    batch_nbytes: int = 0
    """Of large payloads that are read one after the other without a look at anything else; 0: each by itself."""


def read_shape(traits: StoreTraits) -> ReadShape:
    """What the page cache holds is read a few blocks at a time and checked while the CPU's cache has it."""
    if traits.page_cache:
        num_in_flight = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
        return ReadShape(
            unit_nbytes=_CACHED_UNIT_NBYTES,
            piece_nbytes=_CACHED_PIECE_NBYTES,
            batch_nbytes=_ONE_THREAD_BATCH_NBYTES if num_in_flight == 1 else _BATCH_NBYTES,
            run_nbytes=4 * BLOCK_NBYTES,
            max_gap_nbytes=16 << 10,
            num_in_flight=num_in_flight,
        )
    request = max(1, traits.request_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
    return ReadShape(
        unit_nbytes=request, piece_nbytes=request, run_nbytes=request, max_gap_nbytes=256 << 10, num_in_flight=8
    )


class Part(Protocol):
    """A range of a file's bytes that holds one value."""

    @property
    def key(self) -> str: ...
    @property
    def fqn(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Part)


def runs(parts: Iterable[P], shape: ReadShape) -> Iterator[list[P]]:
    """``parts``, in order of their offsets, in runs to be read at once; one that is longer than a run is alone."""
    for _, _, run in joined(parts, _place, max_gap=shape.max_gap_nbytes, max_length=shape.run_nbytes):
        yield run


def _place(part: Part) -> tuple[int, int]:
    return part.offset, part.offset + part.nbytes


def batches(parts: Iterable[P], nbytes: int) -> Iterator[list[P]]:
    """``parts`` in their order; each batch but the last is the shortest that has ``nbytes``, and never empty."""
    batch: list[P] = []
    held = 0
    for part in parts:
        batch.append(part)
        held += part.nbytes
        if held >= nbytes:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def is_small(nbytes: int, *, is_tensor: bool) -> bool:
    """Whether a record is read whole, together with its neighbours: Python objects always are."""
    return nbytes <= BLOCK_NBYTES or not is_tensor
