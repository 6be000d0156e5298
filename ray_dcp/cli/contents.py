"""What is in one checkpoint, name by name: from its manifest, or from ``.metadata`` where torch wrote it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.catalog.committed import open_manifest
from ray_dcp.catalog.facts import CheckpointInfo, describe, is_safetensors
from ray_dcp.catalog.pointer import resolve_checkpoint_id
from ray_dcp.errors import CheckpointNotFoundError
from ray_dcp.format.manifest import DifferingReplicas, Entry, Manifest, decode_manifest, dtype_name
from ray_dcp.format.names import METADATA, rank_of_shard_file
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor over all its chunks."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    nbytes: int
    ranks: tuple[int, ...]
    """The ranks that wrote a chunk; empty where the files do not say."""


@dataclass(frozen=True, slots=True)
class StoredPythonObject:
    """One Python object."""

    fqn: str
    nbytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Everything about one checkpoint that can be told without reading a shard file."""

    checkpoint: CheckpointInfo
    tensors: Sequence[StoredTensor]
    """The tensors, sorted by name."""
    objects: Sequence[StoredPythonObject]
    """The Python objects, sorted by name."""
    attempt: str | None = None
    format_version: int | None = None
    """Version of the manifest's format; None where there is no manifest."""
    versions: Mapping[str, str] = field(default_factory=dict)
    differing: Sequence[DifferingReplicas] = ()
    """Names under which ranks held different values."""
    saved_as_step: int | None = None
    """The step that the manifest names, whatever the folder is called now."""
    files: str = "dcp"
    """The kind of its files: ``dcp`` or ``safetensors``."""


def read_contents(checkpoint_id: str) -> CheckpointContents:
    """The contents of a committed checkpoint, a pointer followed, or of a folder of safetensors files."""
    try:
        info = describe(checkpoint_id)
    except CheckpointNotFoundError:
        if not is_safetensors(resolve_checkpoint_id(checkpoint_id)):
            raise  # for everything else an error need not wait for torch
        return _from_safetensors(checkpoint_id)
    store = open_store(info.checkpoint_id)
    manifest = open_manifest(store)
    return _from_metadata(info, store) if manifest is None else _from_manifest(info, manifest)


def _from_manifest(info: CheckpointInfo, manifest: Manifest) -> CheckpointContents:
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in manifest.entries:
        by_name[entry.fqn].append(entry)
    named = sorted(by_name.items())
    return CheckpointContents(
        checkpoint=info,
        tensors=[_tensor(fqn, chunks) for fqn, chunks in named if chunks[0].dtype is not None],
        objects=[
            StoredPythonObject(fqn, sum(e.record_nbytes for e in found), _ranks(e.rank for e in found))
            for fqn, found in named
            if found[0].dtype is None
        ],
        attempt=manifest.attempt,
        saved_as_step=manifest.step,
        format_version=manifest.format_version,
        versions=manifest.versions,
        differing=manifest.differing,
    )


def _tensor(fqn: str, chunks: Sequence[Entry]) -> StoredTensor:
    # A chunk that is the whole tensor need not say that it starts at 0.
    ends = [[o + s for o, s in itertools.zip_longest(e.offsets or (), e.sizes or (), fillvalue=0)] for e in chunks]
    return StoredTensor(
        fqn=fqn,
        shape=tuple(max(along) for along in zip(*ends, strict=True)),
        dtype=chunks[0].dtype or "",
        num_chunks=len(chunks),
        nbytes=sum(e.payload_nbytes for e in chunks),
        ranks=_ranks(e.rank for e in chunks),
    )


def _from_metadata(info: CheckpointInfo, store: Store) -> CheckpointContents:
    # Only here and below is torch needed, and it takes seconds to import: the command line starts without it.
    from ray_dcp.format.metadata_file import decode_metadata

    metadata = decode_metadata(store.get(METADATA), file=join_url(store.url, METADATA))
    stored: dict[str, list[Any]] = defaultdict(list)
    for index, place in (metadata.storage_data or {}).items():
        stored[index.fqn].append(place)
    tensors, objects = [], []
    of_names: Mapping[str, Any] = metadata.state_dict_metadata
    for fqn, described in sorted(of_names.items()):
        ranks = _ranks(rank_of_shard_file(str(place.relative_path)) for place in stored[fqn])
        if hasattr(described, "chunks"):
            dtype, shape = described.properties.dtype, tuple(described.size)
            name, nbytes = dtype_name(dtype), math.prod(shape) * dtype.itemsize
            tensors.append(StoredTensor(fqn, shape, name, len(described.chunks), nbytes, ranks))
        else:
            objects.append(StoredPythonObject(fqn, sum(p.length for p in stored[fqn]), ranks))
    return CheckpointContents(info, tensors, objects)


def _from_safetensors(checkpoint_id: str) -> CheckpointContents:
    """The contents of safetensors files. Raises ``CheckpointNotFoundError`` where there are no such files."""
    from ray_dcp.reads.checkpoint import open_checkpoint

    opened = open_checkpoint(checkpoint_id)
    assert opened.manifest is not None  # it is made from the headers
    manifest = decode_manifest(opened.manifest, file=opened.checkpoint_id)
    info = CheckpointInfo(None, opened.checkpoint_id, manifest.nbytes, None, manifest.created)
    found = _from_manifest(info, manifest)
    without_ranks = [dataclasses.replace(tensor, ranks=()) for tensor in found.tensors]
    return CheckpointContents(info, without_ranks, found.objects, files="safetensors")


def _ranks(ranks: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({rank for rank in ranks if rank is not None}))
