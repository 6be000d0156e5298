"""``PerRank``: values that belong to one rank, such as random state or a data cursor.

In a checkpoint the value of rank r under the name ``rng`` is the Python object ``rng.__rank_<r>__``: a tuple of
one, since planners flatten dicts and lists but never tuples. So any planner carries it, and none deduplicates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray_dcp.errors import StateDictError
from ray_dcp.planning.assignable import assign_problem
from ray_dcp.planning.values.flat import LEAVES

_NAME = re.compile(r"(?P<fqn>.+)\.__rank_(?P<rank>\d+)__")

Reshard = Callable[[list[Any], int, int], Any]
"""A function (values of all saving ranks in rank order, this rank, world size now) -> this rank's value."""


class PerRank:
    """A value of this rank alone: never deduplicated, given back to the same rank.

    Loaded at the world size it was saved at, ``.value`` becomes this rank's own saved value. At another one
    ``reshard(values, rank, world_size)`` is called with the values of all saving ranks in rank order and returns
    this rank's; without it the load is refused, since no rule for splitting or merging is right for all values.
    """

    def __init__(self, value: Any, reshard: Reshard | None = None) -> None:
        self.value = value
        self.reshard = reshard

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def per_rank_key(rank: int) -> str:
    return f"__rank_{rank}__"


class OneRanksValue(dict[str, Any]):
    """The dict of one item that stands in a state dict for the ``PerRank`` of one rank.

    It has a class of its own, so that a place where it would be pickled, and stored by one rank for all, can be told.
    """

    def __init__(self, value: Any, rank: int) -> None:
        super().__init__({per_rank_key(rank): (value,)})


def is_per_rank_name(fqn: str) -> bool:
    """Whether ``fqn`` names one rank's value in a checkpoint."""
    return per_rank_base(fqn) is not None


def per_rank_base(fqn: str) -> str | None:
    """The name of the ``PerRank`` value if ``fqn`` is the name of one rank's part of it; else None."""
    match = _NAME.fullmatch(fqn) if ".__rank_" in fqn else None
    return match["fqn"] if match else None


def per_rank_fqn(fqn: str) -> str:
    """The name of the ``PerRank`` of which ``fqn`` is one rank's value; any other name stays as it is."""
    return per_rank_base(fqn) or fqn


def per_rank_world_sizes(fqns: Iterable[str]) -> dict[str, int]:
    """The number of ranks that saved each per-rank value, by its name."""
    world_sizes: dict[str, int] = {}
    for fqn in fqns:
        match = _NAME.fullmatch(fqn) if ".__rank_" in fqn else None
        if match:
            name = match["fqn"]
            world_sizes[name] = max(world_sizes.get(name, 0), int(match["rank"]) + 1)
    return world_sizes


@dataclass(frozen=True, slots=True)
class _PerRankPlace:
    container: Any
    key: Any
    fqn: str
    wanted: PerRank


class PerRankTemplate:
    """The ``PerRank`` values of a template, for one load at ``rank`` of ``world_size``."""

    def __init__(self, template: dict[str, Any], rank: int, world_size: int) -> None:
        """Find them. Raises ``StateDictError`` for a value in a container that cannot be changed."""
        self._slots = list(_find(template, ""))
        found = [(slot.fqn, assign_problem(slot.container, slot.key)) for slot in self._slots]
        problems = [f"{fqn}: a PerRank that {problem}" for fqn, problem in found if problem is not None]
        if problems:
            raise StateDictError("the template holds what a load cannot fill", problems)
        self._rank = rank
        self._world_size = world_size

    def problems(self, saved_names: Iterable[str]) -> list[str]:
        """A line for each of these values that cannot be loaded."""
        saved = per_rank_world_sizes(saved_names)
        return [
            f"{slot.fqn}: saved by {saved[slot.fqn]} ranks, loading on {self._world_size}: "
            "pass PerRank(..., reshard=function(values, rank, world_size)) to say what each rank gets"
            for slot in self._slots
            if slot.fqn in saved and saved[slot.fqn] != self._world_size and slot.wanted.reshard is None
        ]

    @contextmanager
    def expanded(self, saved_names: Iterable[str]) -> Iterator[None]:
        """Replace each value by the dict of per-rank items that it needs, within the block.

        After the block the ``PerRank`` is back, and items that were filled in have become its ``.value``. A block that
        is left by an exception changes nothing.
        """
        saved = per_rank_world_sizes(saved_names)
        places: list[dict[str, tuple[Any, ...]]] = [
            dict.fromkeys(self._keys_needed(saved.get(slot.fqn)), ()) for slot in self._slots
        ]
        try:
            for slot, place in zip(self._slots, places, strict=True):
                slot.container[slot.key] = place
            yield
        finally:
            for slot in self._slots:
                slot.container[slot.key] = slot.wanted
        for slot, place in zip(self._slots, places, strict=True):
            if all(place.values()):
                slot.wanted.value = self._own_value(slot, [value[0] for value in place.values()], saved[slot.fqn])

    def _keys_needed(self, saved_world_size: int | None) -> list[str]:
        if saved_world_size is None or saved_world_size == self._world_size:
            return [per_rank_key(self._rank)]
        return [per_rank_key(rank) for rank in range(saved_world_size)]

    def _own_value(self, slot: _PerRankPlace, values: list[Any], saved_world_size: int) -> Any:
        if saved_world_size == self._world_size:
            return values[0]
        assert slot.wanted.reshard is not None, "problems() refuses this before anything is read"
        return slot.wanted.reshard(values, self._rank, self._world_size)


def _find(container: Any, prefix: str) -> Iterator[_PerRankPlace]:
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(container, Mapping):
        entries = list(container.items())
    elif isinstance(container, MutableSequence):
        entries = list(enumerate(container))
    for key, value in entries:
        if type(value) in LEAVES:
            continue
        fqn = f"{prefix}{key}"
        if isinstance(value, PerRank):
            yield _PerRankPlace(container, key, fqn, value)
        else:
            yield from _find(value, f"{fqn}.")
