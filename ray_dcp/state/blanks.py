"""Makes templates from what is stored: a tensor to fill for each stored one, in the containers that the names show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

Blank = Callable[[str, TensorStorageMetadata], torch.Tensor]
"""A function (name, what is stored) -> the tensor to fill."""


def plain_blank(_: str, saved: TensorStorageMetadata) -> torch.Tensor:
    """A new tensor of the stored shape and dtype."""
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def nested_blanks(saved: Mapping[str, STORAGE_TYPES], blank: Blank = plain_blank) -> dict[str, Any]:
    """Dicts and lists with a place for every stored value: a tensor, or None for a Python object.

    The parts of a name are keys. A container whose keys are the numbers from 0 on is a list.
    """
    tree: dict[str, Any] = {}
    for name, kind in saved.items():
        *above, last = name.split(".")
        container = tree
        for part in above:
            container = container.setdefault(part, {})
        container[last] = blank(name, kind) if isinstance(kind, TensorStorageMetadata) else None
    return {key: _with_lists(value) for key, value in tree.items()}


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    return [values[str(i)] for i in range(len(values))] if _counts_up(values) else values


def _counts_up(keys: Iterable[str]) -> bool:
    found = set(keys)
    return found == {str(number) for number in range(len(found))}


__all__ = ["Blank", "nested_blanks", "plain_blank"]
