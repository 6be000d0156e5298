"""Modules on meta: their own ``load_state_dict`` copies values into tensors that have no memory, and so loses them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ray_dcp.planning.template.template_memory import is_meta
from ray_dcp.wording import joined

logger = logging.getLogger(__name__)

_NEVER_STORED = "since no checkpoint holds what a module leaves out of its state_dict(); make their values anew"
_NOT_LOADED = "since this load left them out; load them, or make their values anew"


def give_state(stateful: Any, state: Any) -> None:
    """Call ``stateful.load_state_dict(state)``; a module's parameters and buffers on meta become those of ``state``.

    Names of one parameter get one parameter. Parameters that have memory stay the objects they are.
    """
    if not (isinstance(stateful, torch.nn.Module) and _on_meta(stateful) and _is_plain(stateful)):
        stateful.load_state_dict(state)
        return
    own = stateful.state_dict(keep_vars=True)
    made: dict[int, torch.nn.Parameter] = {}
    for fqn, value in state.items():
        held = own.get(fqn)
        if not isinstance(held, torch.Tensor):
            continue
        if not is_meta(held):
            state[fqn] = held  # it has been filled in place
        elif isinstance(held, torch.nn.Parameter) and not is_meta(value):
            if id(value) not in made:
                made[id(value)] = torch.nn.Parameter(value.detach(), requires_grad=held.requires_grad)
            state[fqn] = made[id(value)]
    stateful.load_state_dict(state, assign=True)
    _tell_of_left(type(stateful).__name__, [fqn for fqn in _on_meta(stateful) if fqn not in own], _NEVER_STORED)
    _tell_of_left(type(stateful).__name__, [fqn for fqn in _on_meta(stateful) if fqn in own], _NOT_LOADED)


def _tell_of_left(kind: str, left: Sequence[str], why: str) -> None:
    if left:
        logger.warning("%s of a %s: still on meta, %s", joined(left), kind, why)


def _on_meta(module: torch.nn.Module) -> list[str]:
    held: Mapping[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [fqn for fqn, tensor in held.items() if tensor.is_meta]


def _is_plain(module: torch.nn.Module) -> bool:
    kind = type(module)
    return kind.state_dict is torch.nn.Module.state_dict and kind.load_state_dict is torch.nn.Module.load_state_dict


__all__ = ["give_state"]
