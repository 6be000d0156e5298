"""Takes a payload's bytes to the tensors they belong to: reads them range by range, checks them, puts them there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.checksums import RunningCheck, crc32
from ray_dcp.reads.plan.record_read import ALL, Box, RecordRead, Section
from ray_dcp.reads.plan.rows import BoxPiece, Rows
from ray_dcp.reads.plan.shape import ReadShape
from ray_dcp.staging.host_pieces import tensor_memory
from ray_dcp.store.reading import Fill

TORCH_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""torch's dtypes by name, such as ``float32``."""


def box_of(offsets: Sequence[int], target: torch.Tensor, dtype: torch.dtype) -> Box:
    """The box at ``offsets`` that fills all of ``target``."""
    return Box(tuple(offsets), tuple(target.shape), is_direct(target, dtype))


def is_direct(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the stored bytes are those of the target's memory, as they are."""
    return (
        target.is_cpu
        and target.dtype == dtype
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
        and target.data_ptr() != 0  # a class that wraps other tensors has no memory of its own
    )


def damaged(read: RecordRead, shown: str, start: int, nbytes: int) -> CorruptCheckpointError:
    """The error for bytes that fail their checksum: ``nbytes`` from ``start`` in the payload; ``shown`` is the file."""
    return CorruptCheckpointError(
        "stored bytes fail their checksum: the file was damaged after it was written",
        file=shown,
        fqn=read.fqn,
        offset=read.offset + start,
        nbytes=nbytes,
    )


def require_right(read: RecordRead, shown: str, content: memoryview, start: int = 0) -> None:
    """Raise ``CorruptCheckpointError`` unless ``content`` is what was written.

    It begins at byte ``start`` of the payload, and begins and ends at blocks.
    """
    damage = read.check.damage(content, start)
    if damage is not None:
        raise damaged(read, shown, *damage)


def require_consistent(read: RecordRead, shown: str) -> None:
    """Raise ``CorruptCheckpointError`` unless the payload is as long as its shape says, and the boxes lie in it."""
    dtype = TORCH_DTYPES.get(read.dtype)
    if dtype is None or read.nbytes != math.prod(read.sizes) * dtype.itemsize or not read.is_consistent:
        raise CorruptCheckpointError("manifest and metadata disagree about this item", file=shown, fqn=read.fqn)


def put_small(read: RecordRead, shown: str, targets: Sequence[torch.Tensor], content: memoryview) -> None:
    """Fill ``targets``, one for each box, from ``content``, the whole payload, which is checked first."""
    require_right(read, shown, content)
    whole: torch.Tensor | None = None
    for box, target in zip(read.boxes, targets, strict=True):
        if box.lengths == read.sizes and box.is_direct:
            tensor_memory(target)[:] = content
            continue
        if box.is_empty:
            continue
        if whole is None:
            whole = torch.frombuffer(content, dtype=torch.uint8).view(TORCH_DTYPES[read.dtype]).view(read.sizes)
        part = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
        target.copy_(whole[part])


@dataclass(frozen=True, slots=True)
class RowsTarget:
    """Rows of a payload, and the tensor they go to, of shape (number of rows, width)."""

    rows: Rows
    target: torch.Tensor

    def take(self, stored: torch.Tensor, start: int) -> None:
        """Copy what ``stored``, a flat tensor, has of the rows. It begins at element ``start`` of the payload."""
        rows, target = self.rows, self.target
        end = start + stored.numel()
        row = max(0, (start - rows.first) // rows.stride)
        while row < rows.num:
            begins = rows.first + row * rows.stride
            if begins >= end:
                return
            low, high = max(begins, start), min(begins + rows.width, end)
            if high - low == rows.width:
                whole = min(rows.num - row, (end - begins - rows.width) // rows.stride + 1)
                at = stored.storage_offset() + begins - start
                source = torch.as_strided(stored, (whole, rows.width), (rows.stride, 1), at)
                target[row : row + whole].copy_(source)
                row += whole
                continue
            if high > low:
                target[row, low - begins : high - begins].copy_(stored[low - start : high - start])
            row += 1


class RowBytes:
    """Rows of a payload, and the contiguous CPU memory of their dtype that they go to; copied as bytes, row by row.

    numpy copies each row as a whole, in nine tenths of the time that torch takes (rows of 4 KiB, out of the cache).
    """

    def __init__(self, rows: Rows, target: torch.Tensor) -> None:
        size = target.itemsize
        self._num, self._width, self._stride = rows.num, rows.width * size, rows.stride * size
        self._first = rows.first * size
        self._target = np.frombuffer(tensor_memory(target), dtype=np.uint8).reshape(self._num, self._width)

    def take(self, content: memoryview, start: int) -> None:
        """Copy what ``content`` has of the rows. It begins at byte ``start`` of the payload."""
        first, width, stride = self._first, self._width, self._stride
        end = start + len(content)
        row = max(0, (start - first) // stride)
        begins = first + row * stride
        if begins < start and row < self._num:
            high = min(begins + width, end)
            if high > start:
                self._part(row, start - begins, content[: high - start])
            row, begins = row + 1, begins + stride
        whole = min(self._num - row, (end - begins - width) // stride + 1)
        if whole > 0:
            rows = np.ndarray((whole, width), np.uint8, content, begins - start, (stride, 1))
            self._target[row : row + whole] = rows
            row, begins = row + whole, begins + whole * stride
        if row < self._num and begins < end:
            self._part(row, 0, content[begins - start :])

    def _part(self, row: int, at: int, content: memoryview) -> None:
        self._target[row, at : at + len(content)] = np.frombuffer(content, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class PieceTarget:
    """A piece of a box, and the part of the tensor that it goes to."""

    piece: BoxPiece
    target: torch.Tensor

    def take(self, stored: torch.Tensor, start: int) -> None:
        """Copy the piece out of ``stored``, a flat tensor that holds it, from element ``start`` of the payload on."""
        piece = self.piece
        at = piece.start // stored.itemsize - start
        held = stored[at : at + math.prod(piece.sizes)].view(piece.sizes)
        self.target.copy_(held[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))])


@dataclass(frozen=True, slots=True)
class _Step:
    """A section, and where its bytes go."""

    section: Section
    straight: Sequence[tuple[int, list[memoryview]]] = ()
    """Each read that goes straight to where it belongs: its start in the payload, and the memory that it fills."""
    due: Sequence[int | None] | None = None
    """Of a section that is a whole payload: for each read the CRC-32 of the block that it ends, None within a block."""
    rows: Sequence[RowBytes] = ()
    piece: PieceTarget | None = None


class LargeRead:
    """A ``RecordRead`` with the tensors it fills: everything is made ready before the first byte is read.

    Moving large payloads drives everything else out of the CPU's caches: what runs in between then takes several times
    as long. So this is made for many records at a time, and little is left to do between two reads.
    """

    def __init__(self, read: RecordRead, targets: Sequence[torch.Tensor], shape: ReadShape, shown: str) -> None:
        self.read = read
        self._shown = shown
        self._dtype = TORCH_DTYPES[read.dtype]
        sections = read.sections(shape)
        self._scratch_nbytes = max(
            (min(one.step, one.end - one.start) for one in sections if not one.is_straight), default=0
        )
        self._steps = [self._step(one, targets) for one in sections]

    def _step(self, section: Section, targets: Sequence[torch.Tensor]) -> _Step:
        number = max(section.box, 0)
        if section.piece is not None:
            return _Step(section, piece=PieceTarget(section.piece, targets[number][section.piece.place]))
        numbers = range(len(targets)) if section.box == ALL else [number]
        found = [(rows, targets[one]) for one in numbers if (rows := self.read.rows(self.read.boxes[one])) is not None]
        if not section.is_straight:
            return _Step(section, rows=[RowBytes(rows, target) for rows, target in found])
        first = found[0][0].first * self._dtype.itemsize
        memory = tensor_memory(targets[number])[: section.end - first]
        places = range(section.start, section.end, section.step)
        straight = [(at, [memory[at - first : at - first + section.step]]) for at in places]
        return _Step(section, straight, self._due(section))

    def _due(self, section: Section) -> list[int | None] | None:
        """The ``_Step.due`` of a section."""
        check, nbytes, step = self.read.check, self.read.nbytes, section.step
        if check.crcs is None or (section.start, section.end) != (0, nbytes) or check.block_nbytes % step:
            return None
        a_block = check.block_nbytes // step
        due: list[int | None] = [None] * -(-nbytes // step)
        for number, crc in enumerate(check.crcs):
            due[min((number + 1) * a_block, len(due)) - 1] = crc
        return due

    def run(self, fill: Fill, memory: Callable[[int], torch.Tensor]) -> int:
        """Read, check each block, and fill the targets; return how many bytes were read.

        ``memory`` gives a flat uint8 tensor for what cannot go straight to its place.
        """
        check, nbytes = RunningCheck(self.read.check), 0
        scratch = memory(self._scratch_nbytes)
        for step in self._steps:
            if step.straight:
                self._read_straight(step, check, fill)
            else:
                self._read_through(step, check, fill, scratch)
            nbytes += step.section.end - step.section.start
        return nbytes

    def _read_straight(self, step: _Step, check: RunningCheck, fill: Fill) -> None:
        if step.due is not None:
            self._read_whole(step, step.due, fill)
            return
        for start, pieces in step.straight:
            fill(self.read.offset + start, pieces)
            damage = check.damage(pieces[0], start)
            if damage is not None:
                raise damaged(self.read, self._shown, *damage)

    def _read_whole(self, step: _Step, due: Sequence[int | None], fill: Fill) -> None:
        """What most reads are, with as little as can be between two of them."""
        offset, crc = self.read.offset, 0
        for (start, pieces), expected in zip(step.straight, due, strict=True):
            fill(offset + start, pieces)
            crc = crc32(pieces[0], crc)
            if expected is not None:
                if crc != expected:
                    block_start = start // self.read.check.block_nbytes * self.read.check.block_nbytes
                    raise damaged(self.read, self._shown, block_start, start + len(pieces[0]) - block_start)
                crc = 0

    def _read_through(self, step: _Step, check: RunningCheck, fill: Fill, scratch: torch.Tensor) -> None:
        section, offset, size = step.section, self.read.offset, self._dtype.itemsize
        held = scratch[: min(section.step, section.end - section.start)]
        content = tensor_memory(held)
        for at in range(section.start, section.end, section.step):
            content = content[: section.end - at]
            fill(offset + at, [content])
            damage = check.damage(content, at)
            if damage is not None:
                raise damaged(self.read, self._shown, *damage)
            for rows in step.rows:
                rows.take(content, at)
            if step.piece is not None:
                step.piece.take(held[: len(content)].view(self._dtype), at // size)
