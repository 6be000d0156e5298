"""The state of one optimizer by the names of its parameters.

It is read off ``optimizer.state`` and the groups as they are. torch's ``get_optimizer_state_dict`` takes a step with
learning rate 0 to fill an empty state, which leaves ``step`` at 1; it leaves out parameters that need no gradient, and
asks for the state of parameters that never had any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.optim import Optimizer

from ray_dcp.errors import StateDictError
from ray_dcp.planning.template.template_hook import Saved, saved_below
from ray_dcp.state.blanks import nested_blanks, plain_blank
from ray_dcp.state.param_groups import (
    SavedGroup,
    matched_groups,
    other_settings,
    saved_groups,
    stored_groups,
    with_settings,
)

Names = Mapping[Any, list[str]]
"""All names of each parameter."""


class OptimizerState:
    """One optimizer and the names of its parameters, for one save or load."""

    def __init__(self, optimizer: Optimizer, names: Names, where: str) -> None:
        """``where`` names the optimizer in messages.

        Raises ``StateDictError`` for parameters and state that do not belong to the model.
        """
        self._optimizer = optimizer
        self._names = names
        groups = [group["params"] for group in optimizer.param_groups]
        problems = [
            f"{where}: parameter {place} of group {index}, shape {tuple(parameter.shape)}, is not in the model"
            for index, parameters in enumerate(groups)
            for place, parameter in enumerate(parameters)
            if parameter not in names
        ]
        # Parameters that were taken out of their group may still have state.
        problems += [
            f"{where}: state under {key!r}, which is not a parameter of the model"
            if not isinstance(key, torch.Tensor)
            else f"{where}: state of a tensor of shape {tuple(key.shape)} that is not in the model"
            for key in optimizer.state
            if key not in names and not any(key is parameter for group in groups for parameter in group)
        ]
        if problems:
            raise StateDictError("an optimizer's state is stored by the names of the model's parameters", problems)

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {name: {key: value}}, "param_groups": {name of the first parameter: ({...},)}}``.

        Parameters without state are left out; so is "state" if no parameter has any.
        """
        state = {
            self._names[parameter][0]: dict(values) for parameter, values in self._optimizer.state.items() if values
        }
        groups = self._optimizer.param_groups
        first_names = [[self._names[parameter][0] for parameter in group["params"]] for group in groups]
        stored = {"param_groups": stored_groups(groups, first_names, set(state))}
        return {"state": state, **stored} if state else stored

    def template(self, saved: Saved) -> dict[str, Any]:
        """The state to fill: everything that is stored for this optimizer's parameters, and nothing else.

        Its tensors are the optimizer's own where it has them already, else new ones, laid out like the parameter.
        """
        groups: dict[str, Any] = {
            name: plain_blank(name, kind) if isinstance(kind, TensorStorageMetadata) else None
            for name, kind in saved_below(saved, "param_groups").items()
        }
        state = {
            name: self._parameter_template(parameter, found)
            for name, (parameter, found) in self._saved_by_parameter(saved_below(saved, "state")).items()
        }
        wanted = {"param_groups": groups or dict.fromkeys(self.state_dict()["param_groups"])}
        return {"state": state, **wanted} if state else wanted

    def problems(self, values: Mapping[str, Any]) -> list[str]:
        """A line for what ``load_state_dict`` would refuse, and for what another class of optimizer has saved.

        Called before anything is filled.
        """
        saved = saved_groups(saved_below(values, "param_groups"))
        if not saved:
            return []
        found = other_settings(self._optimizer, saved)
        try:
            matched_groups(self._aliases, saved)
        except StateDictError as error:
            found += error.problems
        return found

    def load_state_dict(self, loaded: Mapping[str, Any]) -> LoadedOptimizer:
        """Put back what ``state_dict`` gave; parameters without state in ``loaded`` have none afterwards.

        Raises ``StateDictError`` for state of a name that is not a parameter of the model, and for a group whose
        parameters had different settings when they were saved.
        """
        optimizer = self._optimizer
        saved = saved_groups(loaded.get("param_groups", {}))
        if not saved:
            return LoadedOptimizer(groups=None, num_saved_groups=0, unloaded=(), fresh=self._names_of_groups())
        groups = matched_groups(self._aliases, saved)
        parameters, stored = self._parameters, loaded.get("state", {})
        unknown = [f"{name}: not a parameter of the model" for name in stored if name not in parameters]
        if unknown:
            raise StateDictError("an optimizer's state is loaded by the names of the model's parameters", unknown)
        state = {parameters[name]: values for name, values in stored.items()}
        _put(optimizer, groups, state)
        in_groups = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        known = {name for group in saved for name in group.params}
        stateful = {name for group in saved for name in group.with_state}
        lacking = [parameter for parameter in self._names if parameter in in_groups and parameter not in state]
        return LoadedOptimizer(
            groups=groups,
            num_saved_groups=len(saved),
            unloaded=tuple(self._names[p][0] for p in lacking if stateful.intersection(self._names[p])),
            # An optimizer without any state, such as plain SGD, has nothing that could be lacking.
            fresh=tuple(
                self._names[p][0]
                for p in lacking
                if p.requires_grad and (state or not known.intersection(self._names[p]))
            ),
        )

    @property
    def _aliases(self) -> list[list[list[str]]]:
        return [[self._names[parameter] for parameter in group["params"]] for group in self._optimizer.param_groups]

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for parameter, names in self._names.items() for name in names}

    def _names_of_groups(self) -> tuple[str, ...]:
        return tuple(
            self._names[parameter][0] for group in self._optimizer.param_groups for parameter in group["params"]
        )

    def _saved_by_parameter(self, saved: Saved) -> dict[str, tuple[nn.Parameter, dict[str, STORAGE_TYPES]]]:
        """The parameter, and what is stored of it, for each stored name that is one of this optimizer's parameters."""
        mine = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        mine |= self._optimizer.state.keys()
        parameters = {name: parameter for name, parameter in self._parameters.items() if parameter in mine}
        found: dict[str, tuple[nn.Parameter, dict[str, STORAGE_TYPES]]] = {}
        for fqn, kind in saved.items():
            parts = fqn.split(".")
            for num_parts in range(len(parts) - 1, 0, -1):
                name = ".".join(parts[:num_parts])
                if name in parameters:
                    rest = ".".join(parts[num_parts:])
                    found.setdefault(name, (parameters[name], {}))[1][rest] = kind
                    break
        return found

    def _parameter_template(self, parameter: nn.Parameter, saved: Saved) -> dict[str, Any]:
        live = self._optimizer.state.get(parameter, {})

        def blank(key: str, kind: TensorStorageMetadata) -> torch.Tensor:
            mine, dtype = live.get(key), kind.properties.dtype
            if isinstance(mine, torch.Tensor) and mine.shape == kind.size and mine.dtype == dtype:
                return mine
            if key == "step" or not kind.size:
                return plain_blank(key, kind)
            if parameter.shape == kind.size:
                return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            # The tensor's own class decides how that lies on a mesh, as when an optimizer makes it.
            return parameter.detach().new_empty(kind.size, dtype=dtype)

        return nested_blanks(saved, blank)


@dataclass(frozen=True, slots=True)
class LoadedOptimizer:
    """The result of a load for one optimizer."""

    groups: list[SavedGroup | None] | None
    """The saved group for each of the optimizer's groups, None for a new group; None where nothing was loaded."""
    num_saved_groups: int
    """Number of groups that were saved for it."""
    unloaded: tuple[str, ...]
    """Parameters whose state is in the checkpoint, but was not loaded."""
    fresh: tuple[str, ...]
    """Parameters whose state the checkpoint lacks, though it has that of others or does not know these at all."""


def _put(
    optimizer: Optimizer, groups: list[SavedGroup | None], state: Mapping[nn.Parameter, Mapping[str, Any]]
) -> None:
    """Hand groups and state to ``optimizer.load_state_dict`` in its own form, so that hooks and overrides run."""
    changed = [
        with_settings(group, saved.settings if saved is not None else {})
        for group, saved in zip(optimizer.param_groups, groups, strict=True)
    ]
    places: dict[Any, int] = {}
    packed = []
    for group in changed:
        numbers = [places.setdefault(parameter, len(places)) for parameter in group["params"]]
        packed.append({**group, "params": numbers})
    # torch keeps the state of what is in no group under the key itself.
    by_place = {places.get(parameter, parameter): dict(values) for parameter, values in state.items()}
    optimizer.load_state_dict({"state": by_place, "param_groups": packed})
    for group, wanted in zip(optimizer.param_groups, changed, strict=True):
        group.update({name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)})
    for parameter, values in state.items():
        _undo_casts(optimizer.state[parameter], values)


def _undo_casts(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put back the saved dtypes and values.

    torch casts every tensor but "step" to the parameter's dtype, and makes generators of strings.
    """
    for key, value in saved.items():
        if key not in state:
            continue
        if not isinstance(value, torch.Tensor):
            state[key] = value
        elif isinstance(state[key], torch.Tensor) and state[key].dtype != value.dtype and key != "step":
            state[key] = value.to(state[key].device)


__all__ = ["LoadedOptimizer", "Names", "OptimizerState"]
