"""One stored item: a record as ``torch.save`` would write it, laid out here around the tensor's own memory.

The bytes of a tensor are checksummed block by block on their way to the store, while they are in the CPU's cache. No
tensor is pickled, and none is copied unless it lies on a device or is not in order.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ray_dcp.format.checksums import BlockChecksums, block_crcs, crc32, crc_of_blocks
from ray_dcp.format.names import BLOCK_NBYTES, PAYLOAD_ALIGNMENT
from ray_dcp.format.tensor_pickle import tensor_pickle
from ray_dcp.format.zip_record import RecordFrame, SmallFrame, frame_payload
from ray_dcp.staging.host_pieces import host_pieces, small_content
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


class JoinedWrites:
    """An ``ObjectWriter`` that passes small chunks on together."""

    def __init__(self, sink: ObjectWriter) -> None:
        self._sink = sink
        self._held = bytearray()
        self._position = sink.tell()

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        nbytes = len(chunk) if isinstance(chunk, bytes) else memoryview(chunk).nbytes
        if len(self._held) + nbytes > _MAX_HELD_NBYTES:
            self.flush()
        if nbytes > _MAX_HELD_NBYTES:
            self._sink.write(chunk_bytes(chunk))
        else:
            self._held += chunk
        self._position += nbytes
        return nbytes

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
    def identity(self) -> Hashable:
        """A key that is equal for tiny tensors whose records would be equal. It is asked once.

        None for larger tensors, and for those on a device.
        """
        if self._nbytes > MAX_TINY_NBYTES or not self._tensor.is_cpu:
            return None
        return self.dtype, self.sizes, bytes(small_content(self._tensor))

    def write(self, sink: ObjectWriter, row: Row, name: str) -> Payload:
        """Append the record to ``sink``, aligned; return its place. ``row`` is the current row of the file.

        ``name`` is the tensor's. Of the tensor only its own bytes are written.
        """
        frame = self._frame
        if isinstance(frame, SmallFrame):
            return self._write_small(sink, frame, row, name)
        start = _pad(sink)
        crcs = self._write_large(sink, frame)
        assert sink.tell() == start + frame.nbytes, "a tensor has as many bytes as its shape says"
        return Payload(start, frame.nbytes, start + frame.payload_at, self._nbytes, crcs)

    def _write_small(self, sink: ObjectWriter, frame: SmallFrame, row: Row, name: str) -> Payload:
        follows = row.frame is frame and row.end == sink.tell() and name not in row.names
        record = frame.in_row(len(row.names)) if follows else None
        if record is None:
            row.frame, row.start = frame, _pad(sink)
            row.names.clear()
            record = frame.first
        content = small_content(self._tensor)
        crc = crc32(content)
        sink.write(record.around(content, crc))
        row.names.add(name)
        row.end = row.start + record.end
        assert sink.tell() == row.end, "a tensor has as many bytes as its shape says"
        crcs = (crc,) if self._nbytes else ()
        return Payload(row.start, record.end, row.start + record.payload_at, self._nbytes, crcs)

    def _write_large(self, sink: ObjectWriter, frame: RecordFrame) -> tuple[int, ...]:
        sink.write(frame.head)
        checksums = BlockChecksums()
        for piece in host_pieces(self._tensor):
            checksums.update(piece)
            sink.write(piece)
        crcs = checksums.crcs()
        sink.write(frame.tail(crc_of_blocks(crcs, self._nbytes)))
        return crcs


@functools.lru_cache(maxsize=4096)
def _large_frame(dtype: torch.dtype, sizes: torch.Size) -> RecordFrame:
    return frame_payload(tensor_pickle(dtype, sizes), sizes.numel() * dtype.itemsize)


@functools.lru_cache(maxsize=4096)
def _small_frame(dtype: torch.dtype, sizes: torch.Size) -> SmallFrame:
    return SmallFrame(tensor_pickle(dtype, sizes), sizes.numel() * dtype.itemsize)


def write_python(sink: ObjectWriter, pickled: memoryview) -> Payload:
    """Append a Python object that is pickled already; its payload is its whole record."""
    start = sink.tell()
    sink.write(pickled)
    return Payload(start, len(pickled), start, len(pickled), block_crcs(pickled))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its class and graph, once it has arrived: readers may not have the class, or not allow it."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach().as_subclass(torch.Tensor)


def _pad(sink: ObjectWriter) -> int:
    """Fill ``sink`` up to where a record can start: what is aligned in its frame is then aligned in the file too.

    Returns that offset, in bytes.
    """
    gap = -sink.tell() % PAYLOAD_ALIGNMENT
    if gap:
        sink.write(bytes(gap))
    return sink.tell()
