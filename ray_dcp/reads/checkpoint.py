"""What a checkpoint is: read once, by the coordinator, and handed to every rank.

So all ranks load the same one, even while it is being saved again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ray_dcp.catalog.committed import read_committed
from ray_dcp.catalog.explain import require_checkpoint
from ray_dcp.catalog.pointer import resolve_checkpoint_id
from ray_dcp.errors import CheckpointNotFoundError, NotAFolderError, ObjectNotFoundError
from ray_dcp.format.names import METADATA
from ray_dcp.reads.safetensors_folder import SUFFIX, find_safetensors
from ray_dcp.store.location.urls import split_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import exists


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """One committed checkpoint, as found at one moment."""

    checkpoint_id: str
    metadata: bytes
    manifest: bytes | None
    """The manifest as stored; None where there is none, or where it belongs to another ``.metadata``."""
    unchecked: bool = False
    """Whether the manifest has no checksums: it was made from safetensors files, which have none."""


@dataclass(frozen=True, slots=True)
class FromMemory:
    """Says that a checkpoint is in memory alone, so that nobody is to look for it in storage."""

    opened: OpenedCheckpoint | None
    """What it is, on the rank that brings it."""


def open_checkpoint(checkpoint_id: str | os.PathLike[str]) -> OpenedCheckpoint:
    """Read what is committed at ``checkpoint_id``, following a pointer left for Ray Train.

    Where nothing is committed but there are safetensors files, or where ``checkpoint_id`` is such a file, these are the
    checkpoint. Raises ``CheckpointNotFoundError`` saying what is there instead.
    """
    location = resolve_checkpoint_id(checkpoint_id)
    store = open_store(location)
    try:
        require_checkpoint(store)
    except CheckpointNotFoundError:
        opened = _open_safetensors(location)
        if opened is None:
            raise
        return opened
    return OpenedCheckpoint(location, *read_committed(store))


def open_for_ranks(checkpoint_id: str | os.PathLike[str], world_size: int) -> Sequence[OpenedCheckpoint]:
    """The checkpoint that each rank loads, in rank order: the same for all, or one each.

    torch writes one for each rank with ``use_collectives=False``. Raises ``CheckpointNotFoundError`` where there is no
    checkpoint, and where only some of the ranks have one of their own.
    """
    try:
        return [open_checkpoint(checkpoint_id)] * world_size
    except CheckpointNotFoundError:
        found = [_open_of_rank(checkpoint_id, rank) for rank in range(world_size)]
        if found[0] is None:
            raise
        opened = [one for one in found if one is not None]
        if len(opened) < world_size:
            raise CheckpointNotFoundError(
                os.fsdecode(checkpoint_id),
                f"it was saved with use_collectives=False by {len(opened)} ranks, each of which can load its own part "
                f"alone; this load has {world_size}",
            ) from None
        return opened


def open_of_rank(checkpoint_id: str | os.PathLike[str], rank: int) -> OpenedCheckpoint:
    """The checkpoint that ``rank`` has written by itself. Raises ``CheckpointNotFoundError`` where there is none."""
    opened = _open_of_rank(checkpoint_id, rank)
    if opened is None:
        raise CheckpointNotFoundError(os.fsdecode(checkpoint_id), f"no {METADATA} of rank {rank} alone")
    return opened


def _open_of_rank(checkpoint_id: str | os.PathLike[str], rank: int) -> OpenedCheckpoint | None:
    location = resolve_checkpoint_id(checkpoint_id)
    with suppress(ObjectNotFoundError, NotAFolderError):
        return OpenedCheckpoint(location, open_store(location).get(f"__{rank}{METADATA}"), None)
    return None


def _open_safetensors(location: str) -> OpenedCheckpoint | None:
    """The safetensors files in the folder ``location``, or the file that it is; None where there are none."""
    only = ""
    if location.endswith(SUFFIX):
        folder, name = split_url(location)
        if exists(open_store(folder), name):
            location, only = folder, name
    try:
        found = find_safetensors(open_store(location), only)
    except NotAFolderError:
        return None
    return None if found is None else OpenedCheckpoint(location, found.metadata, found.manifest, unchecked=True)
