"""Checkpoints of both writers, and what can happen to their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.format.manifest import Entry, decode_manifest
from ray_dcp.format.metadata_file import decode_metadata
from ray_dcp.format.names import MANIFEST, METADATA, SHARD_SUFFIX
from ray_dcp.format.zip_record import PAYLOAD, read_entries
from ray_dcp.store.local import LocalStore
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store


def state():
    return {
        "model": {"w": torch.arange(40, dtype=torch.bfloat16).reshape(8, 5), "b": torch.arange(3.0)},
        "parts": dcp.LocalShards((6,), {(0,): torch.arange(3.0), (3,): torch.arange(3.0, 6.0)}),
        "names": ["a", ("b", 1)],
        "step": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }


def save_ours(place, values=None) -> Store:
    dcp.save(values or state(), checkpoint_id=str(place), no_dist=True)
    return open_store(place)


def save_torchs(place, values=None) -> Store:
    """What torch's own writer makes of it: on a local folder, and copied to where else it shall be."""
    torch_dcp.save(values or state(), checkpoint_id=str(place), no_dist=True)
    return open_store(place)


WRITERS = {"ours": save_ours, "torchs": save_torchs}


def shard_of(store: Store) -> str:
    (key,) = [one.key for one in store.list() if one.key.endswith(SHARD_SUFFIX)]
    return key


def entries_of(store: Store) -> list[Entry]:
    manifest = decode_manifest(store.get(MANIFEST), file=MANIFEST)
    return sorted(manifest.entries, key=lambda entry: entry.record_offset)


@dataclass(frozen=True)
class Record:
    """Where a record of either writer lies."""

    fqn: str
    offsets: tuple[int, ...] | None
    start: int
    end: int


def records_of(store: Store) -> list[Record]:
    """In the order of the one shard file."""
    metadata = decode_metadata(store.get(METADATA), file=METADATA)
    found = [
        Record(index.fqn, None if index.offset is None else tuple(index.offset), info.offset, info.offset + info.length)
        for index, info in metadata.storage_data.items()
    ]
    return sorted(found, key=lambda record: (record.start, record.end))


def regions_of(store: Store) -> dict[str, int]:
    """A byte of every kind that a shard file has, by what it is and whose."""
    content = store.get(shard_of(store))
    places = {}
    begin = end = 0
    for record in records_of(store):
        cut = content[record.start : record.end]
        entries = read_entries(lambda offset, nbytes, cut=cut: cut[offset : offset + nbytes], len(cut))
        if record.start > end:
            places[f"padding in front of {record.fqn}"] = record.start - 1
        # Behind the records before it in its row.
        places[f"first byte of {record.fqn} {record.offsets}"] = max(record.start, end)
        places[f"last byte of {record.fqn} {record.offsets}"] = record.end - 1
        for entry in entries.values():
            if record.start == begin and end and entry.name != PAYLOAD:
                continue  # that of the first in its row
            if entry.nbytes:
                places[f"{entry.name} of {record.fqn} {record.offsets}"] = record.start + entry.offset
            places[f"header of {entry.name} of {record.fqn} {record.offsets}"] = record.start + entry.offset - 1
        places[f"directory of {record.fqn} {record.offsets}"] = record.start + cut.rindex(b"PK\x01\x02") + 16
        begin, end = record.start, record.end
    return places


@contextmanager
def changed(store: Store, key: str, content: bytes | None) -> Iterator[None]:
    """Within the block the object has this content; None: it is gone."""
    before = store.get(key)
    if content is None:
        store.delete(key)
    else:
        _put(store, key, content)
    try:
        yield
    finally:
        _put(store, key, before)


def _put(store: Store, key: str, content: bytes) -> None:
    if isinstance(store, LocalStore):
        Path(store.url, key).write_bytes(content)  # without waiting for the disk
    else:
        store.put(key, content)


@contextmanager
def flipped(store: Store, key: str, *places: int, bit: int = 0) -> Iterator[None]:
    """Within the block one bit of each of these bytes is another."""
    content = bytearray(store.get(key))
    for place in places:
        content[place] ^= 1 << bit
    with changed(store, key, bytes(content)):
        yield
