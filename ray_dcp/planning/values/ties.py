"""Finds tensors of one rank that are the same memory under several names, so that they are stored once.

A tied embedding is the usual case. Each name has an item of its own, in plans as in the checkpoint; the items share one
record. Which rank writes an item is the global plan's decision; a rank stores once what it has once, so where ranks do
not agree on ties nothing is wrong but the size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ray_dcp.planning.save_plan.plan_table import Key, Ties


class SeenMemory:
    """The memory of the tensors of a local plan, and which of them are tied."""

    def __init__(self) -> None:
        self._items: list[WriteItem] = []
        self._tensors: list[torch.Tensor] = []

    def note(self, item: WriteItem, tensor: torch.Tensor) -> None:
        """Note that ``item`` writes all of ``tensor``."""
        self._items.append(item)
        self._tensors.append(tensor)

    def ties(self) -> Ties:
        """The items that are one memory with an earlier one by name, each mapped to the first of them."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        if len(set(addresses)) == len(addresses):
            return {}
        repeated = {address for address, count in Counter(addresses).items() if count > 1 and address}
        groups: dict[Hashable, list[Key]] = {}
        for item, tensor, address in zip(self._items, self._tensors, addresses, strict=True):
            if address in repeated:  # 0 is the address of all tensors without elements
                groups.setdefault(_memory(tensor), []).append((item.index.fqn, item.index.offset))
        firsts = {key: min(keys, key=_order) for keys in groups.values() for key in keys}
        return {key: first for key, first in firsts.items() if key != first}


def _order(key: Key) -> tuple[str, tuple[int, ...]]:
    return key[0], tuple(key[1] or ())


def _memory(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors with the same values at the same addresses."""
    layout = tensor.shape, tensor.stride(), tensor.dtype
    return tensor.data_ptr(), tensor.device, layout, tensor.is_conj(), tensor.is_neg()


def ties_of(planner: Any) -> Ties:
    """The ties of the plan that a planner has made, if what it resolves is the state's own memory."""
    ties = getattr(planner, "ties", None) if getattr(planner, "resolves_in_place", False) is True else None
    return ties if isinstance(ties, Mapping) else {}


__all__ = ["SeenMemory", "ties_of"]
