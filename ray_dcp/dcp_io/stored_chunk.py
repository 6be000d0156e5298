"""A tensor's chunk in a file, and its bytes: read unit by unit, checked, straight into memory where possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ray_dcp.checksums import crc32
from ray_dcp.dcp_io.rows import Rows, put_elements, rows_of, spans
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.layout import BLOCK_NBYTES
from ray_dcp.staging.host_pieces import tensor_memory
from ray_dcp.storage.reading import Fill


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


def read_large(chunk: StoredChunk, boxes: Sequence[Box], fill: Fill, scratch: torch.Tensor) -> int:
    """Fill ``boxes`` from the blocks that hold them, each checked; return how many bytes were read.

    ``scratch`` is a flat uint8 tensor of a number of blocks: as much is read at once. Boxes are direct and are rows
    (``plain_rows``). Where only the whole is checked, the whole is read.
    """
    if chunk.block_crcs is None and chunk.crc is not None:
        return _read_whole(chunk, boxes, fill, scratch)
    return sum(_read_rows(chunk, rows, box.target, fill, scratch) for box in boxes if (rows := plain_rows(chunk, box)))


def plain_rows(chunk: StoredChunk, box: Box) -> Rows | None:
    """The box as rows; None where it is empty or no such rows."""
    return rows_of(chunk.sizes, box.offsets, tuple(box.target.shape)) if box.target.numel() else None


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether stored bytes are the target's own, as they are."""
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and target.data_ptr() != 0  # a class that wraps other tensors has no memory of its own
    )


def _read_rows(chunk: StoredChunk, rows: Rows, target: torch.Tensor, fill: Fill, scratch: torch.Tensor) -> int:
    itemsize = chunk.dtype.itemsize
    by_rows = target.view(rows.num, rows.width)
    memory = tensor_memory(target) if rows.num == 1 else None
    first, last = rows.first * itemsize, rows.end * itemsize
    held, nbytes = tensor_memory(scratch), 0
    for start, end in spans(rows, BLOCK_NBYTES // itemsize):
        start, end = start * itemsize, min(end * itemsize, chunk.nbytes)
        for at in range(start, end, len(held)):
            until = min(at + len(held), end)
            nbytes += until - at
            if memory is not None and first <= at and until <= last:
                content = memory[at - first : until - first]
                fill(chunk.offset + at, [content])
                chunk.verify(content, at)
                continue
            content = held[: until - at]
            fill(chunk.offset + at, [content])
            chunk.verify(content, at)
            put_elements(rows, by_rows, scratch[: until - at].view(chunk.dtype), at // itemsize)
    return nbytes


def _read_whole(chunk: StoredChunk, boxes: Sequence[Box], fill: Fill, scratch: torch.Tensor) -> int:
    itemsize = chunk.dtype.itemsize
    wanted = [(rows, box.target.view(rows.num, rows.width)) for box in boxes if (rows := plain_rows(chunk, box))]
    held, crc = tensor_memory(scratch), 0
    memory = tensor_memory(boxes[0].target) if len(boxes) == 1 and boxes[0].target.shape == chunk.sizes else None
    for at in range(0, chunk.nbytes, len(held)):
        until = min(at + len(held), chunk.nbytes)
        content = held[: until - at] if memory is None else memory[at:until]
        fill(chunk.offset + at, [content])
        crc = crc32(content, crc)
        if memory is None:
            stored = scratch[: until - at].view(chunk.dtype)
            for rows, target in wanted:
                put_elements(rows, target, stored, at // itemsize)
    if crc != chunk.crc:
        raise chunk.damaged(0, chunk.nbytes)
    return chunk.nbytes


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
