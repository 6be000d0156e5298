"""Names of a model's values that do not depend on how the model is wrapped.

``DistributedDataParallel`` puts its model under ``module``, ``torch.compile`` under ``_orig_mod``, activation
checkpointing under ``_checkpoint_wrapped_module``. Those parts are left out, so that a checkpoint moves between
wrappings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_OWN_NAMES = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
"""Names that only wrappers give."""
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Classes that hold their model under ``module``, a name that others use too."""


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """A function that turns a name that ``model`` gives one of its values into the stored name."""
    if not any(_wrapped(module) for module in model.modules()):
        return str
    return functools.partial(_without_wrappers, model)


def parameter_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter under each of its stored names; the first name of a tied parameter comes first."""
    clean = name_cleaner(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield clean(name), parameter


def live_values(model: nn.Module) -> dict[str, Any]:
    """The model's own parameters, buffers and extra state, by the names that the model itself gives them."""
    return dict(model.state_dict(keep_vars=True))


def _without_wrappers(model: nn.Module, name: str) -> str:
    kept: list[str] = []
    module: nn.Module | None = model
    for part in name.split("."):
        # Some wrappers take their name out of state dicts by themselves: then the part is the wrapped model's.
        while module is not None and part not in module._modules and (wrapped := _wrapped(module)):
            module = module._modules[wrapped]
        if module is None or _wrapped(module) != part:
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def _wrapped(module: nn.Module) -> str | None:
    """The name under which a wrapper holds what it wraps; None for any other module."""
    if isinstance(module, _WRAPPERS):
        return "module"
    return next((name for name in _OWN_NAMES if name in module._modules), None)


def same_memory(value: Any, other: Any) -> bool:
    """Whether the two are one tensor's values seen twice; False also where that cannot be told."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    mine, others = _local(value), _local(other)
    if mine.shape != others.shape or mine.dtype != others.dtype or mine.device != others.device or not mine.numel():
        return False
    try:
        return mine.data_ptr() == others.data_ptr() != 0 and mine.stride() == others.stride()
    except RuntimeError:  # a tensor that wraps others, or one of a layout without strides
        return False


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


__all__ = ["live_values", "name_cleaner", "parameter_names", "same_memory"]
