"""``.metadata`` and the manifest that belongs to it, read as one though they are two files.

A save of the same id replaces the manifest first and ``.metadata`` after it: in between, and where it dies there, the
manifest is not that of the checkpoint.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from ray_dcp.errors import ObjectNotFoundError
from ray_dcp.format.manifest import Manifest, belongs_to, decode_facts, decode_manifest
from ray_dcp.format.names import MANIFEST, METADATA
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.store import Store, exists

_MAX_SWAPS = 3


def readings(store: Store, folder: str = "") -> Iterator[tuple[bytes, bytes | None]]:
    """Yield ``.metadata`` and the manifest beside it, None if it is missing; read anew while the caller asks, thrice.

    Whoever finds that they do not belong together asks again: a save may have replaced one between the two reads.
    Raises ``ObjectNotFoundError`` where nothing is committed.
    """
    for _ in range(_MAX_SWAPS):
        metadata = store.get(posixpath.join(folder, METADATA))
        try:
            manifest = store.get(posixpath.join(folder, MANIFEST))
        except ObjectNotFoundError:
            yield metadata, None
            return
        yield metadata, manifest


def read_committed(store: Store, folder: str = "") -> tuple[bytes, bytes | None]:
    """Return ``.metadata`` and its manifest, which is None where it is missing or belongs to another save.

    Raises ``ObjectNotFoundError`` where nothing is committed, and what decoding a damaged manifest raises.
    """
    metadata = b""
    for metadata, manifest in readings(store, folder):
        if manifest is None:
            break
        facts = decode_facts(manifest, file=join_url(store.url, posixpath.join(folder, MANIFEST)))
        if belongs_to(facts, metadata, file=join_url(store.url, posixpath.join(folder, METADATA))):
            return metadata, manifest
    return metadata, None


def is_committed(store: Store, folder: str = "") -> bool:
    """Whether ``folder`` of ``store`` holds a committed checkpoint."""
    return exists(store, key_of(folder, METADATA))


def open_manifest(store: Store) -> Manifest | None:
    """The manifest of the checkpoint at the root of ``store``.

    None where there is none, or where it belongs to another ``.metadata``: to a save that has not committed.
    Raises ``ObjectNotFoundError`` where nothing is committed.
    """
    _, content = read_committed(store)
    return None if content is None else decode_manifest(content, file=join_url(store.url, MANIFEST))


def url_of(store: Store, folder: str) -> str:
    """The place of a folder of ``store``; "" is its root."""
    return join_url(store.url, folder) if folder else store.url


def key_of(folder: str, name: str) -> str:
    """The key of a file in a folder of a store; "" is its root."""
    return f"{folder}/{name}" if folder else name
