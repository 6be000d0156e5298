"""Where the checkpoint of a call is: what the caller says of it, and what a writer or reader knows already.

A user's writer or reader is told what the user has passed, which need not be a path; ray_dcp's are told a place that
is the same in every process.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from ray_dcp.errors import ConfigError, NoCheckpointIdError, RayDcpError
from ray_dcp.store.location.place import absolute, foreign
from ray_dcp.store.location.urls import url_scheme

CheckpointId = str | os.PathLike[str]


class OwnLocation:
    """The location of a call whose storage is a ``StoreWriter`` or ``StoreReader``."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def named(self, checkpoint_id: CheckpointId | None) -> str:
        """The place as an error is to name it."""
        return named(checkpoint_id if checkpoint_id is not None else self._storage.checkpoint_id or None)

    def locate(self, checkpoint_id: CheckpointId | None, role: str) -> str:
        """The place, which the storage is told; ``role`` is the name of the argument whose storage may know one.

        Raises ``NoCheckpointIdError`` where neither names a place.
        """
        own = self._storage.checkpoint_id if checkpoint_id is None else checkpoint_id
        if checkpoint_id is None and not own:
            raise NoCheckpointIdError(
                "checkpoint_id", f"must be specified: pass a path or URL; no {role} has one (is it an unset variable?)"
            )
        location = absolute(own)
        self._storage.reset(location)
        return location

    def require_reachable(self, location: str, *, in_one_process: bool) -> None:
        """Raise ``ConfigError`` for a place of one process where several take part."""
        require_reachable(location, in_one_process=in_one_process)


class UsersLocation:
    """The location of a call whose storage is a user's writer or reader."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def named(self, checkpoint_id: CheckpointId | None) -> str:
        """The place as an error is to name it, also where only the storage knows it; what is wrong is refused later."""
        if checkpoint_id is None and isinstance(self._storage, str | os.PathLike):
            checkpoint_id = self._storage
        elif checkpoint_id is None and not isinstance(self._storage, type):
            with suppress(Exception):  # a user's may do anything when it is asked
                checkpoint_id = getattr(self._storage, "checkpoint_id", None) or None
        return named(checkpoint_id)

    def locate(self, checkpoint_id: CheckpointId | None, role: str) -> str:
        """The place, as far as the storage says it; it is told what the user has passed."""
        if checkpoint_id is None:
            own = getattr(self._storage, "checkpoint_id", None)
            return foreign(own) if own else ""
        location = foreign(checkpoint_id)
        self._storage.reset(checkpoint_id)
        return location

    def require_reachable(self, location: str, *, in_one_process: bool) -> None:
        """Require nothing: nobody knows what its places are."""


def named(checkpoint_id: CheckpointId | None) -> str:
    """How messages call a place, whatever was passed: an invalid one is refused when all ranks are in the call."""
    try:
        return "" if checkpoint_id is None else absolute(checkpoint_id)
    except RayDcpError:
        return str(checkpoint_id)


def require_reachable(location: str, *, in_one_process: bool) -> None:
    """Raise ``ConfigError`` for a place of one process where several take part: each would see another one."""
    if url_scheme(location) == "memory" and not in_one_process:
        raise ConfigError(
            "checkpoint_id",
            f"{location} is of one process, and the ranks of a group and its coordinator are several: pass a folder or "
            "bucket that all of them reach, or no_dist=True to act alone in this process",
        )


__all__ = ["CheckpointId", "OwnLocation", "UsersLocation", "named", "require_reachable"]
