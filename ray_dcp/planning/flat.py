"""A state dict as planners see it: one name for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, DTensor, int, float, str, bool, bytes, type(None)))
"""Types of values with nothing inside: most values are of these, and asking each what it is takes long."""


def flat_state(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by name, and the path of each, as torch's ``flatten_state_dict`` gives them."""
    if all(type(key) is str and type(value) in LEAVES for key, value in state_dict.items()):
        return dict(state_dict), {key: (key,) for key in state_dict}
    flat, paths = flatten_state_dict(state_dict)
    return flat, paths


def in_key_order(state_dict: Mapping[Any, Any]) -> list[Any]:
    """The keys of ``state_dict`` in the order in which every rank asks them, whatever order its own dict has.

    ``state_dict()`` and ``load_state_dict()`` may wait for the other ranks, for ever if those are in another one.
    """
    return sorted(state_dict, key=str)
