"""Byte ranges: cut into pieces where they are long, joined where they lie close together. Nothing is read here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BufferedRange:
    """``nbytes`` from ``offset`` of an object, and the memory they go to."""

    offset: int
    nbytes: int
    buffers: tuple[memoryview, ...]

    def scatter(self, content: bytes) -> None:
        """Copy what was read, ``nbytes`` long, to where it goes."""
        start = 0
        for buffer in self.buffers:
            buffer[:] = content[start : start + len(buffer)]
            start += len(buffer)


def split_range(offset: int, buffers: Sequence[memoryview], piece_nbytes: int) -> Iterator[BufferedRange]:
    """Cut what fills ``buffers`` into ranges of at most ``piece_nbytes``, in order.

    A large buffer gets ranges of its own, so that they can be read without a copy; small ones share a range.
    """
    shared: list[memoryview] = []
    held = 0
    for buffer in buffers:
        if shared and held + len(buffer) > piece_nbytes:
            yield BufferedRange(offset, held, tuple(shared))
            offset, shared, held = offset + held, [], 0
        if len(buffer) <= piece_nbytes:
            if len(buffer):
                shared.append(buffer)
                held += len(buffer)
            continue
        for start in range(0, len(buffer), piece_nbytes):
            part = buffer[start : start + piece_nbytes]
            yield BufferedRange(offset, len(part), (part,))
            offset += len(part)
    if shared:
        yield BufferedRange(offset, held, tuple(shared))


def joined(
    parts: Iterable[_T], place: Callable[[_T], tuple[int, int]], *, max_gap: int = 0, max_length: int | None = None
) -> Iterator[tuple[int, int, list[_T]]]:
    """Runs of ``parts`` that lie close together, each as (start, end, its parts in order).

    ``place`` is the (start, end) of a part, in bytes or blocks; parts come in the order of their starts. A run goes on
    over a gap of ``max_gap`` and over parts that overlap, and is ``max_length`` long unless one part alone is longer.
    """
    run: list[_T] = []
    start = end = 0
    for part in parts:
        first, last = place(part)
        until = max(end, last)
        if run and (first - end > max_gap or (max_length is not None and until - start > max_length)):
            yield start, end, run
            run = []
        if not run:
            start, until = first, last
        run.append(part)
        end = until
    if run:
        yield start, end, run
