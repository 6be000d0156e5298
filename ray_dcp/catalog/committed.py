"""``.metadata`` and the manifest that belongs to it, read as one though they are two files.

A save of the same id replaces the manifest first and ``.metadata`` after it: in between, and where it dies there, the
manifest is not that of the checkpoint.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from ray_dcp.errors import ObjectNotFoundError
from ray_dcp.format.manifest import belongs_to, decode_facts
from ray_dcp.format.names import MANIFEST, METADATA
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.store import Store

_MAX_SWAPS = 3


def readings(store: Store, folder: str = "") -> Iterator[tuple[bytes, bytes | None]]:
    """Yield ``.metadata`` and the manifest beside it, None where there is none; anew while the caller asks, thrice.

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
    """Return ``.metadata`` and its manifest; None for that where there is none, or that of another save only.

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
