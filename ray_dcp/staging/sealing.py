"""Makes a staged file whole on its way to storage: computes the checksums of large payloads and ends their records.

A staged file is a shard file but for what depends on these checksums, which take as long as a copy: they are computed
by whoever writes the file, while the CPU's cache has the bytes anyway.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ray_dcp.format.checksums import crc32, crc_of_blocks
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.zip_record import RecordFrame
from ray_dcp.store.store import Preallocates, Store
from ray_dcp.trace_points import Point, reached


@dataclass(frozen=True, slots=True)
class OpenEnds:
    """The large payloads of a staged file, front to back: twelve bytes for each, and a frame for all of one kind."""

    payload_offsets: array[int]
    """Offset of each payload in the file, in bytes."""
    frame_of: array[int]
    """The position of each payload's frame in ``frames``."""
    frames: tuple[RecordFrame, ...]

    def __len__(self) -> int:
        return len(self.payload_offsets)


def sealed_pieces(memory: memoryview, nbytes: int, open_ends: OpenEnds, crcs: array[int]) -> Iterator[memoryview]:
    """Yield the staged file in ``memory``, ``nbytes`` long, in order and in pieces of a block at most.

    A piece is whole when it is yielded, and stays so. Each record's end is written into ``memory`` and the checksums of
    its blocks are added to ``crcs``, in file order: what ``WrittenColumns.with_crcs`` takes. To seal a file again
    changes nothing.
    """
    assert nbytes <= len(memory), "a staged file lies in its buffer"
    done = 0
    for offset, number in zip(open_ends.payload_offsets, open_ends.frame_of, strict=True):
        frame = open_ends.frames[number]
        end = offset + frame.payload_nbytes
        yield from _blocks(memory, done, offset)
        first = len(crcs)
        for block in _blocks(memory, offset, end):
            crcs.append(crc32(block))
            yield block
        tail = frame.tail(crc_of_blocks(crcs[first:], frame.payload_nbytes))
        memory[end : end + len(tail)] = tail
        done = end
    yield from _blocks(memory, done, nbytes)


def seal(
    memory: memoryview, nbytes: int, open_ends: OpenEnds, progress: Callable[[int], object] | None = None
) -> array[int]:
    """Make the staged file in ``memory`` whole where it is, and return its checksums; ``progress`` as below."""
    crcs: array[int] = array("I")
    for number, piece in enumerate(sealed_pieces(memory, nbytes, open_ends, crcs)):
        if progress is not None:
            progress(len(piece))
        if number == 0:
            reached(Point.MID_WRITE)
    return crcs


def write_sealed(
    store: Store,
    key: str,
    memory: memoryview,
    nbytes: int,
    open_ends: OpenEnds,
    progress: Callable[[int], object] | None = None,
) -> array[int]:
    """Write the staged file in ``memory`` as the new object ``key``, durable when this returns; return its checksums.

    ``progress`` is called with the bytes of each piece when the store has it; what it raises ends the write and passes
    unchanged. Raises ``StoreError`` where the store fails. Then or after that, nothing of the object stays, as far
    as the store can.
    """
    crcs: array[int] = array("I")
    with store.put_new(key) as file:
        if isinstance(file, Preallocates):
            file.preallocate(nbytes)
        for number, piece in enumerate(sealed_pieces(memory, nbytes, open_ends, crcs)):
            file.write(piece)
            if progress is not None:
                progress(len(piece))
            if number == 0:
                reached(Point.MID_WRITE)
    return crcs


def is_sealed_with(memory: memoryview, open_ends: OpenEnds, crcs: array[int]) -> bool:
    """Whether the blocks of the large payloads in ``memory``, a sealed file, have the checksums ``crcs``."""
    at = 0
    for offset, number in zip(open_ends.payload_offsets, open_ends.frame_of, strict=True):
        for block in _blocks(memory, offset, offset + open_ends.frames[number].payload_nbytes):
            if at == len(crcs) or crc32(block) != crcs[at]:
                return False
            at += 1
    return at == len(crcs)


def _blocks(memory: memoryview, start: int, end: int) -> Iterator[memoryview]:
    for at in range(start, end, BLOCK_NBYTES):
        yield memory[at : min(at + BLOCK_NBYTES, end)]


__all__ = ["OpenEnds", "is_sealed_with", "seal", "sealed_pieces", "write_sealed"]
