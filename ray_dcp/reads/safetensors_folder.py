"""A folder of safetensors files as a checkpoint: DCP's metadata and a manifest, made from the files' headers.

The files may be those of Hugging Face's libraries (one file, or several with an index) or of torch's
``HuggingFaceStorageWriter``, whose headers may say where in the whole tensor a chunk lies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from ray_dcp.format.manifest import Entry, Manifest, are_counts, encode_manifest, metadata_digest
from ray_dcp.format.metadata_file import encode_metadata
from ray_dcp.format.safetensors_header import Header, has_dtype, parse_json_object, read_header
from ray_dcp.planning.disjoint import overlapping
from ray_dcp.planning.values.flat import NO_WORD
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.parallel import in_parallel
from ray_dcp.store.store import Store, StoredObject
from ray_dcp.torch_private import StorageInfo

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARDING = "DCP_SHARDING_INFO"
"""The key of torch's, among the header's texts, for the JSON that says where in its whole tensor each chunk starts."""
_OFFSETS = "saved_offsets"
_MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """What the files' headers say, as the ``.metadata`` and manifest that would be on disk."""

    metadata: bytes
    manifest: bytes


def find_safetensors(store: Store, only: str = "") -> SafetensorsFolder | None:
    """Read the headers of the safetensors files directly in ``store``; None where there are none.

    The files are those that the index names; without an index ``model.safetensors``, or else all safetensors files.
    With ``only`` it is that file alone. Raises ``CorruptCheckpointError`` where a header is wrong, where the index and
    the files differ in names, and where a tensor's chunks do not make up a whole one.
    """
    held = {one.key: one for one in store.list() if "/" not in one.key}
    index = "" if only else _index_of(store, held)
    if index:
        weight_map = _read_index(store, index)
        files = sorted(set(weight_map.values()))
    else:
        weight_map = {}
        files = [only] if only else _files_of(held)
        if not files:
            return None
    if absent := [file for file in files if file not in held]:
        names = sorted(name for name, file in weight_map.items() if file in absent)
        raise CorruptCheckpointError(
            f"{', '.join(absent)} is missing, which {index or 'the folder'} says holds {_few(names) or 'its tensors'}",
            file=join_url(store.url, absent[0]),
        )
    headers = dict(
        in_parallel(lambda file: _header_of(store, held[file]), files, max_at_once=_MAX_THREADS, in_order=True)
    )
    if index:
        _require_as_indexed(store, index, weight_map, headers)
    entries = [entry for file, header in headers.items() for entry in _entries(store, file, header)]
    metadata = encode_metadata(_metadata(store, entries))
    created = max((held[file].modified for file in files), default=0.0)
    manifest = Manifest(entries, 1, "", metadata_digest(metadata), created, versions={})
    return SafetensorsFolder(metadata, encode_manifest(manifest))


def _index_of(store: Store, held: Mapping[str, StoredObject]) -> str:
    """The name of the index that says which files belong together; "" where there is none."""
    found = sorted(key for key in held if key.endswith(INDEX_SUFFIX))
    if INDEX in found:
        return INDEX
    if len(found) > 1:
        raise CorruptCheckpointError(
            f"{', '.join(found)}: several models in one folder; move each to a folder of its own", file=store.url
        )
    return found[0] if found else ""


def _files_of(held: Mapping[str, StoredObject]) -> list[str]:
    return [ONE_FILE] if ONE_FILE in held else sorted(key for key in held if key.endswith(SUFFIX))


def _read_index(store: Store, index: str) -> dict[str, str]:
    file = join_url(store.url, index)
    weight_map = parse_json_object(store.get(index), what="the index", file=file).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpointError("the index has no weight_map", file=file)
    for name, key in weight_map.items():
        if not isinstance(key, str):
            raise CorruptCheckpointError(f"the index gives {key!r} as its file", file=file, fqn=name)
    return weight_map


def _require_as_indexed(store: Store, index: str, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    """Raise unless index and files name the same tensors, and the same file for each."""
    in_files = {(tensor.name, file) for file, header in headers.items() for tensor in header.tensors}
    if lacking := sorted(weight_map.items() - in_files):
        raise CorruptCheckpointError(
            f"the index names {_few([f'{name} in {file}' for name, file in lacking])}, which the files lack",
            file=join_url(store.url, index),
            fqn=lacking[0][0],
        )
    if unnamed := sorted(in_files - weight_map.items()):
        raise CorruptCheckpointError(
            f"the index lacks {_few([f'{name} in {file}' for name, file in unnamed])}, which the files hold",
            file=join_url(store.url, index),
            fqn=unnamed[0][0],
        )


def _header_of(store: Store, stored: StoredObject) -> Header:
    file = join_url(store.url, stored.key)

    def read(offset: int, nbytes: int) -> bytes:
        return store.get(stored.key, offset, nbytes)

    try:
        return read_header(read, stored.nbytes, file=file)
    except (ObjectTooShortError, ObjectNotFoundError) as error:
        raise CorruptCheckpointError("it has changed while it was read", file=file) from error


def _entries(store: Store, file: str, header: Header) -> list[Entry]:
    starts = _chunk_starts(store, file, header)
    return [
        Entry(
            fqn=tensor.name,
            offsets=starts.get(tensor.name, (0,) * len(tensor.shape)),
            sizes=tensor.shape,
            dtype=tensor.dtype,
            file=file,
            record_offset=tensor.offset,
            record_nbytes=tensor.nbytes,
            payload_offset=tensor.offset,
            payload_nbytes=tensor.nbytes,
            block_crcs=(),
            rank=0,
        )
        for tensor in header.tensors
    ]


def _chunk_starts(store: Store, file: str, header: Header) -> dict[str, tuple[int, ...]]:
    """The offsets of each tensor of the file in its whole tensor, by name; empty where the header does not say."""
    text = header.texts.get(_SHARDING)
    if text is None:
        return {}
    where = join_url(store.url, file)
    described = parse_json_object(text.encode(), what=f"its {_SHARDING}", file=where)
    starts = {}
    for tensor in header.tensors:
        chunk: Any = described.get(tensor.name)
        offsets: Any = chunk.get(_OFFSETS) if isinstance(chunk, dict) else None
        right = isinstance(offsets, list) and len(offsets) == len(tensor.shape)
        if not right or not are_counts(offsets):
            raise CorruptCheckpointError(f"its {_SHARDING} has the {_OFFSETS} {offsets!r}", file=where, fqn=tensor.name)
        starts[tensor.name] = tuple(offsets)
    return starts


def _metadata(store: Store, entries: Sequence[Entry]) -> Metadata:
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_name[entry.fqn].append(entry)
    return Metadata(
        state_dict_metadata={fqn: _whole(store, chunks) for fqn, chunks in by_name.items()},
        planner_data={fqn: (fqn,) for fqn in by_name},
        storage_data={
            MetadataIndex(entry.fqn, torch.Size(entry.offsets or ())): StorageInfo(
                entry.file, entry.record_offset, entry.record_nbytes
            )
            for entry in entries
        },
        storage_meta=StorageMeta(checkpoint_id=store.url),
        version=CURRENT_DCP_VERSION,
    )


def _whole(store: Store, chunks: Sequence[Entry]) -> TensorStorageMetadata:
    first = chunks[0]
    for chunk in chunks:
        if (chunk.dtype, len(chunk.sizes or ())) != (first.dtype, len(first.sizes or ())):
            raise CorruptCheckpointError(
                f"{chunk.dtype} of shape {chunk.sizes} here, {first.dtype} of shape {first.sizes} in {first.file}",
                file=join_url(store.url, chunk.file),
                fqn=chunk.fqn,
            )
    boxes = [(chunk.offsets or (), chunk.sizes or ()) for chunk in chunks]
    ends = [[start + length for start, length in zip(*box, strict=True)] for box in boxes]
    size = tuple(max(along) for along in zip(*ends, strict=True))
    _require_tiled(store, chunks, size)
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, first.dtype or "") if has_dtype(first.dtype or "") else NO_WORD),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


def _require_tiled(store: Store, chunks: Sequence[Entry], size: tuple[int, ...]) -> None:
    """Raise unless the chunks lie apart and leave no hole, so that the tensor has one value everywhere."""
    repeated = len({(chunk.offsets, chunk.sizes) for chunk in chunks}) < len(chunks)
    pair = next(overlapping([(chunk.offsets or (), chunk.sizes or ()) for chunk in chunks]), None)
    if repeated or pair is not None:
        held_twice = chunks[-1] if pair is None or repeated else chunks[pair[1]]
        files = ", ".join(sorted({chunk.file for chunk in chunks}))
        raise CorruptCheckpointError(
            f"more than one file holds it, or one part of it ({files}), and a folder is read as one model",
            file=join_url(store.url, held_twice.file),
            fqn=held_twice.fqn,
        )
    missing = math.prod(size) - sum(math.prod(chunk.sizes or ()) for chunk in chunks)
    if missing:
        raise CorruptCheckpointError(
            f"{missing} of {math.prod(size)} elements lie in no file: is one of the files missing?",
            file=store.url,
            fqn=chunks[0].fqn,
        )


def _few(names: Sequence[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
