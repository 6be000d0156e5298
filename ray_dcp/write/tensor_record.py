"""One stored item: a record as ``torch.save`` would write it, laid out here around the tensor's own memory.

The bytes of a tensor are checksummed block by block on their way to the store, while they are in the CPU's cache. No
tensor is pickled, and on the way to a store none is copied unless it lies on a device or is not in order.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ray_dcp.format.checksums import BlockChecksums, block_crcs, crc32, crc_of_blocks
from ray_dcp.format.names import BLOCK_NBYTES, PAYLOAD_ALIGNMENT
from ray_dcp.format.tensor_pickle import tensor_pickle
from ray_dcp.format.zip_record import RecordFrame, SmallFrame, frame_payload
from ray_dcp.staging.host_pieces import copy_to_host, host_pieces, small_content
from ray_dcp.store.store import ObjectWriter, chunk_bytes
from ray_dcp.torch_private import AsyncCollectiveTensor

_MAX_HELD_NBYTES = 1 << 18
MAX_TINY_NBYTES = 8
"""Most bytes of a tiny tensor, such as one number.

Its record is sixty times as long; equal tiny tensors, such as step counts, share one record.
"""


@dataclass(frozen=True, slots=True)
class Payload:
    """The place of a record and of its value in the file, in bytes, and the checksums of the value's blocks."""

    record_offset: int
    record_nbytes: int
    payload_offset: int
    payload_nbytes: int
    block_crcs: tuple[int, ...]


class RecordSink(Protocol):
    """What records are written to, front to back."""

    def write(self, chunk: bytes | memoryview) -> int:
        """Append all of ``chunk``; return its length in bytes."""
        ...

    def write_large(self, frame: RecordFrame, tensor: torch.Tensor) -> tuple[int, ...]:
        """Append the record of ``tensor`` in ``frame``; return the checksums of its blocks.

        They are all 0, and the record has no end yet, where whoever takes the bytes from this sink computes them.
        """
        ...

    def tell(self) -> int:
        """Bytes accepted so far."""
        ...


class JoinedWrites:
    """A ``RecordSink`` that passes all on to an ``ObjectWriter``, small chunks together."""

    def __init__(self, sink: ObjectWriter) -> None:
        self._sink = sink
        self._held = bytearray()
        self._position = sink.tell()

    def write(self, chunk: bytes | memoryview) -> int:
        nbytes = len(chunk) if isinstance(chunk, bytes) else memoryview(chunk).nbytes
        if len(self._held) + nbytes > _MAX_HELD_NBYTES:
            self.flush()
        if nbytes > _MAX_HELD_NBYTES:
            self._sink.write(chunk_bytes(chunk))
        else:
            self._held += chunk
        self._position += nbytes
        return nbytes

    def write_large(self, frame: RecordFrame, tensor: torch.Tensor) -> tuple[int, ...]:
        self.write(frame.head)
        checksums = BlockChecksums()
        for piece in host_pieces(tensor):
            checksums.update(piece)
            self.write(piece)
        crcs = checksums.crcs()
        self.write(frame.tail(crc_of_blocks(crcs, frame.payload_nbytes)))
        return crcs

    def flush(self) -> None:
        """Pass on what is held; call once more at the end."""
        if self._held:
            self._sink.write(self._held)
            self._held = bytearray()

    def tell(self) -> int:
        return self._position


@dataclass(slots=True)
class Row:
    """The records that were written last, if more of their kind can follow with the same head."""

    frame: SmallFrame | None = None
    start: int = 0
    """Offset of the row in the file, in bytes."""
    end: int = -1
    """Offset in the file behind the row's last record."""
    names: set[str] = field(default_factory=set)
    """The tensors that these records are of.

    No two records are chunks of one tensor: readers may tell records apart by place and name.
    """


class TensorRecord:
    """A tensor's record, with all that can be known before it is written.

    Moving large payloads drives everything else out of the CPU's caches, and what runs in between then takes several
    times as long: so these are made for many tensors at a time.
    """

    __slots__ = ("_frame", "_gap", "_nbytes", "_small", "_start", "_tensor", "dtype", "end", "sizes")

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor`` must keep its values until the record is written."""
        tensor = plain(tensor)
        self.dtype = tensor.dtype
        self.sizes = tensor.shape
        self._tensor = tensor
        self._nbytes = tensor.nbytes
        is_small = self._nbytes <= BLOCK_NBYTES
        self._frame: SmallFrame | RecordFrame = (_small_frame if is_small else _large_frame)(tensor.dtype, tensor.shape)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is written."""
        return self._tensor

    @property
    def identity(self) -> Hashable:
        """A key that is equal for tiny tensors whose records would be equal. It is asked once.

        None for larger tensors, and for those on a device.
        """
        if self._nbytes > MAX_TINY_NBYTES or not self._tensor.is_cpu:
            return None
        return self.dtype, self.sizes, bytes(small_content(self._tensor))

    def keep_values(self) -> None:
        """Take a copy: the tensor may change from now on."""
        self._tensor = copy_to_host(self._tensor)

    def lay_out(self, at: int, row: Row, name: str) -> int:
        """Give the record its place behind what ends at ``at`` of the file; return where it ends, in bytes.

        ``row`` is the current row of the file, ``name`` the tensor's. What is aligned in the record's frame is then
        aligned in the file, too.
        """
        frame = self._frame
        self._gap = -at % PAYLOAD_ALIGNMENT
        if not isinstance(frame, SmallFrame):
            self._start = at + self._gap
            self.end = self._start + frame.nbytes
            return self.end
        follows = row.frame is frame and row.end == at and name not in row.names
        record = frame.in_row(len(row.names)) if follows else None
        if record is None:
            row.frame, row.start = frame, at + self._gap
            row.names.clear()
            record = frame.first
        else:
            self._gap = 0
        row.names.add(name)
        self._small, self._start = record, row.start
        self.end = row.end = row.start + record.end
        return self.end

    def write(self, sink: RecordSink) -> Payload:
        """Append the record, which has been laid out, to ``sink``. Of the tensor only its own bytes are written."""
        if self._gap:
            sink.write(bytes(self._gap))
        frame = self._frame
        crcs: tuple[int, ...]
        if isinstance(frame, SmallFrame):
            payload_at = self._small.payload_at
            content = small_content(self._tensor)
            crc = crc32(content)
            sink.write(self._small.around(content, crc))
            crcs = (crc,) if self._nbytes else ()
        else:
            payload_at = frame.payload_at
            crcs = sink.write_large(frame, self._tensor)
        assert sink.tell() == self.end, "a tensor has as many bytes as its shape says"
        start = self._start
        return Payload(start, self.end - start, start + payload_at, self._nbytes, crcs)


class PythonRecord:
    """The record of a Python object that is pickled already; its payload is its whole record."""

    __slots__ = ("_pickled", "_start")
    dtype = sizes = identity = None

    def __init__(self, pickled: memoryview) -> None:
        self._pickled = pickled

    def keep_values(self) -> None:
        """Take a copy: the pickle may change from now on."""
        self._pickled = memoryview(bytes(self._pickled))

    def lay_out(self, at: int, row: Row, name: str) -> int:
        """See ``TensorRecord.lay_out``. Nothing is aligned in it."""
        self._start = at
        return at + len(self._pickled)

    def write(self, sink: RecordSink) -> Payload:
        """Append the record, which has been laid out, to ``sink``."""
        assert sink.tell() == self._start
        pickled = self._pickled
        sink.write(pickled)
        return Payload(self._start, len(pickled), self._start, len(pickled), block_crcs(pickled))


@functools.lru_cache(maxsize=4096)
def _large_frame(dtype: torch.dtype, sizes: torch.Size) -> RecordFrame:
    return frame_payload(tensor_pickle(dtype, sizes), sizes.numel() * dtype.itemsize)


@functools.lru_cache(maxsize=4096)
def _small_frame(dtype: torch.dtype, sizes: torch.Size) -> SmallFrame:
    return SmallFrame(tensor_pickle(dtype, sizes), sizes.numel() * dtype.itemsize)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its class and graph, once it has arrived: readers may not have the class, or not allow it."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach().as_subclass(torch.Tensor)
