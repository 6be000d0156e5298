"""What lies directly under a root: committed checkpoints, steps by number, folders that were never committed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass

from ray_dcp.catalog.committed import is_committed, url_of
from ray_dcp.catalog.explain import shard_files_among, why_uncommitted
from ray_dcp.catalog.facts import CheckpointInfo, info_or_sizes, is_safetensors_key, safetensors_info
from ray_dcp.format.names import parse_step_folder, require_step, step_folder
from ray_dcp.store.location.urls import folder_name, join_url
from ray_dcp.store.open import open_store
from ray_dcp.store.parallel import for_each_folder
from ray_dcp.store.store import Store


@dataclass(frozen=True, slots=True)
class UncommittedFolder:
    """A folder that holds parts of a checkpoint, none of which a reader ever sees."""

    step: int | None
    checkpoint_id: str
    num_files: int
    nbytes: int
    reason: str


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """All committed checkpoints directly under ``root``: steps in ascending order, then other folders by name.

    No step is listed twice: of two folders that spell one number, the one that ray_dcp writes is the step. A checkpoint
    whose manifest cannot be read is listed too, with what its files say, and the log has a warning.
    """
    store = open_store(root)
    folders = sorted(store.list_folders(), key=by_spelling)
    found = [info for info in for_each_folder(folders, lambda name: info_or_sizes(store, name)) if info is not None]
    step_of = {info.step: info for info in found}
    once = [info if step_of[info.step] is info else dataclasses.replace(info, step=None) for info in found]
    return sorted(once, key=_by_step)


def find_step(root: str | os.PathLike[str], step: int) -> str | None:
    """The place of the committed checkpoint of ``step`` under ``root``, as ``list_checkpoints`` has it, or None."""
    store = open_store(root)
    number = require_step(step)
    written = step_folder(number)
    if is_committed(store, written):
        return url_of(store, written)
    spelt = [name for name in store.list_folders() if parse_step_folder(name) == number and is_committed(store, name)]
    return url_of(store, max(spelt)) if spelt else None


def list_uncommitted(root: str | os.PathLike[str]) -> list[UncommittedFolder]:
    """Folders directly under ``root`` with parts of a checkpoint that was never committed, by step and name."""
    store = open_store(root)
    found = for_each_folder(store.list_folders(), lambda folder: _if_uncommitted(store, folder))
    return sorted((one for one in found if one is not None), key=_by_step)


def list_safetensors(root: str | os.PathLike[str], *, known: Collection[CheckpointInfo]) -> list[CheckpointInfo]:
    """Folders directly under ``root`` that hold a model in safetensors files and no checkpoint, by name.

    ``known`` are checkpoints under it, at which nobody needs to look again.
    """
    store = open_store(root)
    others = set(store.list_folders()) - {folder_name(one.checkpoint_id) for one in known}
    found = for_each_folder(sorted(others), lambda folder: safetensors_info(store, folder))
    return [one for one in found if one is not None]


def _if_uncommitted(store: Store, folder: str) -> UncommittedFolder | None:
    step = parse_step_folder(folder)
    if is_committed(store, folder):
        return None
    stored = store.list(folder)
    names = [one.key.removeprefix(f"{folder}/") for one in stored]
    if not stored or (step is None and not shard_files_among(names)):
        return None
    if any(map(is_safetensors_key, names)) and not shard_files_among(names):
        return None  # a model, which nobody meant to commit
    nbytes = sum(one.nbytes for one in stored)
    return UncommittedFolder(step, join_url(store.url, folder), len(stored), nbytes, why_uncommitted(names))


def by_spelling(folder: str) -> tuple[int, bool, str]:
    """Sorts folders by step; of those that spell the same one, ray_dcp's own comes last."""
    step = parse_step_folder(folder)
    return (-1, False, folder) if step is None else (step, folder == step_folder(step), folder)


def _by_step(one: CheckpointInfo | UncommittedFolder) -> tuple[float, str]:
    return float("inf") if one.step is None else one.step, one.checkpoint_id
