"""Guesses what was meant by names that a checkpoint lacks; called only when a load is refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_MAX_SAMPLED = 16
_MAX_COMPARED = 5
_MAX_CANDIDATES = 1000
"""Most names that each of a few names is compared with letter by letter: a tenth of a second at most."""


@dataclass(frozen=True, slots=True)
class OtherPrefix:
    """The checkpoint has names that begin with ``stored`` where the template's begin with ``wanted``."""

    stored: str
    wanted: str
    num_found: int
    """Number of the missing names that are found by this rule."""

    def __str__(self) -> str:
        pattern = f"^{re.escape(self.stored)}"
        return f'rename={{r"{pattern}": "{self.wanted}"}}'


def other_prefix(missing: Collection[str], others: Collection[str]) -> OtherPrefix | None:
    """The prefixes that best explain why ``missing`` are not among ``others``; None where they explain under half."""
    names = sorted(missing)
    sampled = names[:: max(1, len(names) // _MAX_SAMPLED)][:_MAX_SAMPLED]
    held = others if isinstance(others, set | frozenset) else set(others)
    found = {_prefixes(name, other) for name, other in _same_ends(sampled, held)}
    counts = {
        pair: sum(1 for name in names if name.startswith(pair[1]) and pair[0] + name[len(pair[1]) :] in held)
        for pair in found
    }
    if not counts:
        return None
    best = max(sorted(counts), key=lambda pair: counts[pair])
    if counts[best] * 2 < len(names):
        return None
    return OtherPrefix(*best, counts[best])


def nearest(missing: Collection[str], others: Collection[str]) -> dict[str, str]:
    """The name of ``others`` that is written most alike, if any is close, for each of the first few of ``missing``."""
    near: dict[str, str] = {}
    ordered = sorted(others)
    for name in sorted(missing)[:_MAX_COMPARED]:
        last = name.rpartition(".")[2]
        same_end = [other for other in ordered if other.rpartition(".")[2] == last]
        candidates = ordered if len(ordered) <= _MAX_CANDIDATES else same_end[:_MAX_CANDIDATES]
        closest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
        if closest:
            near[name] = closest[0]
    return near


def _same_ends(sampled: Sequence[str], others: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each sampled name with the one of ``others`` that shares the most last parts with it, if any does."""
    ends = {end for name in sampled for end in _ends(name)}
    with_end: dict[str, str] = {}
    for other in others:
        end = next((end for end in _ends(other) if end in ends), None)
        if end is not None and (end not in with_end or _sooner(other, with_end[end])):
            with_end[end] = other
    for name in sampled:
        end = next((end for end in _ends(name) if end in with_end), None)
        if end is not None:
            yield name, with_end[end]


def _sooner(name: str, than: str) -> bool:
    return (len(name), name) < (len(than), than)


def _ends(name: str) -> Iterator[str]:
    """Yield the name, then the name without its first part, and so on."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _prefixes(name: str, other: str) -> tuple[str, str]:
    """(of ``other``, of ``name``): what stands before the last parts that both share; ends in a dot unless empty."""
    own, others = name.split("."), other.split(".")
    same = 0
    while same < min(len(own), len(others)) and own[-1 - same] == others[-1 - same]:
        same += 1
    first, second = (".".join([*parts[: len(parts) - same], ""]) for parts in (others, own))
    return first, second


__all__ = ["OtherPrefix", "nearest", "other_prefix"]
