"""A tensor's chunk in a file, and its bytes: read unit by unit, checked, straight into memory where possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.checksums import crc32
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads.rows import Rows, put_elements, rows_of, spans
from ray_dcp.staging.host_pieces import tensor_memory
from ray_dcp.store.reading import Fill


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Where a chunk's payload lies, and by what it is checked: its blocks, the whole, or (both None) nothing."""

    fqn: str
    file: str
    """For messages."""
    offset: int
    nbytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    block_crcs: tuple[int, ...] | None
    crc: int | None = None

    def verify(self, content: memoryview, start: int = 0) -> None:
        """Raise unless ``content``, from ``start`` of the payload on, is what was written.

        It begins and ends at blocks; where only the whole is checked, it is the whole.
        """
        if self.block_crcs is not None:
            for number in range(start // BLOCK_NBYTES, -(-(start + len(content)) // BLOCK_NBYTES)):
                at = number * BLOCK_NBYTES - start
                block = content[at : at + BLOCK_NBYTES]
                if crc32(block) != self.block_crcs[number]:
                    raise self.damaged(start + at, len(block))
        elif self.crc is not None and crc32(content) != self.crc:
            raise self.damaged(0, self.nbytes)

    def damaged(self, start: int, nbytes: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            "stored bytes fail their checksum: the file was damaged after it was written",
            file=self.file,
            fqn=self.fqn,
            offset=self.offset + start,
            nbytes=nbytes,
        )


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a stored chunk that a rank wants, and where it is to go."""

    offsets: tuple[int, ...]
    target: torch.Tensor
    """Its shape is the box's."""


def put_small(chunk: StoredChunk, boxes: Sequence[Box], content: memoryview) -> None:
    """Fill ``boxes`` from the chunk's whole payload, checked first."""
    chunk.verify(content)
    whole: torch.Tensor | None = None
    for box in boxes:
        target = box.target
        if target.shape == chunk.sizes and is_direct(target, chunk.dtype):
            tensor_memory(target)[:] = content
            continue
        if not target.numel():
            continue
        if whole is None:
            whole = torch.frombuffer(content, dtype=torch.uint8).view(chunk.dtype).view(chunk.sizes)
        part = tuple(slice(o, o + n) for o, n in zip(box.offsets, target.shape, strict=True))
        target.copy_(whole[part])


@dataclass(frozen=True, slots=True)
class _Part:
    """A box that is plain rows."""

    rows: Rows
    target: torch.Tensor
    memory: memoryview | None
    """Of the target, where it is one row."""
    is_of_blocks: bool
    """Whether it is one row, and every block that holds it belongs to it alone."""


class LargeRead:
    """How to fill boxes from the blocks that hold them: all that can be known before the first byte is read.

    Moving large payloads drives everything else out of the CPU's caches: what runs in between then takes several times
    as long. So this is made for many chunks at a time, and little is left to do between two reads.
    """

    def __init__(
        self, chunk: StoredChunk, parts: Sequence[_Part], unit_nbytes: int, piece_nbytes: int, *, is_whole: bool
    ) -> None:
        self.chunk = chunk
        self._parts = parts
        self._unit_nbytes = unit_nbytes
        self._piece_nbytes = piece_nbytes
        self._is_whole = is_whole

    @classmethod
    def of(cls, chunk: StoredChunk, boxes: Sequence[Box], unit_nbytes: int, piece_nbytes: int) -> LargeRead | None:
        """None unless all boxes are direct, and rows (``plain_rows``) or empty.

        At once are read ``piece_nbytes`` straight into a target, else ``unit_nbytes``, which is a number of blocks.
        """
        parts = []
        for box in boxes:
            if box.target.numel():
                rows = plain_rows(chunk, box) if is_direct(box.target, chunk.dtype) else None
                if rows is None:
                    return None
                parts.append(_part_of(chunk, rows, box.target))
        is_whole = len(boxes) == 1 and boxes[0].target.shape == chunk.sizes
        return cls(chunk, parts, unit_nbytes, piece_nbytes, is_whole=is_whole)

    def run(self, fill: Fill, memory: Callable[[int], torch.Tensor]) -> int:
        """Read, check each block, and fill the boxes; return how many bytes were read.

        ``memory`` gives a flat uint8 tensor for what cannot go straight to its place. Where only the whole is checked,
        the whole is read.
        """
        if self.chunk.block_crcs is None and self.chunk.crc is not None:
            return self._read_whole(fill, memory(self._unit_nbytes))
        nbytes = 0
        for part in self._parts:
            if part.is_of_blocks and part.memory is not None:
                self._read_blocks(part.rows.first * self.chunk.dtype.itemsize, part.memory, fill)
                nbytes += len(part.memory)
            else:
                nbytes += self._read_rows(part, fill, memory(self._unit_nbytes))
        return nbytes

    def _read_blocks(self, first: int, memory: memoryview, fill: Fill) -> None:
        """Fill ``memory`` with what follows ``first``, in pieces, and check each block where it ends."""
        offset, crcs, crc = self.chunk.offset, self.chunk.block_crcs, 0
        for start in range(0, len(memory), self._piece_nbytes):
            content = memory[start : start + self._piece_nbytes]
            fill(offset + first + start, [content])
            at, end = start, start + len(content)
            while crcs is not None and at < end:
                number = (first + at) // BLOCK_NBYTES
                block_end = min((number + 1) * BLOCK_NBYTES - first, len(memory))
                until = min(block_end, end)
                crc = crc32(memory[at:until], crc)
                if until == block_end:
                    if crc != crcs[number]:
                        raise self.chunk.damaged(number * BLOCK_NBYTES, block_end + first - number * BLOCK_NBYTES)
                    crc = 0
                at = until

    def _read_rows(self, part: _Part, fill: Fill, scratch: torch.Tensor) -> int:
        chunk, rows, memory = self.chunk, part.rows, part.memory
        itemsize = chunk.dtype.itemsize
        first, last = rows.first * itemsize, rows.end * itemsize
        by_rows, nbytes = part.target.view(rows.num, rows.width), 0
        for start, end in spans(rows, BLOCK_NBYTES // itemsize):
            start, end = start * itemsize, min(end * itemsize, chunk.nbytes)
            for at in range(start, end, self._unit_nbytes):
                until = min(at + self._unit_nbytes, end)
                nbytes += until - at
                if memory is not None and first <= at and until <= last:
                    content = memory[at - first : until - first]
                    fill(chunk.offset + at, [content])
                    chunk.verify(content, at)
                    continue
                held = scratch[: until - at]
                content = tensor_memory(held)
                fill(chunk.offset + at, [content])
                chunk.verify(content, at)
                put_elements(rows, by_rows, held.view(chunk.dtype), at // itemsize)
        return nbytes

    def _read_whole(self, fill: Fill, scratch: torch.Tensor) -> int:
        chunk, crc = self.chunk, 0
        memory = self._parts[0].memory if self._is_whole and self._parts else None
        for at in range(0, chunk.nbytes, len(scratch)):
            until = min(at + len(scratch), chunk.nbytes)
            content = tensor_memory(scratch[: until - at]) if memory is None else memory[at:until]
            fill(chunk.offset + at, [content])
            crc = crc32(content, crc)
            if memory is None:
                stored = scratch[: until - at].view(chunk.dtype)
                for part in self._parts:
                    by_rows = part.target.view(part.rows.num, part.rows.width)
                    put_elements(part.rows, by_rows, stored, at // chunk.dtype.itemsize)
        if crc != chunk.crc:
            raise chunk.damaged(0, chunk.nbytes)
        return chunk.nbytes


def _part_of(chunk: StoredChunk, rows: Rows, target: torch.Tensor) -> _Part:
    if rows.num > 1:
        return _Part(rows, target, None, is_of_blocks=False)
    first, last = rows.first * chunk.dtype.itemsize, rows.end * chunk.dtype.itemsize
    is_of_blocks = first % BLOCK_NBYTES == 0 and (last % BLOCK_NBYTES == 0 or last == chunk.nbytes)
    return _Part(rows, target, tensor_memory(target), is_of_blocks=is_of_blocks)


def plain_rows(chunk: StoredChunk, box: Box) -> Rows | None:
    """The box as rows; None where it is empty or no such rows."""
    num = box.target.numel()
    if num and box.target.shape == chunk.sizes:  # nearly all of them
        return Rows(0, num, num, 1)
    return rows_of(chunk.sizes, box.offsets, tuple(box.target.shape)) if num else None


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether stored bytes are the target's own, as they are."""
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and target.data_ptr() != 0  # a class that wraps other tensors has no memory of its own
    )


def require_consistent(chunk: StoredChunk, boxes: Sequence[Box]) -> None:
    """Raise unless the payload is as long as its shape says, and the boxes lie in it."""
    fits = all(
        len(box.offsets) == len(chunk.sizes) == box.target.dim()
        and all(o >= 0 and o + n <= s for o, n, s in zip(box.offsets, box.target.shape, chunk.sizes, strict=True))
        for box in boxes
    )
    if (
        not fits
        or chunk.nbytes != math.prod(chunk.sizes) * chunk.dtype.itemsize
        or (chunk.block_crcs is not None and len(chunk.block_crcs) != -(-chunk.nbytes // BLOCK_NBYTES))
    ):
        raise CorruptCheckpointError("manifest and metadata disagree about this item", file=chunk.file, fqn=chunk.fqn)
