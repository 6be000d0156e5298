"""How a store is best read: how much at once, what together, and with how many reads under way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.store.ranges import joined
from ray_dcp.store.store import StoreTraits

_CACHED_UNIT_NBYTES = BLOCK_NBYTES
"""Bytes that stay in a core's own cache until they are checked and copied on.

A whole block, so that no damage gets further.

1 GiB read, checked and copied as columns by two ranks: a quarter 264 ms, half 246, one block 250, two 281.
"""
_CACHED_PIECE_NBYTES = BLOCK_NBYTES // 2
"""Bytes that stay in a core's own cache; measured against an eighth, a quarter, one and two blocks."""
_ONE_THREAD_BATCH_NBYTES = 512 * BLOCK_NBYTES
_BATCH_NBYTES = 64 * BLOCK_NBYTES
"""Bytes of a batch where several threads read: few enough that all threads find something to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShape:
    """The sizes, in bytes, and the number of reads with which a store is best read."""

    unit_nbytes: int
    """Bytes of a large payload that are read at once, where it passes through the reader's memory."""
    piece_nbytes: int
    """Bytes of a large payload that are read at once, where it goes straight to where it belongs."""
    run_nbytes: int
    """Bytes of small payloads that are read at once."""
    max_gap_nbytes: int
    """Most bytes between two small payloads of one read: a larger gap is left out."""
    num_in_flight: int
    """Number of reads under way at once."""
    batch_nbytes: int = 0
    """Bytes of large payloads that are made ready together and read one after the other; 0: each by itself."""


def read_shape(traits: StoreTraits) -> ReadShape:
    """The shape for a store of these traits.

    What the page cache holds is read at most a few blocks at a time, and checked while the CPU's cache has it.
    """
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
    """Yield ``parts``, sorted by their offsets, in runs to be read at once; one longer than a run is alone."""
    for _, _, run in joined(parts, _place, max_gap=shape.max_gap_nbytes, max_length=shape.run_nbytes):
        yield run


def _place(part: Part) -> tuple[int, int]:
    return part.offset, part.offset + part.nbytes


def batches(parts: Iterable[P], nbytes: int) -> Iterator[list[P]]:
    """Yield ``parts`` in their order in batches; each but the last is the shortest of ``nbytes`` or more."""
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
    """Whether a record is read whole, together with its neighbours, as Python objects always are."""
    return nbytes <= BLOCK_NBYTES or not is_tensor
