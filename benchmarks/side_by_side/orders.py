"""Whose turn it is when: drawn for each round, so that no side always comes right after one and the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

LIMITS = "limits"
"""The probes of what the machine can do, which take their turn as a side does."""

Turn = tuple[str, ...]
"""Sides that are measured together: each measure on all of them, one right after the other, before the next measure."""
Order = tuple[Turn, ...]
"""Of one round."""


def drawn_orders(others: Sequence[str], together: Sequence[str], num_rounds: int, seed: str) -> list[Order]:
    """The order of each round, the same for the same ``seed``.

    A side of ``others`` has a turn to itself. ``together`` is one turn, with the limits before or after: all that is
    divided by each other is done side by side.
    """
    chance = random.Random(seed)
    turns = islice(_both_ways_equally_often(together, chance), num_rounds)
    return [_shuffled([turn, *((side,) for side in others)], chance) for turn in turns]


def _both_ways_equally_often(together: Sequence[str], chance: random.Random) -> Iterator[Turn]:
    """Of each two rounds one has the turn of the other backwards.

    So in any even number of rounds each of two sides is first, and so are the limits, as often as last.
    """
    while True:
        for sides in _shuffled([tuple(together), tuple(reversed(together))], chance):
            forwards = (LIMITS, *sides)
            yield from _shuffled([forwards, forwards[::-1]], chance)


def _shuffled(turns: Sequence[Turn], chance: random.Random) -> Order:
    return tuple(chance.sample(turns, len(turns)))
