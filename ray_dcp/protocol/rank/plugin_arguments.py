"""Whether what a user passes as planner, writer or reader is one: told by name, before anything of it is called."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.errors import ConfigError

_ROLES: dict[str, tuple[type, tuple[str, ...]]] = {
    "storage_writer": (StorageWriter, ("set_up_storage_writer", "prepare_local_plan", "write_data", "finish")),
    "storage_reader": (StorageReader, ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "read_data")),
    "save planner": (SavePlanner, ("set_up_planner", "create_local_plan", "create_global_plan", "resolve_data")),
    "load planner": (LoadPlanner, ("set_up_planner", "create_local_plan", "load_bytes", "resolve_tensor")),
}
"""The class of each role, and the methods by which one that does not derive from it is known."""


def require_storage(storage: Any, setting: str) -> None:
    """Return if ``storage`` is None, or what ``setting`` ("storage_writer" or "storage_reader") takes.

    Raises ``ConfigError``, which for a path, passed where torch has the writer, says how to pass that.
    """
    if isinstance(storage, str | bytes | os.PathLike):
        raise ConfigError(setting, f"{os.fspath(storage)!r} is a place: pass it by name, as checkpoint_id=")
    _require(storage, setting, setting)


def require_planner(planner: Any, direction: str) -> None:
    """Return if ``planner`` is None, or one for this ``direction``: "save" or "load". Raises ``ConfigError``."""
    _require(planner, f"{direction} planner", "planner")


def _require(given: Any, role: str, setting: str) -> None:
    if given is None:
        return
    wanted, methods = _ROLES[role]
    if isinstance(given, type):
        raise ConfigError(setting, f"{given.__name__} is a class; pass one that is made: {given.__name__}(...)")
    if isinstance(given, wanted) or all(callable(getattr(given, method, None)) for method in methods):
        return
    other = next(
        (f", it is a {name.replace('storage_', '')}" for name in _ROLES if isinstance(given, _ROLES[name][0])), ""
    )
    raise ConfigError(setting, f"a {type(given).__name__} is not a {wanted.__name__}{other}")


__all__ = ["require_planner", "require_storage"]
