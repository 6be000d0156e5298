"""The plain state of what a rank hands over: asks each ``Stateful`` that dicts and lists lead to for its own state.

A save collects once and goes on with what it got. A load collects a template, has it filled, and then gives every value
back to where it was found: plain ones to their dict or list, a ``Stateful``'s to its ``load_state_dict``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.errors import StateDictError
from ray_dcp.planning.per_rank import OneRanksValue, PerRank
from ray_dcp.planning.template.template_memory import is_meta
from ray_dcp.planning.values.flat import LEAVES, flat_state
from ray_dcp.planning.values.meta_modules import give_state
from ray_dcp.wording import joined

_NEVER_STATEFUL = frozenset((int, float, str, bytes, bool, type(None), dict, list, tuple, OrderedDict))
_MAX_NESTING = 200


def is_stateful(value: Any) -> bool:
    """Whether ``value`` is a ``Stateful``; the protocol's own check takes longer than all the rest for a scalar."""
    kind = type(value)
    if kind in _NEVER_STATEFUL or isinstance(value, torch.Tensor | type):
        return False
    return isinstance(value, Stateful)


def in_key_order(keys: Iterable[Any]) -> list[Any]:
    """The keys of a dict in the order in which every rank asks them, whatever order its own dict has.

    ``state_dict()`` and ``load_state_dict()`` may wait for the other ranks, for ever if those are in another one.
    """
    return sorted(keys, key=str)


def collect_state(state_dict: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The plain state of ``state_dict``: each ``Stateful`` as its own state, each ``PerRank`` as an item of its rank.

    Dicts and lists without any of them are the caller's own objects.

    Raises ``StateDictError`` for anything but a dict, and for one that contains itself.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"state_dict is a {type(state_dict).__name__}; pass a dict of names to values")
    try:
        plain = _plain_mapping(state_dict, rank)
        return OrderedDict(plain) if type(state_dict) is OrderedDict else dict(plain)
    except RecursionError as error:
        raise _too_deep(state_dict) from error


def _plain(value: Any, rank: int) -> Any:
    if isinstance(value, PerRank):
        return OneRanksValue(value.value, rank)
    if is_stateful(value):
        return _plain(value.state_dict(), rank)
    if isinstance(value, Mapping):
        return _plain_mapping(value, rank)
    if isinstance(value, list):
        entries = [entry if type(entry) in LEAVES else _plain(entry, rank) for entry in value]
        return entries if any(a is not b for a, b in zip(entries, value, strict=True)) else value
    return value


def _plain_mapping(value: Mapping[Any, Any], rank: int) -> Mapping[Any, Any]:
    changed = {}
    # In the same order on all ranks: a ``state_dict()`` may wait for the other ranks.
    for key in in_key_order([key for key, entry in value.items() if type(entry) not in LEAVES]):
        plain = _plain(value[key], rank)
        if plain is not value[key]:
            changed[key] = plain
    if not changed:
        return value
    return OrderedDict(value) | changed if type(value) is OrderedDict else {**value, **changed}


def _too_deep(state_dict: Mapping[Any, Any]) -> StateDictError:
    where = ".".join(_path_that_repeats(state_dict)[:20])
    return StateDictError(f"the state dict contains itself, or is nested too deep: {where}")


def _path_that_repeats(state_dict: Mapping[Any, Any]) -> list[str]:
    """The path to a dict or list that lies within itself, or is very deep down."""
    path: list[str] = []
    stack: list[tuple[Any, Iterator[tuple[Any, Any]]]] = [(state_dict, _entries(state_dict))]
    while stack:
        for key, entry in stack[-1][1]:
            if isinstance(entry, Mapping | list):
                path.append(str(key))
                if len(stack) > _MAX_NESTING or any(entry is above for above, _ in stack):
                    return path
                stack.append((entry, _entries(entry)))
                break
        else:
            stack.pop()
            del path[-1:]
    return path


Ask = Callable[[Any, str], Any]
"""A function (``Stateful``, its name in the checkpoint) -> the state to fill."""


@dataclass(frozen=True, slots=True)
class _StatefulPlace:
    """The place where the state of a ``Stateful`` of the template is filled."""

    container: MutableMapping[Any, Any] | MutableSequence[Any]
    key: Any
    fqn: str
    stateful: Stateful


class CollectedTemplate:
    """A template as plain dicts and lists to fill: ``values``.

    Containers that hold a ``Stateful`` are copies; all others, and all tensors, are the caller's own.
    """

    def __init__(self, state_dict: dict[str, Any], *, ask: Ask = lambda stateful, fqn: stateful.state_dict()) -> None:
        """Ask every ``Stateful`` for its state, in an order that all ranks share.

        Raises ``StateDictError`` naming each that lies in a tuple.
        """
        self._ask = ask
        self._copies: list[tuple[Any, Any]] = []
        """Pairs (the caller's container, its copy in ``values``), outer ones first."""
        self._slots: list[_StatefulPlace] = []
        """The places of the ``Stateful``s, inner ones first."""
        problems: list[str] = []
        self.values: dict[str, Any] = {key: state_dict[key] for key in in_key_order(state_dict)}
        self._copies.append((state_dict, self.values))
        try:
            self._fill_in(self.values, "", problems)
        except RecursionError as error:
            raise _too_deep(state_dict) from error
        if problems:
            raise StateDictError("the template holds what a load cannot fill", sorted(problems))

    @property
    def runs_code(self) -> bool:
        """Whether ``restore`` calls any ``load_state_dict``."""
        return bool(self._slots)

    @property
    def statefuls(self) -> list[tuple[str, Stateful]]:
        """Each ``Stateful`` with its name in the checkpoint."""
        return [(slot.fqn, slot.stateful) for slot in self._slots]

    @property
    def originals(self) -> dict[int, Any]:
        """The caller's own containers by the id of their copies, without the outermost, which gets every value."""
        return {id(copy): original for original, copy in self._copies[1:]}

    def restore(
        self, is_wanted: Callable[[str], bool] = lambda fqn: True, on_meta: Collection[str] = frozenset()
    ) -> None:
        """Give everything back to where it was found; what lies inside a ``Stateful`` comes first.

        A ``Stateful`` whose name is not wanted is left alone. ``on_meta`` has the names of loaded tensors that were on
        the meta device. Raises ``StateDictError`` for a ``Stateful`` that keeps such a tensor there.
        """
        held = {(id(slot.container), slot.key) for slot in self._slots}
        copies = {id(copy) for _, copy in self._copies}
        for original, copy in self._copies:
            for key, value in list(_entries(copy)):
                if not held or ((id(copy), key) not in held and id(value) not in copies):
                    if copy is self.values:
                        original[key] = value  # always, as torch: a dict of the user's may act on it
                    else:
                        _put(original, key, value)
        for slot in self._slots:
            if is_wanted(slot.fqn):
                give_state(slot.stateful, slot.container[slot.key])
                if on_meta:
                    _require_taken(slot.stateful, slot.fqn, on_meta)

    def _fill_in(self, copy: Any, name: str, problems: list[str]) -> None:
        """Replace the ``Stateful``s in the dict or list ``copy`` by their states, and what leads to them by copies."""
        for key in in_key_order(copy) if isinstance(copy, dict) else range(len(copy)):
            value = copy[key]
            if type(value) not in LEAVES:
                copy[key] = self._plain(value, copy, key, f"{name}{key}", problems)

    def _plain(self, value: Any, container: Any, key: Any, name: str, problems: list[str]) -> Any:
        if isinstance(value, PerRank | torch.Tensor):
            return value
        if is_stateful(value):
            state = self._walked(self._ask(value, name), f"{name}.", problems, is_own=False)
            self._slots.append(_StatefulPlace(container, key, name, value))
            return state
        if isinstance(value, tuple) and any(map(is_stateful, value)):
            problems.append(f"{name}: a {type(value).__name__} holds an object with load_state_dict; use a list")
        return self._walked(value, f"{name}.", problems, is_own=True)

    def _walked(self, value: Any, prefix: str, problems: list[str], *, is_own: bool) -> Any:
        """``value``, or a copy of it where a ``Stateful`` lies in it; ``is_own``: the copy's entries are given back."""
        if not isinstance(value, Mapping | list):
            return value
        if all(type(entry) in LEAVES for entry in (value.values() if isinstance(value, Mapping) else value)):
            return value
        copy: Any = _copy(value)
        at, num_slots = len(self._copies), len(self._slots)
        self._fill_in(copy, prefix, problems)
        if len(self._slots) == num_slots:
            return value
        if is_own:
            self._copies.insert(at, (value, copy))
        return copy


def _require_taken(stateful: Stateful, fqn: str, on_meta: Collection[str]) -> None:
    """Raise if what was loaded for a ``Stateful`` is not in it: torch copies it into tensors that have no memory."""
    asked = on_meta if any(name.startswith(f"{fqn}.") for name in on_meta) else ()
    held = flat_state(collect_state({fqn: stateful}, rank=0))[0] if asked else {}
    left = [name for name in sorted(asked) if isinstance(value := held.get(name), torch.Tensor) and is_meta(value)]
    if left:
        raise StateDictError(
            f"{fqn}: its load_state_dict() left on the meta device what was loaded: {joined(left)}. Have it load with "
            "assign=True, or call to_empty(device=...) before the load"
        )


def _copy(value: Mapping[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
    """A copy as a plain container that can be changed; the kinds that torch's state dicts have stay what they are."""
    if isinstance(value, list):
        return list(value)
    return OrderedDict(value) if type(value) is OrderedDict else dict(value)


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, Mapping) else enumerate(container)


def _put(container: Any, key: Any, value: Any) -> None:
    """Put ``value`` at ``key``, unless it is there already: a container that cannot be changed is then left alone."""
    if isinstance(container, list) and key >= len(container):
        container.append(value)
    elif (isinstance(container, Mapping) and key not in container) or container[key] is not value:
        container[key] = value


__all__ = ["CollectedTemplate", "collect_state", "is_stateful"]
