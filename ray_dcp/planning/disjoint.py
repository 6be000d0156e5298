"""Finds boxes that overlap: chunks of a tensor as ranks have them, templates ask for them or files hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

Box = tuple[Sequence[int], Sequence[int]]
"""(offsets, lengths): where a box begins in each dimension, and how far it reaches from there; in elements."""


def overlapping(boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ``boxes`` that share an element, by their positions in ``boxes`` and in no fixed order.

    All boxes have the same number of dimensions. 0-dim boxes are all in one place: of those only neighbours are paired.
    Sweeps along the dimension that tells most of the boxes apart, so that for chunks of a usual sharding the time grows
    linearly with their number.
    """
    held = [number for number, (_, sizes) in enumerate(boxes) if math.prod(sizes)]
    if len(held) < 2:
        return
    if not boxes[held[0]][0]:
        yield from pairwise(held)
        return
    starts = [boxes[number][0] for number in held]
    # The dimensions that tell most apart come first: one of them is enough nearly always.
    dims = sorted(range(len(starts[0])), key=lambda dim: -len({start[dim] for start in starts}))
    spans = [
        [(start[dim], start[dim] + boxes[number][1][dim]) for dim in dims]
        for number, start in zip(held, starts, strict=True)
    ]
    active: list[int] = []
    for number in sorted(range(len(held)), key=lambda number: spans[number][0]):
        own = spans[number]
        active = [other for other in active if spans[other][0][1] > own[0][0]]
        for other in active:
            for (a, b), (c, d) in zip(own[1:], spans[other][1:], strict=True):
                if a >= d or c >= b:
                    break
            else:
                yield held[other], held[number]
        active.append(number)
