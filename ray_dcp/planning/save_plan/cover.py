"""Checks whether chunks make up a whole tensor, each element once, and tells which rows of which ranks are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from ray_dcp.planning.disjoint import overlapping
from ray_dcp.wording import joined, ranks_text

_MAX_TOLD = 3
"""Most places of one kind that a message tells for one tensor."""
_MAX_LOOKS = 200_000
"""Most looks at chunks for one tensor's message: a tensor in a million pieces must not hold up the error."""
_DIMS = ("rows", "columns")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Held:
    """A chunk, and the ranks that have it; ``ranks`` is empty where they are not known."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def span(self, dim: int) -> Span:
        """(start, end) of the chunk in dimension ``dim``."""
        return self.offsets[dim], self.offsets[dim] + self.sizes[dim]


def is_covered(size: Sequence[int], held: Sequence[Held]) -> bool:
    """Whether the chunks hold each element exactly once, and nothing else."""
    if any(_outside(size, one) for one in held) or sum(one.numel for one in held) != math.prod(size):
        return False
    return not any(overlapping([(one.offsets, one.sizes) for one in held]))


def cover_problem(size: Sequence[int], held: Sequence[Held]) -> str:
    """What is wrong, in words: never empty. Call it only where ``is_covered`` is False.

    An example: ``no rank has rows 3:4; rank 0 and rank 2 both have rows 5:6``. The text is bounded in length. So is
    the time: for chunks that lie wildly it tells the number of elements instead of the holes.
    """
    outside = [one for one in held if _outside(size, one)]
    inside = [one for one in held if not _outside(size, one) and one.numel > 0]
    told = [_outside_text(one, size) for one in outside[:_MAX_TOLD]]
    pairs = overlapping([(one.offsets, one.sizes) for one in inside])
    told += [_overlap_text(inside[a], inside[b], size) for a, b in islice(pairs, _MAX_TOLD)]
    looks = [_MAX_LOOKS]
    holes = list(islice(_holes(size, inside, 0, looks), _MAX_TOLD + 1))
    whole = not held or bool(held[0].ranks)
    if holes:
        more = " and more" if len(holes) > _MAX_TOLD else ""
        regions = joined(region(hole, size) for hole in holes[:_MAX_TOLD])
        told.append(f"{'no rank has' if whole else 'no chunk holds'} {regions}{more}")
    elif looks[0] <= 0 or not told:
        planned = sum(one.numel for one in inside)
        told.append(f"{len(inside)} chunks hold {planned} of {math.prod(size)} elements")
    return "; ".join(told)


def region(spans: Sequence[Span], size: Sequence[int]) -> str:
    """A region in words, such as ``rows 2:4, columns 0:8, dim 3 0:2``; a dimension that is there whole is left out."""
    names = ("elements",) if len(size) == 1 else _DIMS
    told = [
        f"{names[dim] if dim < len(names) else f'dim {dim}'} {start}:{end}"
        for dim, (start, end) in enumerate(spans)
        if (start, end) != (0, size[dim])
    ]
    return ", ".join(told) or "all of it"


def _outside(size: Sequence[int], one: Held) -> bool:
    if len(one.offsets) != len(size) or len(one.sizes) != len(size):
        return True
    places = zip(one.offsets, one.sizes, size, strict=True)
    return any(offset < 0 or extent < 0 or offset + extent > whole for offset, extent, whole in places)


def _spans(one: Held) -> list[Span]:
    return [one.span(dim) for dim in range(len(one.offsets))]


def _holes(size: Sequence[int], held: Sequence[Held], dim: int, looks: list[int]) -> Iterator[list[Span]]:
    """Yield the regions that none of ``held`` has, slab by slab along ``dim``. ``looks`` is counted down."""
    if dim == len(size):
        if not held:
            yield []
        return
    if not held:
        if math.prod(size[dim:]):
            yield [(0, whole) for whole in size[dim:]]
        return
    cuts = sorted({0, size[dim], *(edge for one in held for edge in one.span(dim))})
    by_start = sorted(held, key=lambda one: one.offsets[dim])
    active: list[Held] = []
    position = 0
    before: list[tuple[Span, list[Span]]] = []
    for start, end in pairwise(cuts):
        while position < len(by_start) and by_start[position].offsets[dim] <= start:
            active.append(by_start[position])
            position += 1
        active = [one for one in active if one.span(dim)[1] > start]
        looks[0] -= len(active) + 1
        if looks[0] <= 0:
            return
        # Looks for few more holes than are told: a checkerboard has as many holes as chunks.
        below = list(islice(_holes(size, active, dim + 1, looks), _MAX_TOLD + 1))
        if before and [rest for _, rest in before] == below and before[0][0][1] == start:
            before = [((span[0], end), rest) for span, rest in before]
            continue
        yield from ([span, *rest] for span, rest in before)
        before = [((start, end), rest) for rest in below]
    yield from ([span, *rest] for span, rest in before)


def _outside_text(one: Held, size: Sequence[int]) -> str:
    shape = f"a tensor of shape {tuple(size)}"
    if len(one.offsets) != len(size) or len(one.sizes) != len(size):
        return f"{_who(one)} {_has(one)} a chunk of {len(one.sizes)} dimensions of {shape}"
    return f"{_who(one)} {_has(one)} {region(_spans(one), size)} of {shape}"


def _overlap_text(a: Held, b: Held, size: Sequence[int]) -> str:
    a, b = sorted((a, b), key=lambda one: one.ranks)
    shared = [(max(x, u), min(y, v)) for (x, y), (u, v) in zip(_spans(a), _spans(b), strict=True)]
    if not a.ranks and not b.ranks:
        return f"two chunks hold {region(shared, size)}"
    if a.ranks == b.ranks and len(a.ranks) == 1:
        return f"{ranks_text(a.ranks)} has {region(shared, size)} twice"
    return f"{_who(a)} and {_who(b)} both have {region(shared, size)}"


def _who(one: Held) -> str:
    return ranks_text(one.ranks) if one.ranks else "a chunk"


def _has(one: Held) -> str:
    return "holds" if not one.ranks else "has" if len(one.ranks) == 1 else "have"
