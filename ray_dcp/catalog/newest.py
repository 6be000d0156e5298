"""The newest checkpoint under a root that is committed and whole: what a run goes on from."""

from __future__ import annotations

import logging
import os
import posixpath
from collections import defaultdict
from collections.abc import Mapping

from ray_dcp.catalog.committed import key_of, read_committed, url_of
from ray_dcp.catalog.facts import CheckpointInfo, info_of
from ray_dcp.catalog.listing import by_spelling
from ray_dcp.catalog.root_check import require_root
from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.names import MANIFEST, parse_step_folder, shard_files_named_in
from ray_dcp.store.location.urls import join_url, shown_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store

logger = logging.getLogger(__name__)


def latest_checkpoint(root: str | os.PathLike[str], *, before: int | None = None) -> CheckpointInfo | None:
    """The newest step under ``root`` (older than ``before``) that is committed and whole; None when there is none.

    A newer step that is damaged is passed over with a warning in the log. Whole means that every file that the
    manifest names is there and long enough, or, where there is no manifest, that every file that ``.metadata``
    names is there; no payload is read.
    """
    store = open_store(root)
    found = {folder: step for folder in store.list_folders() if (step := parse_step_folder(folder)) is not None}
    steps = {folder: step for folder, step in found.items() if before is None or step < before}
    for folder in sorted(steps, key=by_spelling, reverse=True):
        try:
            info = info_of(store, folder)
            damage = _missing_files(store, folder)
        except CorruptCheckpointError as error:
            info, damage = None, [str(error)]
        if damage:
            logger.warning(
                "passing over damaged checkpoint %s: %s", shown_url(url_of(store, folder)), "; ".join(damage)
            )
        elif info is not None:
            return info
    return None


def newest_step(root: str | os.PathLike[str], *, before: int | None = None) -> CheckpointInfo | None:
    """The newest step under ``root``, as ``latest_checkpoint`` finds it; None at the start of a run.

    Raises ``ConfigError`` as ``require_root`` does where nothing is found because ``root`` is not a root.
    """
    found = latest_checkpoint(root, before=before)
    if found is None and before is None:
        require_root(root)
    return found


def _missing_files(store: Store, folder: str) -> list[str]:
    """One line for each file that the checkpoint needs and that is gone or too short."""
    try:
        needed = _needed_files(store, folder, *read_committed(store, folder))
    except ObjectNotFoundError:
        return []  # deleted since
    folders = {posixpath.dirname(key) for key in needed if not key.startswith("..")}
    held = {one.key: one.nbytes for name in folders for one in store.list(name)}
    wrong = [
        f"{key} has {held[key]} of {nbytes} bytes" if key in held else _why_missing(store, key, nbytes)
        for key, nbytes in sorted(needed.items())
        if held.get(key, -1) < nbytes
    ]
    return [line for line in wrong if line]


def _needed_files(store: Store, folder: str, metadata: bytes, content: bytes | None) -> Mapping[str, int]:
    """How many bytes each file must have at least; 0 where no manifest says."""
    if content is None:
        return {posixpath.normpath(key_of(folder, name)): 0 for name in shard_files_named_in(metadata)}
    needed: dict[str, int] = defaultdict(int)
    for entry in decode_manifest(content, file=join_url(store.url, key_of(folder, MANIFEST))).entries:
        key = posixpath.normpath(key_of(folder, entry.file))
        needed[key] = max(needed[key], entry.record_offset + entry.record_nbytes)
    return needed


def _why_missing(store: Store, key: str, nbytes: int) -> str:
    """What is wrong with a file that no listing shows; "" where the listing is only late."""
    try:
        store.get(key, nbytes, 0)
    except ObjectNotFoundError:
        return f"{key} is missing"
    except ObjectTooShortError as error:
        return str(error)
    return ""
