"""Why a place is not a checkpoint, and what to pass instead: in words, for whoever took it for one.

Every ``CheckpointNotFoundError`` and every list of what was not committed takes its reason from here.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Sequence

from ray_dcp.catalog.committed import is_committed
from ray_dcp.errors import CheckpointNotFoundError, ConfigError, NotAFolderError, StoreError
from ray_dcp.format.names import MANIFEST, METADATA, SHARD_SUFFIX, parse_step_folder
from ray_dcp.store.location.urls import join_url, shown_url, split_url, url_scheme
from ray_dcp.store.open import open_store
from ray_dcp.store.parallel import for_each_folder
from ray_dcp.store.store import Store, as_folders
from ray_dcp.wording import counted, joined

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""How names of files that ``torch.save`` writes end."""


def require_checkpoint(store: Store) -> None:
    """Raise ``CheckpointNotFoundError`` unless a checkpoint is committed at the root of ``store``.

    Its reason says what is there instead, and what to pass.
    """
    if not is_committed(store):
        raise CheckpointNotFoundError(store.url, what_is_there(store))


def require_folder(store: Store) -> None:
    """Raise ``CheckpointNotFoundError`` where a file lies at the root of ``store``.

    It says what to do with the file.
    """
    try:
        store.list_folders()
    except NotAFolderError:
        raise CheckpointNotFoundError(store.url, why_no_folder(store.url)) from None


def what_is_there(store: Store) -> str:
    """Why the root of ``store`` is not a checkpoint, for somebody who thought it was."""
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
    if MANIFEST in names or shard_files_among(names):
        return why_uncommitted(names)
    of_torch = next((name for name in names if name.endswith(TORCH_SUFFIXES) and "/" not in name), "")
    way = f"; of {of_torch} {way_to_convert(join_url(store.url, of_torch))}" if of_torch else ""
    return f"{counted(len(names), 'file')}, but no .metadata{way}"


def root_exists(store: Store) -> bool:
    """Whether there is anything at the root of ``store``; in a bucket a folder exists while it holds something."""
    folders = as_folders(store)
    if folders is not None:
        return folders.is_there("") or folders.is_link("")
    return bool(store.list_folders() or store.list())


def why_uncommitted(names: Sequence[str]) -> str:
    if MANIFEST in names:
        return "a save that stopped just before its commit: all files but .metadata"
    if shards := shard_files_among(names):
        return f"a save that never finished: {counted(len(shards), 'shard file')}, no .metadata"
    return f"{counted(len(names), 'file')}, no .metadata and no shard file"


def shard_files_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(SHARD_SUFFIX) and "/" not in name]


def why_no_folder(url: str) -> str:
    """What to do with a file that was given for a checkpoint or a root."""
    folder, name = split_url(url)
    if name in (METADATA, MANIFEST) or name.endswith(SHARD_SUFFIX):
        return f"this is a file of a checkpoint; pass the folder that holds it, {shown_url(folder)}"
    if name.endswith(".safetensors"):
        return "this is a safetensors file: ray-dcp show and dcp.load take it, ray-dcp convert makes a checkpoint of it"
    if name.endswith(TORCH_SUFFIXES) or _looks_like_torch(folder, name):
        return f"this is a file, as torch.save writes them; {way_to_convert(url)}"
    return "this is a file; a checkpoint is a folder"


def way_to_convert(url: str) -> str:
    """The command that makes a checkpoint of a file of ``torch.save``."""
    shown = shown_url(url)
    stem = posixpath.splitext(shown)[0]
    dest = stem if stem != shown else f"{stem}-checkpoint"
    return f"make a checkpoint: ray-dcp convert {shlex.quote(shown)} {shlex.quote(dest)} --to dcp"


def nothing_there(url: str) -> str:
    """Says that nothing is there, and why that may be."""
    if url_scheme(url) != "memory":
        return "nothing is there"
    return "nothing is there; memory:// is of one process: what another one (a rank, an actor) saved is not seen here"


def _looks_like_torch(folder: str, name: str) -> bool:
    """Whether a file begins as a zip archive or a pickle does: what ``torch.save`` has written ever since."""
    try:
        return open_store(folder).get(name, 0, 2) in (b"PK", b"\x80\x02")
    except (ConfigError, StoreError):
        return False
