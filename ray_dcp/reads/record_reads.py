"""Reads one record: decides which bytes, and what is done with them."""

from __future__ import annotations

import ctypes
import functools
import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.checksums import Check, crc32
from ray_dcp.format.manifest import Entry, EntryTable
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.torch_record import find_payload
from ray_dcp.format.zip_record import LOCAL_SIGNATURE, NotARecordError
from ray_dcp.reads.checkpoint_files import MISSING, CheckpointFiles
from ray_dcp.reads.engine import Lane
from ray_dcp.reads.fill import (
    TORCH_DTYPES,
    LargeRead,
    box_of,
    damaged,
    is_direct,
    put_small,
    require_consistent,
    require_right,
)
from ray_dcp.reads.plan.record_read import Box, RecordRead, read_of_entry
from ray_dcp.reads.plan.shape import ReadShape
from ray_dcp.reads.wanted import WantedRecord
from ray_dcp.torch_private import ExtensionRegistry, StorageInfo, StreamTransformExtension, narrow_tensor_by_index

_FOLDER = 1 << 4
"""The bit in a zip entry's attributes that marks a folder."""


class RecordReads:
    """The reads of the records of one checkpoint. ``tensors`` is what its metadata says of each name."""

    def __init__(self, files: CheckpointFiles, tensors: dict[str, Any], *, shape: ReadShape, unchecked: bool) -> None:
        self._files = files
        self._tensors = tensors
        self._shape = shape
        self._unchecked = unchecked

    def use_run(
        self,
        run: Sequence[WantedRecord],
        targets_of: Sequence[Sequence[torch.Tensor] | None],
        held: memoryview,
        address: int,
    ) -> list[bytes]:
        """Fill the targets of each record from ``held``, the run's bytes, which lie at ``address``.

        A record has one target for each of its items; None stands for the targets of a Python object. Returns the
        checked records of the Python objects, in the order of the run.
        """
        start = run[0].offset
        python = []
        for record, targets in zip(run, targets_of, strict=True):
            at, table = record.offset - start, record.table
            content = held[at : at + record.nbytes]
            if targets is None:
                python.append(self._checked_python(record, content))
            elif table is None or not self._is_all_of(record, table, targets):
                self._use_small(record, targets, content)
            elif crc32(content) == table.block_crcs[record.number][0]:
                # Several times as quick as making a view of such a small tensor.
                ctypes.memmove(targets[0].data_ptr(), address + at, record.nbytes)
            else:
                entry, shown = table[record.number], self._files.shown(record.key)
                raise damaged(self.of_entry(entry, ()), shown, 0, record.nbytes)
        return python

    def _is_all_of(self, wanted: WantedRecord, table: EntryTable, targets: Sequence[torch.Tensor]) -> bool:
        """Whether the only target takes a small chunk whole, as it is stored: most small reads are for such ones."""
        number, target = wanted.number, targets[0]
        return (
            len(targets) == 1
            and target.shape == table.sizes[number]
            and target.nbytes == wanted.nbytes
            and len(table.block_crcs[number]) == 1
            and not self._unchecked
            and TORCH_DTYPES.get(table.dtypes[number] or "") is target.dtype
            and is_direct(target, target.dtype)
        )

    def _use_small(self, wanted: WantedRecord, targets: Sequence[torch.Tensor], content: memoryview) -> None:
        if wanted.table is not None:
            put_small(
                self._read_of(wanted.table[wanted.number], wanted, targets),
                self._files.shown(wanted.key),
                targets,
                content,
            )
            return
        found = self._of_torch(wanted, targets, lambda offset, nbytes: bytes(content[offset : offset + nbytes]))
        if found is None:
            self._load_with_torch(wanted, targets, bytes(content))
            return
        start = found.offset - wanted.offset
        put_small(found, self._files.shown(wanted.key), targets, content[start : start + found.nbytes])

    def large_read(self, wanted: WantedRecord, targets: Sequence[torch.Tensor]) -> Callable[[Lane], int]:
        """A function that fills ``targets`` from the blocks that hold them, and returns how many bytes it read."""
        if wanted.table is None:
            return functools.partial(self._read_torch_record, wanted, targets)
        return self._prepared(self._read_of(wanted.table[wanted.number], wanted, targets), targets)

    def _prepared(self, read: RecordRead, targets: Sequence[torch.Tensor]) -> Callable[[Lane], int]:
        return functools.partial(self._run, LargeRead(read, targets, self._shape, self._files.shown(read.key)))

    def _run(self, large: LargeRead, lane: Lane) -> int:
        read = large.read
        try:
            fill = lane.file(self._files, read.key)
            return self._files.checked(read.key, lambda: large.run(fill, lane.memory))
        except MISSING as error:
            raise self._files.damaged(error, read.key, read.fqn, read.offset, read.nbytes) from error

    def _read_torch_record(self, wanted: WantedRecord, targets: Sequence[torch.Tensor], lane: Lane) -> int:
        """Read a record of torch's: only the record itself says where its payload lies."""
        get = functools.partial(self._files.get, wanted.key, wanted.fqn)
        read = self._of_torch(wanted, targets, lambda offset, nbytes: get(wanted.offset + offset, nbytes))
        if read is not None and not read.in_pieces:
            return self._prepared(read, targets)(lane)
        content = get(wanted.offset, wanted.nbytes)
        self._load_with_torch(wanted, targets, content)
        return len(content)

    def is_near(self, wanted: WantedRecord) -> bool:
        """Whether this rank has the record at hand, and needs nobody to read it for it."""
        return self._files.is_near(wanted.key)

    def passing(self, wanted: WantedRecord, targets: Sequence[torch.Tensor]) -> RecordRead | None:
        """The read of a record whose bytes can be put into ``targets`` as they pass in order, or None."""
        if wanted.table is None:
            return None
        read = self._read_of(wanted.table[wanted.number], wanted, targets)
        in_rows = all(
            box.is_empty or (_is_in_order(target) and read.rows(box) is not None)
            for box, target in zip(read.boxes, targets, strict=True)
        )
        return read if in_rows else None

    def read_blocks(self, read: RecordRead, start: int, into: memoryview, lane: Lane) -> None:
        """Fill ``into`` with the bytes from ``start`` on of a tensor's payload, and check them; from block to block.

        It is for records that are read for other ranks, too: those come from the store.
        """
        try:
            lane.file(self._files, read.key)(read.offset + start, [into])
        except MISSING as error:
            raise self._files.damaged(error, read.key, read.fqn, read.offset + start, len(into)) from error
        require_right(read, self._files.shown(read.key), into, start)

    def _checked_python(self, wanted: WantedRecord, content: memoryview) -> bytes:
        """The record of a Python object as it was written, checked."""
        record, table = bytes(content), wanted.table
        if table is None:
            record = _transformed(wanted.info, record)
            self._verify_zip(record, wanted)
        elif len(record) > BLOCK_NBYTES or self._unchecked or table.block_crcs[wanted.number] != (crc32(record),):
            entry = table[wanted.number]
            require_right(self.of_entry(entry, ()), self._files.shown(entry.file), content)
        return record

    def _read_of(self, entry: Entry, wanted: WantedRecord, targets: Sequence[torch.Tensor]) -> RecordRead:
        """The read of a tensor that the manifest describes. Raises where that does not fit the metadata."""
        dtype = TORCH_DTYPES.get(entry.dtype or "")
        if dtype is None:
            file = self._files.shown(entry.file)
            raise CorruptCheckpointError(f"the manifest gives it the dtype {entry.dtype!r}", file=file, fqn=entry.fqn)
        read = self.of_entry(entry, _boxes(wanted, targets, dtype))
        require_consistent(read, self._files.shown(entry.file))
        return read

    def of_entry(self, entry: Entry, boxes: tuple[Box, ...]) -> RecordRead:
        """The read for ``boxes`` of a tensor, with what checks it; without boxes, it serves to check whole blocks."""
        return read_of_entry(entry, boxes, unchecked=self._unchecked)

    def _of_torch(
        self, wanted: WantedRecord, targets: Sequence[torch.Tensor], get: Callable[[int, int], bytes]
    ) -> RecordRead | None:
        """The read of a tensor in a record of torch's; None where only torch can read it."""
        described = self._tensors.get(wanted.fqn)
        if (wanted.info and wanted.info.transform_descriptors) or not isinstance(described, TensorStorageMetadata):
            return None
        dtype = described.properties.dtype
        try:
            sizes = _chunk_sizes(described, wanted.items[0].storage_index)
            found = find_payload(get, wanted.nbytes, dtype, sizes)
        except NotARecordError as error:
            raise self._damaged(wanted, str(error)) from error
        if found is None:
            return None
        check = Check(found.nbytes, None) if found.crc is None else Check.of_whole(found.nbytes, found.crc)
        offset, name = wanted.offset + found.offset, str(dtype).removeprefix("torch.")
        boxes = _boxes(wanted, targets, dtype)
        read = RecordRead(wanted.key, wanted.fqn, offset, found.nbytes, check, name, sizes, boxes)
        require_consistent(read, self._files.shown(wanted.key))
        return read

    def _load_with_torch(self, wanted: WantedRecord, targets: Sequence[torch.Tensor], content: bytes) -> None:
        """Fill ``targets`` from a record that only torch can read.

        The record is checked by its own zip CRCs, and loaded with torch's restricted unpickler.
        """
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
        """Raise ``CorruptCheckpointError`` when a zip entry fails its CRC.

        Old pickles that are not zip files have no CRC to check. Nor has what torch wrote with its checksums turned off
        (``torch.serialization.set_crc32_options(False)``): it then puts 0 for all of them.
        """
        try:
            if not zipfile.is_zipfile(io.BytesIO(content)) and not content.startswith(LOCAL_SIGNATURE):
                return
            with zipfile.ZipFile(io.BytesIO(content)) as record:
                has_checksums = any(stored.CRC for stored in record.infolist())
                damaged = record.testzip() if has_checksums else None
                # torch reads nothing of an entry that is marked as a folder, and unpickles what its memory held before.
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


def _boxes(wanted: WantedRecord, targets: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[Box, ...]:
    return tuple(
        [box_of(item.storage_offsets, target, dtype) for item, target in zip(wanted.items, targets, strict=True)]
    )


def _is_in_order(target: torch.Tensor) -> bool:
    return target.layout == torch.strided and target.is_contiguous() and not (target.is_conj() or target.is_neg())


def _chunk_sizes(described: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...]:
    """The shape of the stored chunk that ``index`` names, whose position is only a hint; empty where there is none."""
    if index.index is not None and index.index < len(described.chunks):
        chunk = described.chunks[index.index]
        if chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    return next((tuple(chunk.sizes) for chunk in described.chunks if chunk.offsets == index.offset), ())


def _transformed(info: StorageInfo | None, content: bytes) -> bytes:
    """``content`` as it was before the writer's stream transforms (torch's ``_extensions``), if any."""
    if info is None or not info.transform_descriptors:
        return content
    stream: Any = io.BytesIO(content)
    for extension in ExtensionRegistry().from_descriptor_list(info.transform_descriptors):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return bytes(stream.read())
