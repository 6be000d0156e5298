"""What is committed under a root, and what is there instead where nothing is."""

from __future__ import annotations

import dataclasses
import logging
import os
import posixpath
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray_dcp.catalog.committed import read_committed
from ray_dcp.catalog.other_files import TORCH_SUFFIXES, nothing_there, way_to_convert, why_no_folder
from ray_dcp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    NotAFolderError,
    ObjectNotFoundError,
    ObjectTooShortError,
)
from ray_dcp.format.manifest import Manifest, decode_facts, decode_manifest
from ray_dcp.format.names import (
    MANIFEST,
    METADATA,
    POINTER,
    SAFETENSORS_SUFFIX,
    SHARD_SUFFIX,
    decode_pointer,
    parse_step_folder,
    require_step,
    shard_files_named_in,
    step_folder,
)
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import folder_name, join_url, shown_url
from ray_dcp.store.open import open_store
from ray_dcp.store.parallel import in_parallel
from ray_dcp.store.store import Store, as_folders, exists
from ray_dcp.wording import counted, joined

logger = logging.getLogger(__name__)

_MAX_POINTERS = 8
_MAX_THREADS = 16
_F = TypeVar("_F")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint."""

    step: int | None
    """What its folder's name says, ``step-00000100``. None for every other: a link or a copy of a step is no step."""
    checkpoint_id: str
    nbytes: int
    """Of all records; of all files where there is no manifest."""
    world_size: int | None
    """Ranks that saved it; None where torch wrote it."""
    created: float
    """Seconds since the epoch."""
    metrics: Mapping[str, Any] = field(default_factory=dict)


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

    No step is there twice: of two folders that spell one number the one that ray_dcp writes is the step. One whose
    manifest cannot be read is there too, with what its files say; the log has a warning.
    """
    store = open_store(root)
    folders = sorted(store.list_folders(), key=_spelling)
    found = [info for info in for_each_folder(folders, lambda name: _info_or_sizes(store, name)) if info is not None]
    step_of = {info.step: info for info in found}
    once = [info if step_of[info.step] is info else dataclasses.replace(info, step=None) for info in found]
    return sorted(once, key=_by_step)


def find_step(root: str | os.PathLike[str], step: int) -> str | None:
    """Where the committed checkpoint of ``step`` lies under ``root``, as ``list_checkpoints`` says; None for none."""
    store = open_store(root)
    number = require_step(step)
    written = step_folder(number)
    if is_committed(store, written):
        return _url(store, written)
    spelt = [name for name in store.list_folders() if parse_step_folder(name) == number and is_committed(store, name)]
    return _url(store, max(spelt)) if spelt else None


def latest_checkpoint(root: str | os.PathLike[str], *, before: int | None = None) -> CheckpointInfo | None:
    """The newest step under ``root`` (older than ``before``) that is committed and whole; None when there is none.

    A newer step that is damaged is passed over with a warning in the log. Whole means that every file the
    manifest names is there and long enough, or, where there is no manifest, that the files are there which
    ``.metadata`` names; no payload is read.
    """
    store = open_store(root)
    found = {folder: step for folder in store.list_folders() if (step := parse_step_folder(folder)) is not None}
    steps = {folder: step for folder, step in found.items() if before is None or step < before}
    for folder in sorted(steps, key=_spelling, reverse=True):
        try:
            info = _info(store, folder)
            damage = _missing_files(store, folder)
        except CorruptCheckpointError as error:
            info, damage = None, [str(error)]
        if damage:
            logger.warning("passing over damaged checkpoint %s: %s", shown_url(_url(store, folder)), "; ".join(damage))
        elif info is not None:
            return info
    return None


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
    found = for_each_folder(sorted(others), lambda folder: _of_safetensors(store, folder))
    return [one for one in found if one is not None]


def is_safetensors(location: str) -> bool:
    """Whether ``location``, a pointer followed, is a safetensors file or a folder with some directly in it."""
    if location.endswith(SAFETENSORS_SUFFIX):
        return True
    try:
        return _of_safetensors(open_store(location), "") is not None
    except NotAFolderError:
        return False


def describe(checkpoint_id: str | os.PathLike[str]) -> CheckpointInfo:
    """The facts of one checkpoint, a pointer followed. Raises ``CheckpointNotFoundError`` saying what is there."""
    store = open_store(resolve_checkpoint_id(checkpoint_id))
    info = _info(store, "")
    if info is None:
        raise CheckpointNotFoundError(store.url, what_is_there(store))
    return info


def open_manifest(store: Store) -> Manifest | None:
    """The manifest of the checkpoint at the root of ``store``.

    None where there is none, or where it belongs to another ``.metadata``: to a save that has not committed.
    Raises ``ObjectNotFoundError`` where nothing is committed.
    """
    _, content = read_committed(store)
    return None if content is None else decode_manifest(content, file=join_url(store.url, MANIFEST))


def resolve_checkpoint_id(checkpoint_id: str | os.PathLike[str]) -> str:
    """Where the checkpoint really lies: follows the pointer that is left in a folder handed to Ray Train."""
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


def require_checkpoint(store: Store) -> None:
    """Return when a checkpoint is committed at the root of ``store``.

    Otherwise raises ``CheckpointNotFoundError`` whose reason says what is there instead, and what to pass.
    """
    if not is_committed(store):
        raise CheckpointNotFoundError(store.url, what_is_there(store))


def is_committed(store: Store, folder: str = "") -> bool:
    """Whether ``folder`` of ``store`` holds a committed checkpoint."""
    return exists(store, _key(folder, METADATA))


def require_folder(store: Store) -> None:
    """Return unless a file lies at the root of ``store``.

    Then raises ``CheckpointNotFoundError``, which says what to do with it.
    """
    try:
        store.list_folders()
    except NotAFolderError:
        raise CheckpointNotFoundError(store.url, why_no_folder(store.url)) from None


def root_exists(store: Store) -> bool:
    """Whether there is anything at the root of ``store``; in a bucket a folder exists while it holds something."""
    folders = as_folders(store)
    if folders is not None:
        return folders.is_there("") or folders.is_link("")
    return bool(store.list_folders() or store.list())


def for_each_folder(folders: Sequence[_F], look: Callable[[_F], _T]) -> list[_T]:
    """What ``look`` says of every folder; a few at a time, since in a bucket each look is a wait."""
    return [seen for _, seen in in_parallel(look, folders, max_at_once=_MAX_THREADS, in_order=True)]


def _info_or_sizes(store: Store, folder: str) -> CheckpointInfo | None:
    try:
        return _info(store, folder)
    except (CorruptCheckpointError, FormatVersionError) as error:
        logger.warning("%s", error)
        return _info_from_sizes(store, folder)


def _info(store: Store, folder: str) -> CheckpointInfo | None:
    """The facts of the checkpoint in ``folder``; None when none is committed there."""
    try:
        _, content = read_committed(store, folder)
    except ObjectNotFoundError:
        return None
    if content is None:
        return _info_from_sizes(store, folder)
    facts = decode_facts(content, file=join_url(store.url, _key(folder, MANIFEST)))
    return CheckpointInfo(
        step=_step_of(store, folder),
        checkpoint_id=_url(store, folder),
        nbytes=facts.nbytes,
        world_size=facts.world_size,
        created=facts.created,
        metrics=facts.metrics,
    )


def _info_from_sizes(store: Store, folder: str) -> CheckpointInfo | None:
    stored = {one.key: one for one in store.list(folder)}
    commit = stored.get(_key(folder, METADATA))
    if commit is None:
        return None  # deleted since
    nbytes = sum(one.nbytes for one in stored.values())
    return CheckpointInfo(_step_of(store, folder), _url(store, folder), nbytes, None, commit.modified)


def _step_of(store: Store, folder: str) -> int | None:
    return parse_step_folder(folder or folder_name(store.url))


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
    """How long each file must be; at least 0 where no manifest says."""
    if content is None:
        return {posixpath.normpath(_key(folder, name)): 0 for name in shard_files_named_in(metadata)}
    needed: dict[str, int] = defaultdict(int)
    for entry in decode_manifest(content, file=join_url(store.url, _key(folder, MANIFEST))).entries:
        key = posixpath.normpath(_key(folder, entry.file))
        needed[key] = max(needed[key], entry.record_offset + entry.record_nbytes)
    return needed


def _why_missing(store: Store, key: str, nbytes: int) -> str:
    """What is wrong with a file that no listing shows; nothing where the listing is only late."""
    try:
        store.get(key, nbytes, 0)
    except ObjectNotFoundError:
        return f"{key} is missing"
    except ObjectTooShortError as error:
        return str(error)
    return ""


def _of_safetensors(store: Store, folder: str) -> CheckpointInfo | None:
    if is_committed(store, folder):
        return None
    prefix = f"{folder}/" if folder else ""
    files = [one for one in store.list(folder) if _is_safetensors_key(one.key.removeprefix(prefix))]
    if not files:
        return None
    modified = max(one.modified for one in files)
    return CheckpointInfo(None, _url(store, folder), sum(one.nbytes for one in files), None, modified)


def _is_safetensors_key(key: str) -> bool:
    return key.endswith(SAFETENSORS_SUFFIX) and "/" not in key


def _if_uncommitted(store: Store, folder: str) -> UncommittedFolder | None:
    step = parse_step_folder(folder)
    if is_committed(store, folder):
        return None
    stored = store.list(folder)
    names = [one.key.removeprefix(f"{folder}/") for one in stored]
    if not stored or (step is None and not _shard_files(names)):
        return None
    if any(map(_is_safetensors_key, names)) and not _shard_files(names):
        return None  # a model, which nobody meant to commit
    nbytes = sum(one.nbytes for one in stored)
    return UncommittedFolder(step, join_url(store.url, folder), len(stored), nbytes, _why_uncommitted(names))


def _why_uncommitted(names: Sequence[str]) -> str:
    if MANIFEST in names:
        return "a save that stopped just before its commit: all files but .metadata"
    if shards := _shard_files(names):
        return f"a save that never finished: {counted(len(shards), 'shard file')}, no .metadata"
    return f"{counted(len(names), 'file')}, no .metadata and no shard file"


def what_is_there(store: Store) -> str:
    """Why the root of ``store`` is no checkpoint, for somebody who thought it was."""
    try:
        folders = store.list_folders()
    except NotAFolderError:
        return why_no_folder(store.url)
    there = for_each_folder(folders, lambda folder: is_committed(store, folder))
    committed = [folder for folder, here in zip(folders, there, strict=True) if here]
    steps = {folder: step for folder in folders if (step := parse_step_folder(folder)) is not None}
    if newest := max((f for f in committed if f in steps), key=lambda f: steps[f], default=""):
        count = counted(sum(folder in steps for folder in committed), "checkpoint")
        return f"this is a root with {count}, the newest is {newest}; pass {shown_url(join_url(store.url, newest))}"
    if committed:
        return f"this folder contains {joined(committed)}; pass {shown_url(join_url(store.url, committed[0]))}"
    on_disk = as_folders(store)
    if on_disk is not None and on_disk.is_link("") and not on_disk.is_there(""):
        return f"this is a link that leads nowhere: to {on_disk.link_target('')}"
    names = [one.key for one in store.list()]
    if steps:
        return f"this is a root with {counted(len(steps), 'step folder')}, none of them committed"
    if not names:
        return nothing_there(store.url) if not root_exists(store) else "the folder is empty"
    if MANIFEST in names or _shard_files(names):
        return _why_uncommitted(names)
    of_torch = next((name for name in names if name.endswith(TORCH_SUFFIXES) and "/" not in name), "")
    way = f"; of {of_torch} {way_to_convert(join_url(store.url, of_torch))}" if of_torch else ""
    return f"{counted(len(names), 'file')}, but no .metadata{way}"


def _shard_files(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(SHARD_SUFFIX) and "/" not in name]


def _url(store: Store, folder: str) -> str:
    return join_url(store.url, folder) if folder else store.url


def _key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _spelling(folder: str) -> tuple[int, bool, str]:
    """Sorts by step, and of folders that spell the same one that of ray_dcp last."""
    step = parse_step_folder(folder)
    return (-1, False, folder) if step is None else (step, folder == step_folder(step), folder)


def _by_step(one: CheckpointInfo | UncommittedFolder) -> tuple[float, str]:
    return float("inf") if one.step is None else one.step, one.checkpoint_id
