"""One stored item: a ``torch.save`` record, checksummed while it streams to the store.

Torch writes a record as an uncompressed zip file. ``RecordStream`` follows that file's local headers as they pass,
so that it knows where the tensor's bytes lie without reading anything back, and checksums them block by block.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.layout import BLOCK_NBYTES, PAYLOAD_ALIGNMENT
from ray_dcp.storage.chunks import chunk_bytes
from ray_dcp.storage.store import ObjectWriter

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""signature, version, flags, method, time, date, crc, compressed and full size, name length, extra length"""
_LOCAL_SIGNATURE = b"PK\x03\x04"
_PAYLOAD_NAME = b"/data/0"
_MAX_HELD_NBYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a record's value lies in its file, and its checksums."""

    record_offset: int
    record_nbytes: int
    payload_offset: int
    payload_nbytes: int
    block_crcs: tuple[int, ...]


class BlockChecksums:
    """CRC-32 of each block of a stream of bytes that is fed in pieces of any size."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._crc = 0
        self._in_block = 0

    def update(self, chunk: memoryview) -> None:
        while chunk:
            piece = chunk[: BLOCK_NBYTES - self._in_block]
            self._crc = zlib.crc32(piece, self._crc)
            self._in_block += len(piece)
            chunk = chunk[len(piece) :]
            if self._in_block == BLOCK_NBYTES:
                self._close_block()

    def crcs(self) -> tuple[int, ...]:
        """Of all blocks, the last one short; call once, at the end."""
        if self._in_block:
            self._close_block()
        return tuple(self._crcs)

    def _close_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc = 0
        self._in_block = 0


class JoinedWrites:
    """An ``ObjectWriter`` that passes small chunks on together: torch writes a record in some forty of them."""

    def __init__(self, sink: ObjectWriter) -> None:
        self._sink = sink
        self._held = bytearray()

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        view = chunk_bytes(chunk)
        if len(self._held) + len(view) > _MAX_HELD_NBYTES:
            self.flush()
        if len(view) > _MAX_HELD_NBYTES:
            return self._sink.write(view)
        self._held += view
        return len(view)

    def flush(self) -> None:
        """Pass on what is held; call once more at the end."""
        if self._held:
            self._sink.write(self._held)
            self._held = bytearray()

    def tell(self) -> int:
        return self._sink.tell() + len(self._held)


class RecordStream:
    """A sink for one ``torch.save`` of one tensor of ``payload_nbytes``; passes all on to ``sink``."""

    def __init__(self, sink: ObjectWriter, payload_nbytes: int) -> None:
        self._sink = sink
        self._start = sink.tell()
        self._payload_nbytes = payload_nbytes
        self._payload_offset: int | None = None
        self._header = b""
        self._checksums = BlockChecksums()

    def write(self, chunk: bytes | memoryview) -> int:
        position = self._sink.tell()
        view = memoryview(chunk).cast("B")
        if self._payload_offset is None:
            self._follow_header(view, position)
        elif position < self._payload_offset + self._payload_nbytes and position >= self._payload_offset:
            self._checksums.update(view)
        written = self._sink.write(view)
        assert written == len(view), "a store's writer takes all it is given"
        return written

    def flush(self) -> None:
        """torch.save flushes its sink; durability is the store's."""

    def payload(self) -> Payload:
        """What was written; raises where torch's layout is not the expected one."""
        if self._payload_offset is None and self._payload_nbytes:
            raise AssertionError("torch.save wrote no data/0 entry: its record layout has changed")
        end = self._sink.tell()
        return Payload(
            record_offset=self._start,
            record_nbytes=end - self._start,
            payload_offset=self._payload_offset if self._payload_offset is not None else end,
            payload_nbytes=self._payload_nbytes,
            block_crcs=self._checksums.crcs(),
        )

    def _follow_header(self, view: memoryview, position: int) -> None:
        """Torch writes header, name and extra field of an entry one after the other, then its content."""
        if len(view) == _LOCAL_HEADER.size and bytes(view[:4]) == _LOCAL_SIGNATURE:
            self._header = bytes(view)
            return
        if not self._header:
            return
        name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(self._header)[-2:]
        if len(view) == name_nbytes and bytes(view).endswith(_PAYLOAD_NAME):
            self._payload_offset = position + name_nbytes + extra_nbytes
        self._header = b""


def write_tensor(sink: ObjectWriter, tensor: torch.Tensor) -> Payload:
    """Append a CPU tensor's record to ``sink``, aligned; only the tensor's own bytes are written."""
    _pad(sink)
    tensor = own_bytes(tensor)
    stream = RecordStream(sink, tensor.nbytes)
    torch.save(tensor, cast(IO[bytes], stream))
    return stream.payload()


def write_python(sink: ObjectWriter, pickled: memoryview) -> Payload:
    """Append a Python object that is pickled already; its payload is its whole record."""
    _pad(sink)
    start = sink.tell()
    checksums = BlockChecksums()
    checksums.update(pickled)
    sink.write(pickled)
    return Payload(start, len(pickled), start, len(pickled), checksums.crcs())


def own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the CPU, contiguous, in a storage of its own size: copied only where it is not so already."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    # A subclass is stored as the plain tensor it is: readers may not have the class, or not allow it.
    tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def verify_blocks(content: memoryview, crcs: tuple[int, ...], *, file: str, fqn: str, offset: int) -> None:
    """Raise ``CorruptCheckpointError`` unless each block of ``content`` has its CRC; it starts at a block."""
    for number, crc in enumerate(crcs):
        block = content[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]
        if zlib.crc32(block) != crc:
            raise CorruptCheckpointError(
                "stored bytes fail their checksum: the file was damaged after it was written",
                file=file,
                fqn=fqn,
                offset=offset + number * BLOCK_NBYTES,
                nbytes=len(block),
            )


def _pad(sink: ObjectWriter) -> None:
    gap = -sink.tell() % PAYLOAD_ALIGNMENT
    if gap:
        sink.write(bytes(gap))
