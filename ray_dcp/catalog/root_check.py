"""Whether a place can be the root of a run: one that is itself a checkpoint would be taken for an empty one.

A training would start anew there without a word, and put its steps into the checkpoint.
"""

from __future__ import annotations

import os

from ray_dcp.catalog.committed import is_committed
from ray_dcp.errors import ConfigError
from ray_dcp.format.names import POINTER, SAFETENSORS_SUFFIX, parse_step_folder
from ray_dcp.store.location.urls import folder_name, shown_url, split_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store, exists, traits_of

_OF_A_MODEL = ("model.safetensors.index.json", "model.safetensors")
"""Files of a model, asked for by name in a bucket: a listing there is of all that lies below."""


def require_root(root: str | os.PathLike[str]) -> None:
    """Raise ``ConfigError``, which says what to pass, where ``root`` is itself a checkpoint or holds safetensors files.

    A folder with steps below it is a root in any case.
    """
    store = open_store(root)
    if any(parse_step_folder(folder) is not None for folder in store.list_folders()):
        return
    shown = shown_url(store.url)
    load_it = f"dcp.load(state, checkpoint_id={shown!r}) loads it"
    if is_committed(store) or exists(store, POINTER):
        way = "pass another folder, of the run's own"
        if parse_step_folder(folder_name(store.url)) is not None:
            way = f"pass the folder above, {shown_url(split_url(store.url)[0])}"
        raise ConfigError("root", f"{shown} is itself a checkpoint, and not a folder of steps: {way}. {load_it}")
    if _holds_a_model(store):
        raise ConfigError(
            "root",
            f"{shown} holds a model in safetensors files, and no steps: pass a folder of the run's own. {load_it}",
        )


def _holds_a_model(store: Store) -> bool:
    if traits_of(store).folders:
        return any(one.key.endswith(SAFETENSORS_SUFFIX) and "/" not in one.key for one in store.list())
    return any(exists(store, name) for name in _OF_A_MODEL)
