"""A box of a stored chunk as rows of its payload, and putting bytes that pass into the tensor they belong to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


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
        """Of the last row."""
        return self.first + (self.num - 1) * self.stride + self.width


def rows_of(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Rows | None:
    """The box at ``offsets`` of shape ``lengths`` in a row-major chunk of shape ``sizes``.

    None where its rows do not all lie equally far apart. The box is not empty.
    """
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    cut = [dim for dim in range(len(sizes)) if lengths[dim] != sizes[dim]]
    if not cut:
        return Rows(first, math.prod(sizes), math.prod(sizes), 1)
    last = cut[-1]
    above = [dim for dim in range(last) if lengths[dim] > 1]
    # Equally far apart: each step in an outer dimension goes on where the steps in the next inner one would.
    if any(strides[outer] != lengths[inner] * strides[inner] for outer, inner in itertools.pairwise(above)):
        return None
    stride = strides[above[-1]] if above else sizes[last] * strides[last]
    return Rows(first, lengths[last] * strides[last], stride, math.prod(lengths[:last]))


def put_elements(rows: Rows, target: torch.Tensor, stored: torch.Tensor, start: int) -> None:
    """Copy what ``stored`` has of ``rows`` into ``target``.

    ``stored`` is flat and starts at element ``start`` of the payload. ``target`` has shape (``num``, ``width``).
    """
    end = start + stored.numel()
    row = max(0, (start - rows.first) // rows.stride)
    while row < rows.num:
        begins = rows.first + row * rows.stride
        if begins >= end:
            return
        low, high = max(begins, start), min(begins + rows.width, end)
        if high - low == rows.width and (whole := min(rows.num - row, (end - begins - rows.width) // rows.stride + 1)):
            at = stored.storage_offset() + begins - start
            source = torch.as_strided(stored, (whole, rows.width), (rows.stride, 1), at)
            target[row : row + whole].copy_(source)
            row += whole
            continue
        if high > low:
            target[row, low - begins : high - begins].copy_(stored[low - start : high - start])
        row += 1


def spans(rows: Rows, unit: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements that hold all rows, in order, each from one multiple of ``unit`` to another.

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
