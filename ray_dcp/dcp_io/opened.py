"""What a checkpoint is, read once (by the coordinator) and handed to every rank.

So all of them load one and the same, also while it is being saved again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ray_dcp.catalog import require_checkpoint, resolve_checkpoint_id
from ray_dcp.errors import ObjectNotFoundError
from ray_dcp.layout import MANIFEST, METADATA
from ray_dcp.manifest import belongs_to, decode_facts
from ray_dcp.storage.open import open_store


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """One committed checkpoint, as found at one moment."""

    checkpoint_id: str
    metadata: bytes
    manifest: bytes | None
    """None where there is none, or where it belongs to another ``.metadata``."""


def open_checkpoint(checkpoint_id: str | os.PathLike[str]) -> OpenedCheckpoint:
    """Read what is committed at ``checkpoint_id``, following a pointer left for Ray Train.

    Raises ``CheckpointNotFoundError`` saying what is there instead.
    """
    location = resolve_checkpoint_id(checkpoint_id)
    store = open_store(location)
    require_checkpoint(store)
    for _ in range(3):  # a save of the same id may swap .metadata between the two reads
        metadata = store.get(METADATA)
        try:
            manifest = store.get(MANIFEST)
        except ObjectNotFoundError:
            return OpenedCheckpoint(location, metadata, None)
        facts = decode_facts(manifest, file=f"{location}/{MANIFEST}")
        if belongs_to(facts, metadata, file=f"{location}/{METADATA}"):
            return OpenedCheckpoint(location, metadata, manifest)
    return OpenedCheckpoint(location, metadata, None)
