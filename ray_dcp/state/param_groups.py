"""Parameter groups of an optimizer, matched by the names of their parameters.

A group is stored under the name of its first parameter, so that ranks with different parts of a model (pipeline
stages) do not meet under one name. What torch's ``get_optimizer_state_dict`` has saved is read too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ray_dcp.errors import StateDictError
from ray_dcp.wording import joined

_NOT_SETTINGS = frozenset(("params", "param_names"))
_OF_SCHEDULES = frozenset(("initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"))
"""Settings that schedules put into groups."""
_TORCH_PARAMS = re.compile(r"(?P<index>\d+)\.params(?:\.(?P<place>\d+))?")


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One group as a checkpoint has it."""

    params: tuple[str, ...]
    settings: Mapping[str, Any]
    with_state: tuple[str, ...] = ()
    """Those of ``params`` whose state is in the checkpoint, as far as the checkpoint tells."""
    index: int | None = None
    """Position among the groups of the optimizer that was saved; None where the checkpoint does not tell."""


def stored_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], with_state: set[str]
) -> dict[str, Any]:
    """Every group as one Python value, by a name that no other has; ``names`` are those of each group's parameters."""
    stored: dict[str, Any] = {}
    for index, (group, params) in enumerate(zip(groups, names, strict=True)):
        key = params[0] if params else f"__empty_{index}__"
        # A tuple of one: planners would take a dict for many values.
        stored[key] = (
            {
                "index": index,
                "params": tuple(params),
                "with_state": tuple(name for name in params if name in with_state),
                "settings": {name: _frozen(value) for name, value in group.items() if name not in _NOT_SETTINGS},
            },
        )
    return stored


def saved_groups(stored: Mapping[str, Any]) -> list[SavedGroup]:
    """The groups that ``stored_groups`` or torch has stored; values that are None were not loaded."""
    found = {key: value for key, value in stored.items() if value is not None}
    own = [value[0] for value in found.values() if _is_own(value)]
    if own:
        return [SavedGroup(**group) for group in sorted(own, key=lambda group: group["index"])]
    if any(map(_TORCH_PARAMS.fullmatch, found)):
        return _groups_of_torch(found)
    settings: dict[str, dict[str, Any]] = {}
    for key, value in found.items():  # torch's flat form: <parameter>.<setting>
        name, _, setting = key.rpartition(".")
        settings.setdefault(name, {})[setting] = value
    return [SavedGroup((name,), values) for name, values in settings.items()]


def _is_own(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], dict) and "settings" in value[0]


def _groups_of_torch(found: Mapping[str, Any]) -> list[SavedGroup]:
    """The groups in values with names such as ``0.lr`` and ``0.params``, in some versions of torch ``0.params.3``."""
    params: dict[int, dict[int, str]] = {}
    settings: dict[int, dict[str, Any]] = {}
    for key, value in found.items():
        match = _TORCH_PARAMS.fullmatch(key)
        index = int(key.partition(".")[0])
        if match is None:
            settings.setdefault(index, {})[key.partition(".")[2]] = value
        else:
            listed = [value] if match["place"] is not None else value
            params.setdefault(index, {}).update(enumerate(listed, start=int(match["place"] or 0)))
    return [
        SavedGroup(tuple(name for _, name in sorted(params.get(index, {}).items())), values, index=index)
        for index, values in sorted(settings.items())
    ]


def matched_groups(names: Sequence[Sequence[Sequence[str]]], saved: Sequence[SavedGroup]) -> list[SavedGroup | None]:
    """The saved group with the parameters of each group of an optimizer, wherever it stood; None for a new group.

    ``names`` has the names of each parameter of each group; a tied parameter has several. Groups without parameters are
    matched in order. Raises ``StateDictError`` for a group whose parameters had different settings.
    """
    of_name = {name: group for group in saved for name in group.params}
    empty = [group for group in saved if not group.params]
    matched: list[SavedGroup | None] = []
    problems: list[str] = []
    for index, parameters in enumerate(names):
        if not parameters:
            matched.append(empty.pop(0) if empty else None)
            continue
        found = list(
            {id(of_name[name]): of_name[name] for name in itertools.chain(*parameters) if name in of_name}.values()
        )
        matched.append(found[0] if found else None)
        for other in found[1:]:
            different = _differing(found[0].settings, other.settings)
            if different:
                pair = f"{found[0].params[0]} and {other.params[0]}"
                problems.append(f"group {index}: {pair} were saved with different {joined(different)}")
    if problems:
        raise StateDictError(
            "parameters of one group were in groups with other settings when they were saved. Group them as they were, "
            "load, and change the groups then",
            problems,
        )
    return matched


def other_settings(optimizer: Optimizer, saved: Sequence[SavedGroup]) -> list[str]:
    """A line where another class of optimizer has saved ``saved``: its settings would be taken, and its state lost.

    That is known where it has settings that this one lacks, and lacks some that this one has. A newer torch may add a
    setting, or drop one: that alone says nothing.
    """
    own = set(optimizer.defaults)
    held = {name for group in saved for name in group.settings}
    known = own | {name for group in optimizer.param_groups for name in group} | _OF_SCHEDULES
    lacking, unknown = sorted(own - held), sorted(held - known)
    if not (lacking and unknown):
        return []
    return [
        f"was saved by another optimizer than this {type(optimizer).__name__}: it has {joined(unknown)}, and no "
        f'{joined(lacking)}. Make the same one, or leave it out (skip="...optim")'
    ]


def _differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in sorted(settings.keys() | others.keys(), key=str)
        if name not in settings or name not in others or not _equal(settings[name], others[name])
    ]


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    return bool(value == other)


def with_settings(group: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``group`` with the saved ``settings``; a tensor stays that tensor (CUDA graphs read it), a number a number."""
    changed = dict(group)
    for name, value in settings.items():
        mine = group.get(name)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
            with torch.no_grad():
                mine.copy_(value) if isinstance(value, torch.Tensor) else mine.fill_(value)
        elif isinstance(value, torch.Tensor) and isinstance(mine, int | float):
            changed[name] = value.item()
        else:
            changed[name] = value
    return changed


def _frozen(value: Any) -> Any:
    """``value``; a tensor as a copy in host memory: it is pickled, and read whatever device is there then."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


__all__ = ["SavedGroup", "matched_groups", "other_settings", "saved_groups", "stored_groups", "with_settings"]
