"""How one record is read: which bytes, and what is done with them."""

from __future__ import annotations

import ctypes
import functools
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from ray_dcp.checksums import crc32
from ray_dcp.dcp_io.box import read_box
from ray_dcp.dcp_io.checkpoint_files import MISSING, CheckpointFiles
from ray_dcp.dcp_io.metadata_file import decode_python
from ray_dcp.dcp_io.read_tasks import Lane, ReadShape
from ray_dcp.dcp_io.stored_chunk import (
    Box,
    LargeRead,
    StoredChunk,
    is_direct,
    plain_rows,
    put_small,
    require_consistent,
)
from ray_dcp.dcp_io.torch_record import find_payload
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.layout import BLOCK_NBYTES
from ray_dcp.manifest import Entry
from ray_dcp.staging.host_pieces import tensor_memory
from ray_dcp.zip_record import LOCAL_SIGNATURE, NotARecordError

_FOLDER = 1 << 4
"""In the attributes of a zip entry."""


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_MAX_MOVED_NBYTES = 1 << 15


@dataclass(frozen=True, slots=True)
class WantedRecord:
    """A record and what a rank wants of it."""

    key: str
    offset: int
    """Of the bytes that hold the value: the payload where the manifest says where that is, else the whole record."""
    nbytes: int
    items: Sequence[ReadItem]
    info: _StorageInfo | None
    """Where torch wrote the checkpoint."""
    entry: Entry | None
    """Where the manifest says more."""

    @property
    def fqn(self) -> str:
        return self.items[0].storage_index.fqn


class RecordReads:
    """Of one checkpoint. ``tensors`` is what its metadata says of each name."""

    def __init__(self, files: CheckpointFiles, tensors: dict[str, Any], *, shape: ReadShape, unchecked: bool) -> None:
        self._files = files
        self._tensors = tensors
        self._shape = shape
        self._unchecked = unchecked

    def use_small(self, wanted: WantedRecord, targets: Sequence[torch.Tensor], content: memoryview) -> None:
        """Fill ``targets``, one for each item, from the bytes of a record that has been read whole."""
        if wanted.entry is not None and len(targets) == 1 and self._is_all_of(wanted.entry, targets[0]):
            self._put_all(wanted.entry, targets[0], content)
            return
        boxes = _boxes(wanted, targets)
        if wanted.entry is not None:
            chunk = self._chunk(wanted.entry, boxes)
            put_small(chunk, boxes, content)
            return
        found = self._payload_of_torch(wanted, lambda offset, nbytes: bytes(content[offset : offset + nbytes]))
        if found is None:
            self._load_with_torch(wanted, targets, bytes(content))
            return
        require_consistent(found, boxes)
        start = found.offset - wanted.offset
        put_small(found, boxes, content[start : start + found.nbytes])

    def large_read(self, wanted: WantedRecord, targets: Sequence[torch.Tensor]) -> Callable[[Lane], int]:
        """What fills ``targets`` from the blocks that hold them, and returns how many bytes it read."""
        if wanted.entry is None:
            return functools.partial(self._read_torch_record, wanted, targets)
        boxes = _boxes(wanted, targets)
        chunk = self._chunk(wanted.entry, boxes)
        direct = LargeRead.of(chunk, boxes, self._shape.unit_nbytes, self._shape.piece_nbytes)
        if direct is None:
            return functools.partial(self._read_boxes, wanted, chunk, boxes)
        return functools.partial(self._run, direct, wanted)

    def _run(self, direct: LargeRead, wanted: WantedRecord, lane: Lane) -> int:
        try:
            return direct.run(lane.file(self._files, wanted.key), lane.memory)
        except MISSING as error:
            chunk = direct.chunk
            raise self._files.damaged(error, wanted.key, wanted.fqn, chunk.offset, chunk.nbytes) from error

    def _read_boxes(self, wanted: WantedRecord, chunk: StoredChunk, boxes: Sequence[Box], _: Lane) -> int:
        get_verified = functools.partial(self._get_verified, wanted, chunk)
        return sum(read_box(get_verified, chunk, box) for box in boxes)

    def _read_torch_record(self, wanted: WantedRecord, targets: Sequence[torch.Tensor], lane: Lane) -> int:
        """Where the payload lies only the record itself says."""
        get = functools.partial(self._files.get, wanted.key, wanted.fqn)
        chunk = self._payload_of_torch(wanted, lambda offset, nbytes: get(wanted.offset + offset, nbytes))
        if chunk is not None:
            boxes = _boxes(wanted, targets)
            require_consistent(chunk, boxes)
            direct = LargeRead.of(chunk, boxes, self._shape.unit_nbytes, self._shape.piece_nbytes)
            if direct is not None:
                return self._run(direct, wanted, lane)
        content = get(wanted.offset, wanted.nbytes)
        self._load_with_torch(wanted, targets, content)
        return len(content)

    def passing(self, wanted: WantedRecord, targets: Sequence[torch.Tensor]) -> tuple[StoredChunk, list[Box]] | None:
        """Chunk and boxes, where bytes that pass in order can be put straight into ``targets``; else None."""
        if wanted.entry is None:
            return None
        boxes = _boxes(wanted, targets)
        chunk = self._chunk(wanted.entry, boxes)
        return (chunk, boxes) if all(_is_in_rows(chunk, box) for box in boxes) else None

    def read_blocks(self, entry: Entry, start: int, into: memoryview) -> None:
        """Fill ``into`` with what follows ``start`` in the payload of a tensor, checked; from block to block."""
        self._files.fill(entry.file, entry.fqn, entry.payload_offset + start, [into])
        self._as_chunk(entry, torch.uint8, (entry.payload_nbytes,)).verify(into, start)

    def hold_python(self, wanted: WantedRecord, held: list[bytes], content: memoryview) -> None:
        """Append the checked record of a Python object to ``held``."""
        entry = wanted.entry
        if entry is not None:
            value = bytes(content)
            if len(value) > BLOCK_NBYTES or self._unchecked or entry.block_crcs != (crc32(value),):
                self._as_chunk(entry, torch.uint8, (entry.payload_nbytes,)).verify(content)
            held.append(value)
            return
        record = _transformed(wanted.info, bytes(content))
        self._verify_zip(record, wanted)
        held.append(record)

    def _is_all_of(self, entry: Entry, target: torch.Tensor) -> bool:
        """Whether ``target`` takes a small chunk as it is: what most small reads are for."""
        return (
            target.shape == entry.sizes
            and target.nbytes == entry.payload_nbytes
            and len(entry.block_crcs) == 1
            and not self._unchecked
            and _DTYPES.get(entry.dtype or "") is target.dtype
            and is_direct(target, target.dtype)
        )

    def _put_all(self, entry: Entry, target: torch.Tensor, content: memoryview) -> None:
        if crc32(content) != entry.block_crcs[0]:
            raise self._as_chunk(entry, target.dtype, target.shape).damaged(0, entry.payload_nbytes)
        if len(content) <= _MAX_MOVED_NBYTES:
            # Several times as quick as making a view of such a small tensor.
            ctypes.memmove(target.data_ptr(), bytes(content), len(content))
        else:
            tensor_memory(target)[:] = content

    def _chunk(self, entry: Entry, boxes: Sequence[Box]) -> StoredChunk:
        dtype = getattr(torch, entry.dtype or "", None)
        if not isinstance(dtype, torch.dtype):
            file = self._files.shown(entry.file)
            raise CorruptCheckpointError(f"the manifest gives it the dtype {entry.dtype!r}", file=file, fqn=entry.fqn)
        chunk = self._as_chunk(entry, dtype, tuple(entry.sizes or ()))
        require_consistent(chunk, boxes)
        return chunk

    def _as_chunk(self, entry: Entry, dtype: torch.dtype, sizes: tuple[int, ...]) -> StoredChunk:
        crcs = None if self._unchecked else entry.block_crcs
        file = self._files.shown(entry.file)
        return StoredChunk(entry.fqn, file, entry.payload_offset, entry.payload_nbytes, dtype, sizes, crcs)

    def _payload_of_torch(self, wanted: WantedRecord, read: Callable[[int, int], bytes]) -> StoredChunk | None:
        described = self._tensors.get(wanted.fqn)
        if (wanted.info and wanted.info.transform_descriptors) or not isinstance(described, TensorStorageMetadata):
            return None
        try:
            sizes = _chunk_sizes(described, wanted.items[0].storage_index)
            found = find_payload(read, wanted.nbytes, described.properties.dtype, sizes)
        except NotARecordError as error:
            raise self._damaged(wanted, str(error)) from error
        if found is None:
            return None
        return StoredChunk(
            wanted.fqn, self._files.shown(wanted.key), wanted.offset + found.offset, found.nbytes,
            described.properties.dtype, sizes, None, found.crc,
        )  # fmt: skip

    def _get_verified(self, wanted: WantedRecord, chunk: StoredChunk, start: int, nbytes: int) -> bytes:
        content = self._files.get(wanted.key, chunk.fqn, chunk.offset + start, nbytes)
        chunk.verify(memoryview(content), start)
        return content

    def _load_with_torch(self, wanted: WantedRecord, targets: Sequence[torch.Tensor], content: bytes) -> None:
        """For what torch alone can read: by the record's own zip CRCs, with its restricted unpickler."""
        file = self._files.shown(wanted.key)
        record = _transformed(wanted.info, content)
        self._verify_zip(record, wanted)
        loaded = decode_python(io.BytesIO(record), file=file, fqn=wanted.fqn, trusted=False)
        if not isinstance(loaded, torch.Tensor):
            raise CorruptCheckpointError(
                f"holds a {type(loaded).__name__} instead of a tensor", file=file, fqn=wanted.fqn
            )
        described = self._tensors.get(wanted.fqn)
        if isinstance(described, TensorStorageMetadata):
            sizes = _chunk_sizes(described, wanted.items[0].storage_index)
            if tuple(loaded.shape) != sizes:  # copying would stretch a dimension of size 1
                raise CorruptCheckpointError(
                    f"holds a tensor of shape {tuple(loaded.shape)}, the metadata says {sizes}",
                    file=file,
                    fqn=wanted.fqn,
                )
        for item, target in zip(wanted.items, targets, strict=True):
            target.copy_(narrow_tensor_by_index(loaded, item.storage_offsets, item.lengths))

    def _verify_zip(self, content: bytes, wanted: WantedRecord) -> None:
        """Raise when a zip entry fails its CRC.

        Old pickles that are no zip file have none to check, nor has what torch wrote with its checksums turned off
        (``torch.serialization.set_crc32_options(False)``): it then puts 0 for all of them.
        """
        try:
            if not zipfile.is_zipfile(io.BytesIO(content)) and not content.startswith(LOCAL_SIGNATURE):
                return
            with zipfile.ZipFile(io.BytesIO(content)) as record:
                has_checksums = any(stored.CRC for stored in record.infolist())
                damaged = record.testzip() if has_checksums else None
                # Of what is marked as a folder torch reads nothing, and unpickles whatever its memory held before.
                damaged = damaged or next((e.filename for e in record.infolist() if e.external_attr & _FOLDER), None)
        except Exception as error:  # noqa: BLE001 - a damaged method leads into zlib, lzma or bz2, each with its own
            damaged = str(error) or type(error).__name__
        if damaged:
            raise self._damaged(wanted, damaged)

    def _damaged(self, wanted: WantedRecord, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"stored bytes fail their checksum ({why})",
            file=self._files.shown(wanted.key),
            fqn=wanted.fqn,
            offset=wanted.offset,
            nbytes=wanted.nbytes,
        )


def _boxes(wanted: WantedRecord, targets: Sequence[torch.Tensor]) -> list[Box]:
    return [Box(tuple(item.storage_offsets), target) for item, target in zip(wanted.items, targets, strict=True)]


def _is_in_rows(chunk: StoredChunk, box: Box) -> bool:
    target = box.target
    in_order = target.layout == torch.strided and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    return not target.numel() or (in_order and plain_rows(chunk, box) is not None)


def _chunk_sizes(described: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...]:
    """Of the stored chunk that ``index`` names; its position is a hint."""
    if index.index is not None and index.index < len(described.chunks):
        chunk = described.chunks[index.index]
        if chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    return next((tuple(chunk.sizes) for chunk in described.chunks if chunk.offsets == index.offset), ())


def _transformed(info: _StorageInfo | None, content: bytes) -> bytes:
    """``content`` as it was before the writer's stream transforms (torch's ``_extensions``), if any."""
    if info is None or not info.transform_descriptors:
        return content
    stream: Any = io.BytesIO(content)
    for extension in ExtensionRegistry().from_descriptor_list(info.transform_descriptors):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return bytes(stream.read())
