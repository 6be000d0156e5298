"""Following a pointer: the small file in a folder that was handed to Ray Train, which says where the checkpoint is."""

from __future__ import annotations

import os

from ray_dcp.errors import CheckpointNotFoundError, ObjectNotFoundError
from ray_dcp.format.names import POINTER, decode_pointer
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import join_url, shown_url
from ray_dcp.store.open import open_store

_MAX_POINTERS = 8
"""Most pointers that are followed: one that leads to itself, or in a circle, is an error after this many."""


def resolve_checkpoint_id(checkpoint_id: str | os.PathLike[str]) -> str:
    """The place where the checkpoint really lies: follows the pointer that is left in a folder handed to Ray Train.

    Does not look whether a checkpoint is there. Raises ``CheckpointNotFoundError`` where the pointers lead in a
    circle, and ``CorruptCheckpointError`` where one cannot be read.
    """
    resolved = absolute(checkpoint_id)
    for _ in range(_MAX_POINTERS):
        try:
            content = open_store(resolved).get(POINTER)
        except ObjectNotFoundError:
            return resolved
        resolved = decode_pointer(content, file=join_url(resolved, POINTER))
    raise CheckpointNotFoundError(
        absolute(checkpoint_id), f"its pointers do not end; the last leads to {shown_url(resolved)}"
    )
