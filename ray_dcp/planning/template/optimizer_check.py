"""Checks whether torch's ``Optimizer.load_state_dict`` will take what a load is going to hand it.

That refuses other numbers of groups and parameters, but only when all tensors are filled; so this looks before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def optimizer_problems(
    statefuls: Iterable[tuple[str, Any]], names: Iterable[str], decoded: Mapping[str, Any], *, strict: bool
) -> list[str]:
    """A line for each way in which the groups of an optimizer of ``statefuls`` differ from the stored ones.

    ``names`` are those of the checkpoint, ``decoded`` its Python values that go into this template. Groups that
    only the checkpoint has are ignored where not ``strict``.
    """
    optimizers = [(fqn, one) for fqn, one in statefuls if _is_plain(one)]
    if not optimizers:
        return []
    stored_names = list(names) if strict else []
    return [
        f"{fqn}: {problem}"
        for fqn, optimizer in optimizers
        for problem in _problems(
            [len(group["params"]) for group in optimizer.param_groups], f"{fqn}.param_groups", stored_names, decoded
        )
    ]


def _is_plain(value: Any) -> bool:
    optimizer = torch.optim.Optimizer
    return isinstance(value, optimizer) and type(value).load_state_dict is optimizer.load_state_dict


def _problems(own: Sequence[int], fqn: str, names: Sequence[str], decoded: Mapping[str, Any]) -> list[str]:
    """The differences of one optimizer; ``own`` has the number of parameters of each of its groups."""
    whole = decoded.get(fqn)  # as torch before 2.4 stored it
    if isinstance(whole, list):
        stored = [_num_params(group.get("params") if isinstance(group, Mapping) else None) for group in whole]
    else:
        numbers = [int(part) for name in names if (part := _group_of(name, fqn)).isdecimal()]
        stored = [
            _num_params(decoded.get(f"{fqn}.{number}.params"))
            for number in range(max(len(own), max(numbers, default=-1) + 1))
        ]
    if len(stored) != len(own):
        return [f"the checkpoint has {len(stored)} parameter groups, the optimizer {len(own)}"]
    return [
        f"the checkpoint has {there} parameters in group {number}, the optimizer {here}"
        for number, (here, there) in enumerate(zip(own, stored, strict=True))
        if there is not None and there != here
    ]


def _group_of(name: str, fqn: str) -> str:
    return name[len(fqn) + 1 :].partition(".")[0] if name.startswith(f"{fqn}.") else ""


def _num_params(params: Any) -> int | None:
    return len(params) if isinstance(params, list) else None


__all__ = ["optimizer_problems"]
