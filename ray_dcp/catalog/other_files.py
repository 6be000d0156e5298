"""What is no checkpoint, and what to do with it: in words, for whoever took it for one."""

from __future__ import annotations

import posixpath
import shlex

from ray_dcp.errors import ConfigError, StoreError
from ray_dcp.format.names import MANIFEST, METADATA, SHARD_SUFFIX
from ray_dcp.store.location.urls import shown_url, split_url, url_scheme
from ray_dcp.store.open import open_store

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Of files that ``torch.save`` writes."""


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
    """Why nothing may be where nothing is."""
    if url_scheme(url) != "memory":
        return "nothing is there"
    return "nothing is there; memory:// is of one process: what another one (a rank, an actor) saved is not seen here"


def _looks_like_torch(folder: str, name: str) -> bool:
    """A zip archive, or a pickle: what ``torch.save`` has written ever since."""
    try:
        return open_store(folder).get(name, 0, 2) in (b"PK", b"\x80\x02")
    except (ConfigError, StoreError):
        return False
