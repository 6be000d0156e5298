"""``TrainState``: model, optimizers, schedules and all else that changes with a step, as one ``Stateful``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ray_dcp.errors import ConfigError, StateDictError
from ray_dcp.planning.template.template_hook import Saved, saved_below, template_of_saved, value_problems
from ray_dcp.planning.values.collect import is_stateful
from ray_dcp.state.blanks import nested_blanks
from ray_dcp.state.model_names import live_values, name_cleaner, parameter_names, same_memory
from ray_dcp.state.optimizer_state import LoadedOptimizer, Names, OptimizerState
from ray_dcp.state.schedules import in_group_order, of_another_class
from ray_dcp.wording import joined

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ONE = ""
"""The name of the only model, optimizer or schedule: it adds no part to the stored names."""


class TrainState:
    """A ``Stateful`` of all that a step of training changes, saved by name and put back right.

    ``model`` is a module, plain or wrapped: ``fully_shard``, tensor parallel, ``DistributedDataParallel``,
    ``torch.compile``, activation checkpointing; or a dict of modules. ``optimizer`` and ``scheduler`` are one, or a
    list or dict of several. ``more`` may have any ``Stateful`` (``GradScaler``, ``DataPosition``, ``RNGState``),
    modules (an ``AveragedModel``) and plain values, which a load replaces in ``.more``.

    The stored names are ``model.<name>``, ``optim.state.<parameter>.<key>``, ``scheduler``,
    ``optim.param_groups.<first parameter>`` and those in ``more``. The names of values and parameters are the model's
    own, whatever wraps it. State and groups of an optimizer are found by the names of the parameters: groups may be
    empty, or stand in another order than when they were saved. The state of a parameter that is frozen is kept, a
    parameter that never had a gradient has none, and an optimizer that has not stepped gets what the checkpoint has.
    After a load the learning rates are those of the run that was saved, and ``.fresh`` names the parameters of which no
    optimizer state was loaded.

    Raises ``StateDictError`` for a parameter of an optimizer that no model has, and for groups whose parameters were
    saved with different settings; ``ConfigError`` for a model of ``FullyShardedDataParallel`` (FSDP1).
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        **more: Any,
    ) -> None:
        self.more = more
        self.fresh: tuple[str, ...] = ()
        self._models = _named(model, nn.Module, "model")
        self._optimizers = _named(optimizer, Optimizer, "optimizer")
        self._schedulers: dict[str, Any] = _named(scheduler, object, "scheduler")
        self._fitted = False
        if "optim" in more:
            raise ConfigError("optim", "the optimizer's state goes by that name")
        for schedule in self._schedulers.values():
            if isinstance(schedule, type) or not is_stateful(schedule):
                raise ConfigError("scheduler", f"{schedule!r} has no state_dict() and load_state_dict()")
        for name, value in more.items():
            _require_state(name, value)
        for module in self._all_modules().values():
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise ConfigError("model", "FSDP1's parameters have no values of their own: use fully_shard")

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now: the live tensors, not copies."""
        state: dict[str, Any] = {"model": _unnamed({name: _values(model) for name, model in self._models.items()})}
        if self._optimizers:
            names = self._parameter_names()
            state["optim"] = _unnamed(
                {name: self._optimizer_state(name, names).state_dict() for name in self._optimizers}
            )
        if self._schedulers:
            # A tuple of one: planners would take a dict for many values, and lose keys that are not strings.
            state["scheduler"] = _unnamed(
                {name: (schedule.state_dict(),) for name, schedule in self._schedulers.items()}
            )
        return state | {name: _state_of(value) for name, value in self.more.items()}

    def template_for(self, saved: Saved) -> dict[str, Any]:
        """The state to fill from a checkpoint with the names ``saved``; for optimizers that is what is stored.

        Raises ``StateDictError`` for a model on the meta device.
        """
        self._require_memory()
        template: dict[str, Any] = {"model": _unnamed({name: _values(model) for name, model in self._models.items()})}
        if self._optimizers:
            names = self._parameter_names()
            template["optim"] = _unnamed(
                {
                    name: self._optimizer_state(name, names).template(saved_below(saved, _joined("optim", name)))
                    for name in self._optimizers
                }
            )
        if self._schedulers:
            template["scheduler"] = _unnamed(
                {name: _schedule_template(saved, _joined("scheduler", name)) for name in self._schedulers}
            )
        self._fitted = True
        return template | {name: _template_of(value, saved, name) for name, value in self.more.items()}

    def problems_with(self, values: Mapping[str, Any]) -> list[str]:
        """A line for each stored value that would be refused, or that another class of optimizer or schedule saved."""
        names = self._parameter_names() if self._optimizers else {}
        found = []
        for name in self._optimizers:
            place = _joined("optim", name)
            problems = self._optimizer_state(name, names).problems(saved_below(values, place))
            found += [f"{place}: {problem}" for problem in problems]
        for name, schedule in self._schedulers.items():
            place = _joined("scheduler", name)
            found += [f"{place}: {problem}" for problem in of_another_class(schedule, _stored_keys(values, place))]
        return found + value_problems(self.more.items(), values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put everything back. Optimizers come before schedules, and the learning rates are the optimizers'."""
        for name, model in self._models.items():
            _load_module(model, _part(state_dict["model"], name))
        loaded = self._load_optimizers(state_dict)
        for name, schedule in self._schedulers.items():
            _load_schedule(schedule, _part(state_dict["scheduler"], name), self._found_for(schedule, loaded))
        for name, value in self.more.items():
            if isinstance(value, nn.Module):
                _load_module(value, state_dict[name])
            elif is_stateful(value):
                value.load_state_dict(state_dict[name])
            else:
                self.more[name] = state_dict[name]
        self._tell_what_is_missing(loaded)

    def _load_optimizers(self, state_dict: Mapping[str, Any]) -> dict[str, LoadedOptimizer]:
        if not self._optimizers:
            return {}
        names = self._parameter_names()
        return {
            name: self._optimizer_state(name, names).load_state_dict(_part(state_dict["optim"], name))
            for name in self._optimizers
        }

    def _optimizer_state(self, name: str, names: Names) -> OptimizerState:
        return OptimizerState(self._optimizers[name], names, where=_joined("optimizer", name))

    def _found_for(self, schedule: Any, loaded: Mapping[str, LoadedOptimizer]) -> LoadedOptimizer | None:
        optimizer = getattr(schedule, "optimizer", None)
        return next((loaded[name] for name, mine in self._optimizers.items() if mine is optimizer), None)

    def _parameter_names(self) -> dict[nn.Parameter, list[str]]:
        """All names of every parameter, those of the model before those of other modules."""
        found: dict[nn.Parameter, list[str]] = {}
        for prefix, module in self._all_modules().items():
            live_values(module)  # FSDP2 puts a module's sharded parameters in place before it gives its state
            for name, parameter in parameter_names(module):
                found.setdefault(parameter, []).append(_joined(prefix, name) if prefix else name)
        taken: dict[str, nn.Parameter] = {}
        for parameter, names in found.items():
            for name in names:
                if taken.setdefault(name, parameter) is not parameter:
                    raise StateDictError(f"{name}: two parameters have this name; give the module another one")
        return found

    def _all_modules(self) -> dict[str, nn.Module]:
        return self._models | {name: value for name, value in self.more.items() if isinstance(value, nn.Module)}

    def _require_memory(self) -> None:
        """Raise for tensors on meta: a load would replace them, but optimizers hold on to their parameters."""
        bare = [
            _joined(prefix, name)
            for prefix, module in self._all_modules().items()
            for name, value in _values(module).items()
            if getattr(value, "is_meta", False)
        ]
        if bare:
            raise StateDictError(
                f"on the meta device: {joined(bare)}. Call model.to_empty(device=...) before the optimizer is made"
            )

    def _tell_what_is_missing(self, loaded: Mapping[str, LoadedOptimizer]) -> None:
        asked, self._fitted = self._fitted, False
        unloaded = [name for found in loaded.values() for name in found.unloaded]
        if unloaded and not asked:
            # torch's own load asked the optimizer as it was: empty.
            raise StateDictError(
                "the checkpoint has the optimizer's state of these parameters, and it was not loaded: use ray_dcp's "
                f"load, which asks for it: {joined(unloaded)}"
            )
        found_all = [(found.groups is None, (*found.fresh, *found.unloaded)) for found in loaded.values()]
        self.fresh = tuple(dict.fromkeys(name for _, names in found_all for name in names))
        untouched = dict.fromkeys(name for is_untouched, names in found_all if is_untouched for name in names)
        start_anew = [name for name in self.fresh if name not in untouched]
        if untouched:
            logger.warning(
                "the optimizer of these parameters stays as it was, since its groups are not in the checkpoint or were "
                "left out of the load: %s",
                joined(untouched),
            )
        if start_anew:
            logger.warning(
                "no optimizer state was loaded for these parameters, they start fresh: %s", joined(start_anew)
            )


def _named(given: Any, kind: type[T], role: str) -> dict[str, T]:
    """``given`` by name: a single one has the empty name, one of a list its position there."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, list | tuple):
        found = {str(place): one for place, one in enumerate(given)}
    else:
        found = {_ONE: given}
    wrong = [type(one).__name__ for one in found.values() if not isinstance(one, kind)]
    if wrong:
        raise ConfigError(role, f"a {wrong[0]} is not of class {kind.__name__}")
    return found


def _require_state(name: str, value: Any) -> None:
    """Raise ``ConfigError`` for a value that was meant as an object with state, and would be saved as a plain value."""
    if isinstance(value, type):
        raise ConfigError(name, f"{value.__name__} is a class; pass one that is made: {value.__name__}(...)")
    if isinstance(value, DataLoader) and not is_stateful(value):
        raise ConfigError(
            name,
            "a DataLoader does not know where it is: pass the DataPosition that is its batch_sampler, or a "
            "StatefulDataLoader in a LoaderPosition",
        )
    if isinstance(value, bool) and name in ("random", "data"):
        meant = "RNGState()" if name == "random" else "DataPosition(...)"
        raise ConfigError(name, f"{value} is a plain value, by which nothing is kept; pass {name}=dcp.{meant}")


def _unnamed(parts: Mapping[str, Any]) -> Any:
    """The only part, or all parts by name."""
    return parts[_ONE] if _ONE in parts else dict(parts)


def _part(parts: Any, name: str) -> Any:
    return parts if name == _ONE else parts[name]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _values(module: nn.Module) -> dict[str, Any]:
    clean = name_cleaner(module)
    return {clean(name): value for name, value in module.state_dict().items()}


def _load_module(module: nn.Module, loaded: Mapping[str, Any]) -> None:
    clean = name_cleaner(module)
    live = live_values(module)
    # What was filled in place is the module's own already; it is handed over as itself, which copies nothing.
    values = {
        name: value if same_memory(loaded[clean(name)], value) else loaded[clean(name)] for name, value in live.items()
    }
    module.load_state_dict(values)


def _state_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return _values(value)
    return value.state_dict() if is_stateful(value) else value


def _template_of(value: Any, saved: Saved, name: str) -> Any:
    if isinstance(value, nn.Module):
        return _values(value)
    return template_of_saved(value, name, saved) if is_stateful(value) else value


def _schedule_template(saved: Saved, name: str) -> Any:
    """A schedule's template: None for one Python value, as ``TrainState`` stores it; or that of torch's flat form."""
    return None if name in saved else nested_blanks(saved_below(saved, name)) or None


def _stored_keys(values: Mapping[str, Any], name: str) -> list[str]:
    """The stored keys of a schedule's state, in either form."""
    whole = values.get(name)
    state = whole[0] if isinstance(whole, tuple) and whole else whole
    if isinstance(state, Mapping):
        return list(state)
    return [rest.partition(".")[0] for rest in saved_below(values, name)]


def _load_schedule(schedule: Any, loaded: Any, found: LoadedOptimizer | None) -> None:
    state = loaded[0] if isinstance(loaded, tuple) else loaded
    if state is None:
        return
    if found is not None and found.groups is not None:
        sources = [group.index if group is not None else None for group in found.groups]
        if all(group is None or group.index is not None for group in found.groups):
            state = in_group_order(state, schedule.state_dict(), sources, found.num_saved_groups)
    rates = [(group, group["lr"]) for group in schedule.optimizer.param_groups] if found is not None else []
    schedule.load_state_dict(dict(state))
    for group, rate in rates:
        group["lr"] = rate


__all__ = ["TrainState"]
