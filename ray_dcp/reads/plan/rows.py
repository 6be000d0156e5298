"""Finds where a box of a stored chunk lies in its payload: as equally spaced rows, or as pieces of bounded size."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """``num`` rows of ``width`` elements; the first starts at element ``first`` of the payload, the others each
    ``stride`` elements after the one before."""

    first: int
    width: int
    stride: int
    num: int

    @property
    def end(self) -> int:
        """The element of the payload behind the last row."""
        return self.first + (self.num - 1) * self.stride + self.width


@functools.lru_cache(maxsize=4096)  # a model has thousands of tensors and a dozen layouts
def rows_of(sizes: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Rows | None:
    """The rows of the box at ``offsets`` of shape ``lengths`` in a row-major chunk of shape ``sizes``.

    None where the rows are not equally spaced. The box must not be empty.
    """
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    cut = [dim for dim in range(len(sizes)) if lengths[dim] != sizes[dim]]
    if not cut:
        return Rows(first, math.prod(sizes), math.prod(sizes), 1)
    last = cut[-1]
    above = [dim for dim in range(last) if lengths[dim] > 1]
    # Equally spaced: each step in an outer dimension goes on where the steps in the next inner one would.
    if any(strides[outer] != lengths[inner] * strides[inner] for outer, inner in itertools.pairwise(above)):
        return None
    stride = strides[above[-1]] if above else sizes[last] * strides[last]
    return Rows(first, lengths[last] * strides[last], stride, math.prod(lengths[:last]))


def spans(rows: Rows, unit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of elements that hold all rows, in order, each from one multiple of ``unit`` to another.

    A gap between rows that holds a whole unit is left out.
    """
    start, end = rows.first // unit * unit, 0
    for row in range(rows.num if rows.stride - rows.width >= unit else 1):
        begins = rows.first + row * rows.stride
        ends = begins + rows.width if rows.stride - rows.width >= unit else rows.end
        if end and begins // unit * unit > end:
            yield start, end
            start = begins // unit * unit
        end = -(-ends // unit) * unit
    yield start, end


@dataclass(frozen=True, slots=True)
class BoxPiece:
    """Some rows of a chunk's first dimensions, and the part of a box that lies in them."""

    start: int
    """Offset of the rows' first byte in the payload."""
    sizes: tuple[int, ...]
    """Shape of the rows."""
    offsets: tuple[int, ...]
    """Begin of the wanted part in the rows, in elements of each dimension."""
    lengths: tuple[int, ...]
    """Shape of the wanted part."""
    place: tuple[int | slice, ...]
    """Place of the wanted part in the box, as an index."""


def box_pieces(
    sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int, most_nbytes: int
) -> Iterator[BoxPiece]:
    """Yield a box as pieces of at most ``most_nbytes``, but no shorter than a row of the last dimension.

    A payload is row-major. A box of it is runs of rows of its first dimension; rows too large for one piece are boxes
    of one dimension less.
    """
    if math.prod(lengths):
        yield from _box_pieces(0, sizes, offsets, lengths, (), itemsize, most_nbytes)


def _box_pieces(
    start: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    place: tuple[int | slice, ...],
    itemsize: int,
    most_nbytes: int,
) -> Iterator[BoxPiece]:
    if not sizes:
        yield BoxPiece(start, (), (), (), place)
        return
    row_nbytes = math.prod(sizes[1:]) * itemsize
    first, num_rows = offsets[0], lengths[0]
    if row_nbytes > most_nbytes and len(sizes) > 1:
        for row in range(num_rows):
            at = start + (first + row) * row_nbytes
            yield from _box_pieces(at, sizes[1:], offsets[1:], lengths[1:], (*place, row), itemsize, most_nbytes)
        return
    rows_a_piece = max(1, most_nbytes // row_nbytes)
    for row in range(0, num_rows, rows_a_piece):
        rows = min(rows_a_piece, num_rows - row)
        yield BoxPiece(
            start + (first + row) * row_nbytes,
            (rows, *sizes[1:]),
            (0, *offsets[1:]),
            (rows, *lengths[1:]),
            (*place, slice(row, row + rows)),
        )
