"""Fills the empty places of a template: empty containers, and ``None``, under which the checkpoint has names.

An optimizer before its first step gives ``state: {}``, a data loader before its first batch ``{}``. What the checkpoint
has below such a place is loaded whole: values of their stored kind, tensors on CPU with their stored shape and dtype,
in the containers that were saved. Nothing of it is in the template before the whole load has been read.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.planning.assignable import Assignments, growth_problem
from ray_dcp.planning.per_rank import PerRank, is_per_rank_name, per_rank_key, per_rank_world_sizes
from ray_dcp.planning.values.containers import MAX_INDEX, NO_KEYS, Containers, is_row, with_containers
from ray_dcp.planning.values.flat import LEAVES

Path = tuple[Any, ...]
"""The keys of mappings and positions in lists that lead to a value, as they are in the template."""


@dataclass(frozen=True, slots=True)
class EmptyPlace:
    """An empty mapping or list, or ``None``, in a template."""

    container: Any
    """The mapping or list that the place is in."""
    key: Any
    fqn: str

    @property
    def value(self) -> Any:
        return self.container[self.key]


@dataclass(frozen=True, slots=True)
class _Grown:
    """One place that is filled, and the path below it of each value that it gets, by the value's name."""

    place: EmptyPlace
    paths: dict[str, Path]
    above: Path | None = None
    """The path of the place in what was saved; None where that is not known."""


class Growth:
    """The values that one load puts into empty places of its template, on this rank."""

    def __init__(
        self,
        empty: Sequence[EmptyPlace],
        names: Collection[str],
        metadata: Metadata,
        *,
        containers: Containers,
        saved_empty: Collection[str],
        rank: int,
        world_size: int,
    ) -> None:
        """``empty`` are places that the checkpoint has no value for, ``names`` its values that the template lacks.

        ``containers`` is what the manifest says of mappings, if anything; ``saved_empty`` names those without a key.
        """
        self._grown: list[_Grown] = []
        self._per_rank: set[str] = set()
        self._rows = [row for row in containers if is_row(row)]
        planner_data = metadata.planner_data
        self._stored_paths = planner_data if isinstance(planner_data, Mapping) else {}
        if not empty:
            return
        self._own = {f"{fqn}.{per_rank_key(rank)}" for fqn, n in per_rank_world_sizes(names).items() if n == world_size}
        ordered = sorted(names)
        self._position = {fqn: number for number, fqn in enumerate(metadata.state_dict_metadata)}
        for place in empty:
            paths = self._paths_below(place, ordered)
            if not paths and place.value is None and place.fqn in saved_empty:
                self._grown.append(_Grown(place, {}))
            # A list where a mapping was saved, or the other way round, stays as it is; what was saved is unexpected.
            fits = place.value is None or all(
                (type(p[0]) is int) == isinstance(place.value, list) for p in paths.values()
            )
            if paths and fits:
                self._grown.append(_Grown(place, paths, self._above(paths)))

    def _above(self, paths: Mapping[str, Path]) -> Path | None:
        """The path in the saved state above all of ``paths``; None where they were not all at one place."""
        found = set()
        for fqn, path in paths.items():
            whole = tuple(self._stored_paths.get(fqn, ()))
            whole = whole[:-1] if fqn in self._per_rank else whole
            found.add(whole[: len(whole) - len(path)] if whole[len(whole) - len(path) :] == path else None)
        return found.pop() if len(found) == 1 else None

    def _paths_below(self, place: EmptyPlace, ordered: Sequence[str]) -> dict[str, Path]:
        """The path below ``place`` of each value there, by its name, in the order in which the values were saved."""
        paths: dict[str, Path] = {}
        for fqn in sorted(_below(ordered, place.fqn), key=self._position.__getitem__):
            path = _rest_of_path(fqn[len(place.fqn) + 1 :], self._stored_paths.get(fqn))
            if not is_per_rank_name(fqn):
                paths[fqn] = path
            elif fqn in self._own and len(path) > 1:
                self._per_rank.add(fqn)
                paths[fqn] = path[:-1]
        return paths

    @property
    def names(self) -> set[str]:
        """The names of all stored values that are put somewhere."""
        return {fqn for grown in self._grown for fqn in grown.paths}

    @property
    def places(self) -> set[str]:
        """The names of the places that are filled."""
        return {grown.place.fqn for grown in self._grown}

    def problems(self, assignments: Assignments) -> list[str]:
        """A line for each place that cannot be filled."""
        found = []
        for place in (grown.place for grown in self._grown):
            empty = place.value
            problem = assignments.problem(place.container, place.key) if empty is None else growth_problem(empty)
            if problem is not None:
                found.append(f"{place.fqn}: {problem}")
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        """Put the loaded values, by name, where they belong."""
        for grown in self._grown:
            place = grown.place
            built = self._built(grown, values)
            if place.value is None:
                place.container[place.key] = built
            elif isinstance(place.value, list):
                place.value.extend(built)
            else:
                place.value.update(built)
            _restore_param_numbers(place.container)
            _restore_param_numbers(place.value)

    def _built(self, grown: _Grown, values: Mapping[str, Any]) -> Any:
        above = grown.above
        if not grown.paths:
            return {}
        built = _built([(path, self._value(fqn, values[fqn])) for fqn, path in grown.paths.items()])
        if above is None:
            return built
        below = [
            [path[len(above) :], kind, keys] for path, kind, keys in self._rows if tuple(path[: len(above)]) == above
        ]
        return with_containers(built, below)

    def _value(self, fqn: str, value: Any) -> Any:
        return PerRank(value[0]) if fqn in self._per_rank else value


def saved_empty_names(containers: Containers) -> list[str]:
    """The stored names of mappings that had no key."""
    return [".".join(map(str, path)) for path, _, keys in filter(is_row, containers) if keys == NO_KEYS]


def empty_places(value: Any, prefix: str) -> Iterator[EmptyPlace]:
    """Yield the empty places below ``value``, in mappings and lists; never ``value`` itself."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries):
        if entry is None:
            yield EmptyPlace(value, key, f"{prefix}{key}")
        elif type(entry) in LEAVES:
            continue
        elif isinstance(entry, Mapping | list) and not entry:
            yield EmptyPlace(value, key, f"{prefix}{key}")
        else:
            yield from empty_places(entry, f"{prefix}{key}.")


def _below(ordered: Sequence[str], fqn: str) -> Iterator[str]:
    """Yield those of the sorted names ``ordered`` that begin with ``fqn`` and a dot."""
    prefix = f"{fqn}."
    for number in range(bisect.bisect_left(ordered, prefix), len(ordered)):
        if not ordered[number].startswith(prefix):
            return
        yield ordered[number]


def _rest_of_path(rest: str, path: Any) -> Path:
    """The end of ``path``, a value's stored path, that ``rest`` spells; ``rest`` is the end of the value's name here.

    A begin of ``rest`` that no part of the path prints as is one key; so is all of it where no path was kept.
    """
    parts: list[Any] = []
    for part in reversed(path if isinstance(path, tuple | list) else ()):
        text = str(part)
        if rest == text:
            return (part, *parts)
        if not rest.endswith(f".{text}"):
            break
        parts.insert(0, part)
        rest = rest[: -len(text) - 1]
    return (rest, *parts)


def _built(entries: Sequence[tuple[Path, Any]]) -> Any:
    """Nested containers with each value at its path; places of a list that are not loaded are None."""
    if not entries[0][0]:
        return entries[0][1]
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in entries:
        below.setdefault(path[0], []).append((path[1:], value))
    if all(type(key) is int for key in below):
        numbers = range(max(below) + 1) if max(below) < MAX_INDEX else sorted(below)  # a file may say anything
        return [_built(below[number]) if number in below else None for number in numbers]
    return {key: _built(found) for key, found in below.items()}


def _restore_param_numbers(state: Any) -> None:
    """Give an optimizer's ``state`` the numbers of its parameters as keys; stored paths have them as text.

    ``load_state_dict`` of a torch optimizer would keep ``"0"`` beside parameter 0, and start its momentum anew.
    """
    if not isinstance(state, Mapping):
        return
    groups, of_params = state.get("param_groups"), state.get("state")
    if isinstance(groups, list) and isinstance(of_params, dict):
        params = [group.get("params") for group in groups if isinstance(group, Mapping)]
        numbers = {str(param): param for listed in params if isinstance(listed, list) for param in listed}
        for key in [key for key in of_params if type(key) is str and type(numbers.get(key)) is int]:
            of_params[numbers[key]] = of_params.pop(key)
    for value in state.values():
        _restore_param_numbers(value)


__all__ = ["EmptyPlace", "Growth", "empty_places", "saved_empty_names"]
