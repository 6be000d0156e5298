"""A state dict as planners see it: one name for each value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ray_dcp.errors import StateDictError

NO_WORD = torch.bits8
"""Stands for a dtype in another library's file that torch does not have.

No checkpoint has a tensor of it: torch cannot save one.
"""

LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, DTensor, int, float, str, bool, bytes, type(None)))
"""Types of values with nothing inside. Most values are of these types, and asking each what it is takes long."""

_NAMED_BY_VALUE = frozenset((str, int, bool, float, type(None), tuple))

Path = tuple[str | int, ...]
"""The keys that lead to a value: text in mappings, positions in lists."""


def flat_state(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values by name, paths by name), as torch's ``flatten_state_dict`` gives them.

    Raises ``StateDictError`` naming all values that share a name, and keys whose text differs between processes.
    """
    if all(type(key) is str and type(value) in LEAVES for key, value in state_dict.items()):
        return dict(state_dict), {key: (key,) for key in state_dict}
    flat: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    num_values = 0
    nameless: list[str] = []
    for name, path, value in _named(state_dict.items(), "", (), nameless):
        flat[name] = value
        paths[name] = path
        num_values += 1
    if nameless:
        raise StateDictError("keys whose text is not the same in every process; give others", nameless)
    if num_values != len(flat):
        raise StateDictError("two values have one name: keys are joined by dots, as text", _clashes(state_dict))
    return flat, paths


def unstorable_names(fqns: Iterable[str]) -> list[str]:
    """A line for each name that is not valid text: one with half of a surrogate pair has no bytes in UTF-8."""
    fqns = list(fqns)
    try:
        "\n".join(fqns).encode()
    except UnicodeEncodeError:
        return [f"{fqn!r}: not text that can be stored; give it another key" for fqn in fqns if not _is_text(fqn)]
    return []


def _is_text(fqn: str) -> bool:
    try:
        fqn.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(
    entries: Iterable[tuple[Any, Any]], prefix: str, above: Path, nameless: list[str], in_list: bool = False
) -> Iterator[tuple[str, Path, Any]]:
    """Yield (name, path, value) of each value; ``entries`` are those of the dict or list at ``above``."""
    for key, value in entries:
        if type(key) not in _NAMED_BY_VALUE and _is_nameless(key):
            nameless.append(f"{prefix.removesuffix('.') or 'state_dict'}: a {type(key).__name__} as key")
            continue
        path = (*above, key if in_list else str(key))
        if type(value) in LEAVES:
            yield f"{prefix}{key}", path, value
        elif isinstance(value, Mapping):
            yield from _named(value.items(), f"{prefix}{key}.", path, nameless)
        elif isinstance(value, list) and is_walked(value):
            yield from _named(enumerate(value), f"{prefix}{key}.", path, nameless, in_list=True)
        else:
            yield f"{prefix}{key}", path, value


def _is_nameless(key: Any) -> bool:
    """Whether a key prints as its address, or as numbers that change, like the parameters in an optimizer's state."""
    kind: Any = type(key)
    return isinstance(key, torch.Tensor) or (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__)


def is_walked(entries: list[Any]) -> bool:
    """Whether the entries of a list are values of their own: they are if one is a tensor or mapping, or such a list."""
    return any(
        isinstance(entry, torch.Tensor | Mapping) or (isinstance(entry, list) and is_walked(entry)) for entry in entries
    )


def _clashes(state_dict: Mapping[Any, Any]) -> list[str]:
    places: dict[str, list[str]] = {}
    for name, place in _places(state_dict.items(), "", "state_dict"):
        places.setdefault(name, []).append(place)
    return [f"{name}: {' and '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def _places(entries: Iterable[tuple[Any, Any]], prefix: str, above: str) -> Iterator[tuple[str, str]]:
    """Yield each value's name, and the Python expression for it."""
    for key, value in entries:
        name, place = f"{prefix}{key}", f"{above}[{key!r}]"
        if isinstance(value, Mapping):
            yield from _places(value.items(), f"{name}.", place)
        elif isinstance(value, list) and is_walked(value):
            yield from _places(enumerate(value), f"{name}.", place)
        else:
            yield name, place
