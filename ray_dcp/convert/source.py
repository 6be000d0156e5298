"""What ``convert`` reads from: the values of a checkpoint, of safetensors files or of a ``torch.save`` file.

They are described without being read, and read one at a time.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from ray_dcp.convert.torch_save_reader import TorchFile, empty_tensor, is_torch_file
from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError
from ray_dcp.format.manifest import dtype_name
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.format.names import METADATA
from ray_dcp.planning.template.template_planner import TemplatePlanner
from ray_dcp.planning.values.containers import MAX_INDEX, Containers, optimizer_containers
from ray_dcp.reads.checkpoint import open_checkpoint
from ray_dcp.reads.reader import StoreReader
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import join_url, split_url
from ray_dcp.store.open import open_store
from ray_dcp.wording import first_lines
from ray_dcp.write.tensor_record import MAX_TINY_NBYTES


@dataclass(frozen=True, slots=True)
class SourceValue:
    """One tensor, or one Python value (``dtype`` None)."""

    name: str
    """The name as DCP has it: the keys that lead to it, joined by dots."""
    path: tuple[str | int, ...]
    """The keys that lead to it in the nested state dict."""
    dtype: str | None
    """Name of the dtype without the prefix ``torch.``; None for a Python value."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the tensor, or of a Python value as it is stored; 0 where that is not known."""
    memory: Hashable = None
    """Equal for tensors that were one memory when they were saved; None where that is not known."""


class Source(Protocol):
    """A state dict that is stored somewhere. Used by one thread, from ``open_source`` on."""

    location: str
    """The place that was asked for, absolute."""
    folder: str
    """The folder that its files lie in, a pointer followed."""
    key: str
    """Key of the file in the folder, where the source is one file; else empty."""
    kind: str
    """Format of the source: ``dcp``, ``safetensors`` or ``torch``."""

    @property
    def values(self) -> Sequence[SourceValue]:
        """Everything that is stored, in its order there."""
        ...

    @property
    def containers(self) -> Containers:
        """What the names do not tell of the state dict that was saved."""
        ...

    def read_tensor(self, value: SourceValue) -> torch.Tensor:
        """The whole tensor, on the CPU, contiguous, in a storage of its own; checked where there are checksums."""
        ...

    def read_python(self, value: SourceValue) -> Any:
        """The Python value. Raises ``UnsafeDataError`` for one whose loading could run code."""
        ...

    def read_pickled(self, value: SourceValue) -> bytes:
        """The Python value as ``torch.save`` writes it."""
        ...


def open_source(location: str | os.PathLike[str]) -> Source:
    """Find out what lies at ``location`` and read its names; a pointer left for Ray Train is followed.

    Raises ``CheckpointNotFoundError`` saying what is there instead, ``UnsafeDataError`` and ``CorruptCheckpointError``.
    """
    where = absolute(location, setting="SOURCE")
    folder, name = split_url(where)
    with suppress(ObjectNotFoundError):
        if folder and name and is_torch_file(open_store(folder), name):
            return TorchSource(where, TorchFile(open_store(folder), name), folder, name)
    return CheckpointSource(where)


class CheckpointSource:
    """What ``StoreReader`` reads: checkpoints of ray_dcp and of torch, and safetensors files."""

    def __init__(self, location: str) -> None:
        opened = open_checkpoint(location)
        self.location = location
        self.folder = opened.checkpoint_id
        folder, key = split_url(location)
        self.key = key if opened.unchecked and folder == opened.checkpoint_id else ""
        self.kind = "safetensors" if opened.unchecked else "dcp"
        self._reader = StoreReader(opened.checkpoint_id)
        self._reader.adopt(opened)
        self._file = join_url(opened.checkpoint_id, METADATA)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)

    @property
    def values(self) -> Sequence[SourceValue]:
        paths = self._metadata.planner_data if isinstance(self._metadata.planner_data, Mapping) else {}
        stored: dict[str, int] = {}
        records: dict[str, set[Hashable]] = {}
        for index, place in (self._metadata.storage_data or {}).items():
            stored[index.fqn] = stored.get(index.fqn, 0) + getattr(place, "length", 0)
            record = index.offset, *(getattr(place, name, None) for name in ("relative_path", "offset", "length"))
            records.setdefault(index.fqn, set()).add(record)
        return [
            _value(fqn, _path(fqn, paths.get(fqn)), described, stored.get(fqn, 0), records.get(fqn, ()))
            for fqn, described in self._metadata.state_dict_metadata.items()
        ]

    @property
    def containers(self) -> Containers:
        known = self._reader.containers
        return known if known is not None else optimizer_containers(value.path for value in self.values)

    def read_tensor(self, value: SourceValue) -> torch.Tensor:
        target = empty_tensor(value.shape, getattr(torch, value.dtype or ""))
        self._fill({value.name: target}, raw=False)
        return target

    def read_python(self, value: SourceValue) -> Any:
        filled = {value.name: None}
        self._fill(filled, raw=False)
        return filled[value.name]

    def read_pickled(self, value: SourceValue) -> bytes:
        filled: dict[str, Any] = {value.name: None}
        self._fill(filled, raw=True)
        return bytes(filled[value.name])

    def _fill(self, state: dict[str, Any], *, raw: bool) -> None:
        """Read the one value that ``state`` names: a planner that knows all names would go through them all."""
        (name,) = state

        def load_python(content: io.BytesIO, fqn: str) -> Any:
            if raw:
                return content.getvalue()
            return decode_python(content, file=self._file, fqn=fqn, trusted=False)

        planner = TemplatePlanner(load_python=load_python, flatten_state_dict=False)
        only = Metadata({name: self._metadata.state_dict_metadata[name]}, version=self._metadata.version)
        planner.set_up_planner(state, only, True)
        plan = planner.create_local_plan()
        if problems := planner.check().problems:
            raise CorruptCheckpointError("; ".join(first_lines(problems)), file=self._file)
        plan = self._reader.prepare_local_plan(planner.finish_plan(plan))
        self._reader.read_data(plan, planner).wait()


class TorchSource:
    """A ``torch.save`` file that holds a dict."""

    kind = "torch"

    def __init__(self, location: str, file: TorchFile, folder: str, key: str) -> None:
        self.location = location
        self.folder = folder
        self.key = key
        self._file = file

    @property
    def values(self) -> Sequence[SourceValue]:
        return [self._describe(name) for name in self._file.leaves]

    @property
    def containers(self) -> Containers:
        return self._file.containers

    def read_tensor(self, value: SourceValue) -> torch.Tensor:
        return self._file.read_tensor(value.name)

    def read_python(self, value: SourceValue) -> Any:
        return self._file.read_python(value.name)

    def read_pickled(self, value: SourceValue) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.read_python(value), buffer)
        return buffer.getvalue()

    def _describe(self, name: str) -> SourceValue:
        leaf, path = self._file.leaves[name], self._file.paths[name]
        if not isinstance(leaf, torch.Tensor):
            return SourceValue(name, path, None, (), 0)
        return SourceValue(name, path, dtype_name(leaf.dtype), tuple(leaf.shape), leaf.numel() * leaf.dtype.itemsize)


def _value(
    fqn: str,
    path: tuple[str | int, ...],
    described: TensorStorageMetadata | BytesStorageMetadata,
    stored_nbytes: int,
    records: Collection[Hashable],
) -> SourceValue:
    if isinstance(described, BytesStorageMetadata):
        return SourceValue(fqn, path, None, (), stored_nbytes)
    dtype, shape = described.properties.dtype, tuple(described.size)
    # Tiny tensors share a record where they are equal, whether or not they were one memory.
    nbytes_of_chunks = [math.prod(chunk.sizes) * dtype.itemsize for chunk in described.chunks]
    tells = bool(records) and min(nbytes_of_chunks, default=0) > MAX_TINY_NBYTES
    memory = (frozenset(records), dtype, shape) if tells else None
    return SourceValue(fqn, path, dtype_name(dtype), shape, math.prod(shape) * dtype.itemsize, memory)


def _path(fqn: str, planned: Any) -> tuple[str | int, ...]:
    """The keys that lead to ``fqn`` in the saved state dict; at the top where the checkpoint does not say, or not well.

    A list is as long as its largest index, so that one is not believed without a limit.
    """
    well = isinstance(planned, tuple) and planned and isinstance(planned[0], str)
    if not well or not all(type(key) is str or (type(key) is int and 0 <= key < MAX_INDEX) for key in planned):
        return (fqn,)
    return planned if ".".join(map(str, planned)) == fqn else (fqn,)
