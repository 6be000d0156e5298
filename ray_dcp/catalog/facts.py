"""``CheckpointInfo``: the facts of one committed checkpoint, or of a folder of safetensors files. Reads no payloads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.catalog.committed import is_committed, key_of, read_committed, url_of
from ray_dcp.catalog.explain import what_is_there
from ray_dcp.catalog.pointer import resolve_checkpoint_id
from ray_dcp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    NotAFolderError,
    ObjectNotFoundError,
)
from ray_dcp.format.manifest import decode_facts
from ray_dcp.format.names import MANIFEST, METADATA, SAFETENSORS_SUFFIX, parse_step_folder
from ray_dcp.store.location.urls import folder_name, join_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint."""

    step: int | None
    """The step in its folder's name, ``step-00000100``; else None: a link to a step or a copy of one is not a step."""
    checkpoint_id: str
    nbytes: int
    """Bytes of all records; of all files where there is no manifest."""
    world_size: int | None
    """Number of ranks that saved it; None where no manifest says, as where torch wrote it."""
    created: float
    """Seconds since the epoch. Where there is no manifest, what the store says of its files."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pace: Mapping[str, Any] | None = field(default=None, repr=False)
    """What the run had measured of steps and saves, by which ``CheckpointManager.due`` goes on; None: nothing."""


def describe(checkpoint_id: str | os.PathLike[str]) -> CheckpointInfo:
    """The facts of one checkpoint, a pointer followed. Raises ``CheckpointNotFoundError`` saying what is there."""
    store = open_store(resolve_checkpoint_id(checkpoint_id))
    info = info_of(store, "")
    if info is None:
        raise CheckpointNotFoundError(store.url, what_is_there(store))
    return info


def is_safetensors(location: str) -> bool:
    """Whether ``location``, a pointer followed, is a safetensors file or a folder with some directly in it."""
    if location.endswith(SAFETENSORS_SUFFIX):
        return True
    try:
        return safetensors_info(open_store(location), "") is not None
    except NotAFolderError:
        return False


def info_of(store: Store, folder: str) -> CheckpointInfo | None:
    """The facts of the checkpoint in ``folder``; None when none is committed there."""
    try:
        _, content = read_committed(store, folder)
    except ObjectNotFoundError:
        return None
    if content is None:
        return _info_from_sizes(store, folder)
    facts = decode_facts(content, file=join_url(store.url, key_of(folder, MANIFEST)))
    return CheckpointInfo(
        step=_step_of(store, folder),
        checkpoint_id=url_of(store, folder),
        nbytes=facts.nbytes,
        world_size=facts.world_size,
        created=facts.created,
        metrics=facts.metrics,
        pace=facts.pace,
    )


def info_or_sizes(store: Store, folder: str) -> CheckpointInfo | None:
    """The facts as ``info_of`` has them; from the files, with a warning in the log, if the manifest cannot be read."""
    try:
        return info_of(store, folder)
    except (CorruptCheckpointError, FormatVersionError) as error:
        logger.warning("%s", error)
        return _info_from_sizes(store, folder)


def safetensors_info(store: Store, folder: str) -> CheckpointInfo | None:
    """The facts of a model in safetensors files; None where no such file is there, or a checkpoint beside them."""
    if is_committed(store, folder):
        return None
    prefix = f"{folder}/" if folder else ""
    files = [one for one in store.list(folder) if is_safetensors_key(one.key.removeprefix(prefix))]
    if not files:
        return None
    modified = max(one.modified for one in files)
    return CheckpointInfo(None, url_of(store, folder), sum(one.nbytes for one in files), None, modified)


def is_safetensors_key(key: str) -> bool:
    """Whether a safetensors file lies directly in the folder that ``key`` is relative to."""
    return key.endswith(SAFETENSORS_SUFFIX) and "/" not in key


def _info_from_sizes(store: Store, folder: str) -> CheckpointInfo | None:
    stored = {one.key: one for one in store.list(folder)}
    commit = stored.get(key_of(folder, METADATA))
    if commit is None:
        return None  # deleted since
    nbytes = sum(one.nbytes for one in stored.values())
    return CheckpointInfo(_step_of(store, folder), url_of(store, folder), nbytes, None, commit.modified)


def _step_of(store: Store, folder: str) -> int | None:
    return parse_step_folder(folder or folder_name(store.url))
