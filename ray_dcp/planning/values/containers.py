"""What names do not tell of a state dict: which keys are not text, which dicts are ordered, and which are empty.

DCP joins keys by dots, as text. What is lost by that is kept with the checkpoint, so that tools without a template can
give back the state dict that was saved; a load with a template needs none of it. An empty dict is not stored as a value
of its own name: stock torch takes such a name for one of an older format, and then finds others missing.
"""

from __future__ import annotations

import ast
import operator
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray_dcp.errors import StateDictError
from ray_dcp.planning.values.flat import LEAVES, Path, is_walked
from ray_dcp.torch_private import set_element
from ray_dcp.wording import cut

Containers = Sequence[Any]
"""One row ``[path, kind, keys]`` of JSON values for each dict that is empty, ordered or has keys that are not text.

``path``: the keys that lead to it, as text; numbers in lists. ``kind``: ``dict`` or ``OrderedDict``. ``keys``: null
where all keys are text, ``"int"`` where all are whole numbers, ``"none"`` where there is no key; else an object that
maps the text of each key that is not text to its Python literal.
"""

MAX_INDEX = 1 << 20
"""Limit of an index in a list, since a file may say anything."""
_INTEGERS, NO_KEYS = "int", "none"
_MAX_REPR = 80


def containers_of(state: Mapping[Any, Any]) -> list[Any]:
    """The rows for a plain state, as ``collect_state`` gives it.

    Raises ``StateDictError`` naming all keys that would come back as text: a date, a path, a member of an enum.
    """
    rows: list[Any] = []
    problems: list[str] = []
    _add_rows(state, (), rows, problems)
    if problems:
        raise StateDictError(
            "keys that would come back as text; use text, numbers, or tuples of them (in a tuple a dict is one value, "
            "and may have any key)",
            problems,
        )
    return rows


def merged_containers(of_ranks: Iterable[Containers]) -> list[Any]:
    """The rows of all ranks; of rows that differ for one dict, that of the lowest rank whose dict is not empty."""
    merged: dict[Path, Any] = {}
    for rows in of_ranks:
        for path, kind, keys in rows:
            known = merged.setdefault(tuple(path), [path, kind, keys])
            if known[2] == NO_KEYS:
                known[1:] = kind, keys
            elif isinstance(keys, dict) and isinstance(known[2], dict):
                known[2] = keys | known[2]
    return list(merged.values())


def with_containers(state: dict[str, Any], rows: Containers) -> Any:
    """``state``, nested dicts with text for keys, turned into what the rows say that it was; changes ``state``."""
    rows = [row for row in rows if is_row(row)]
    for path, _, keys in rows:
        if keys == NO_KEYS and path and _is_free(state, path):
            set_element(state, tuple(path), {})
    return _restored(state, (), {tuple(path): (kind, keys) for path, kind, keys in rows})


def optimizer_containers(paths: Iterable[Path]) -> list[Any]:
    """Rows for a checkpoint that has no rows, from the layout of torch's optimizers alone.

    A dict ``state`` beside ``param_groups`` whose keys are digits has whole numbers for keys there.
    """
    children: dict[Path, set[str | int]] = {}
    for path in paths:
        for length, key in enumerate(path):
            children.setdefault(path[:length], set()).add(key)
    return [
        [[*path, "state"], "dict", _INTEGERS]
        for path, keys in children.items()
        if {"state", "param_groups"} <= keys and all(map(_is_number, children.get((*path, "state"), [""])))
    ]


def _add_rows(value: Any, path: Path, rows: list[Any], problems: list[str]) -> None:
    if isinstance(value, Mapping):
        keys = _described_keys(value, path, problems)
        kind = "OrderedDict" if type(value) is OrderedDict else "dict"
        if keys is not None or kind != "dict":
            rows.append([list(path), kind, keys])
        for key, entry in value.items():
            if type(entry) not in LEAVES and isinstance(entry, Mapping | list):
                _add_rows(entry, (*path, str(key)), rows, problems)
    elif is_walked(value):
        for number, entry in enumerate(value):
            if type(entry) not in LEAVES and isinstance(entry, Mapping | list):
                _add_rows(entry, (*path, number), rows, problems)


def _described_keys(value: Mapping[Any, Any], path: Path, problems: list[str]) -> Any:
    kinds = set(map(type, value))
    if kinds == {str}:
        return None
    if not kinds:
        return NO_KEYS
    if kinds == {int}:
        return _INTEGERS
    literals: dict[str, str] = {}
    for key in value:
        if type(key) is str or (isinstance(key, str) and str(key) == key):
            continue
        literal = _literal(key)
        if literal is None:
            where = ".".join(map(str, path)) or "state_dict"
            problems.append(f"{where}: {cut(repr(key), _MAX_REPR)}, a {type(key).__name__}, as key")
        else:
            literals[str(key)] = literal
    return literals or None


def _literal(key: Any) -> str | None:
    """The Python literal for a key, or for one that is equal to it and has its name; None where there is none."""
    name = str(key)
    if type(key) not in (bool, int):
        with suppress(TypeError):
            key = operator.index(key)  # a number of numpy's, or of an enum
    try:
        found = ast.literal_eval(repr(key))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return repr(key) if type(found) is type(key) and found == key and str(key) == name else None


def is_row(row: Any) -> bool:
    """Whether a row, which comes from a file, is valid. A list is as long as its largest index: that has a limit."""
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], list):
        return False
    return all(type(key) is str or (type(key) is int and 0 <= key < MAX_INDEX) for key in row[0])


def _is_free(state: Any, path: Path) -> bool:
    """Whether nothing is at a path of nested dicts and lists; a list has None where nothing was put."""
    for key in path:
        if isinstance(state, list) and isinstance(key, int):
            if key >= len(state) or state[key] is None:
                return True
        elif not isinstance(state, dict):
            return False
        elif key not in state:
            return True
        state = state[key]
    return False


def _restored(value: Any, path: Path, rows: Mapping[Path, Any]) -> Any:
    if type(value) is list:
        return [_restored(entry, (*path, number), rows) for number, entry in enumerate(value)]
    if type(value) is not dict:
        return value
    kind, keys = rows.get(path, ("dict", None))
    entries = [(_restored_key(name, keys), _restored(entry, (*path, name), rows)) for name, entry in value.items()]
    return OrderedDict(entries) if kind == "OrderedDict" else dict(entries)


def _restored_key(name: Any, keys: Any) -> Any:
    if keys == _INTEGERS:
        return int(name) if _is_number(name) else name
    if isinstance(keys, Mapping) and name in keys:
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            key = ast.literal_eval(keys[name])
            if str(key) == name and isinstance(key, Hashable):
                return key
    return name


def _is_number(name: Any) -> bool:
    """Whether ``name`` is a whole number as Python prints it."""
    digits = name.removeprefix("-") if isinstance(name, str) else ""
    return digits.isascii() and digits.isdigit() and str(int(name)) == name


__all__ = [
    "MAX_INDEX",
    "NO_KEYS",
    "Containers",
    "containers_of",
    "is_row",
    "merged_containers",
    "optimizer_containers",
    "with_containers",
]
