"""``RecordRead``: the read of one stored payload, as a value that can be printed, compared and sent anywhere.

::

    read items -> WantedRecord (wanted) -> RecordRead -> ranges() -> LargeRead.run (fill), in a lane (engine)

``sections`` alone decides which bytes are asked for, and in which order; whoever reads follows it, and ``ranges``
shows it read by read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ray_dcp.format.checksums import Check
from ray_dcp.format.manifest import Entry
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads.plan.rows import BoxPiece, Rows, box_pieces, rows_of, spans
from ray_dcp.reads.plan.shape import ReadShape

BOX_NBYTES = 16 * BLOCK_NBYTES
"""Bytes that are read at a time of a box that is not rows.

Enough that the blocks at a piece's ends, which are read twice, cost little.
"""
ALL = -1
"""Stands for all boxes, in place of the number of one."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a stored chunk that a rank wants."""

    offsets: tuple[int, ...]
    """Begin of the part in the chunk, in elements of each dimension."""
    lengths: tuple[int, ...]
    """Shape of the part."""
    is_direct: bool = True
    """Whether the memory that it goes to holds the stored bytes as they are: contiguous, on the CPU, of that dtype."""

    @property
    def is_empty(self) -> bool:
        return not math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of a payload that are read one after the other, ``step`` at a time."""

    start: int
    """Offset of the first byte in the payload."""
    end: int
    """Offset in the payload behind the last byte."""
    step: int
    """Most bytes of one read."""
    box: int
    """Number of the box that the bytes are for, or ``ALL``."""
    is_straight: bool
    """Whether the bytes go straight to where they belong; else they pass through the reader's memory."""
    piece: BoxPiece | None = None
    """The part of a box that is not rows, which is taken out of the bytes in one step; None for boxes of rows."""


@dataclass(frozen=True, slots=True)
class RecordRead:
    """A chunk's payload in a file, what it is checked by, and the boxes that are wanted of it."""

    key: str
    """The file."""
    fqn: str
    offset: int
    """Offset of the payload in the file, in bytes."""
    nbytes: int
    """Length of the payload."""
    check: Check
    dtype: str
    """The dtype's name as the manifest has it, such as ``float32``."""
    sizes: tuple[int, ...]
    """Shape of the chunk."""
    boxes: tuple[Box, ...]

    @property
    def itemsize(self) -> int:
        return self.nbytes // max(1, math.prod(self.sizes))

    @property
    def is_consistent(self) -> bool:
        """Whether the check is for a payload of this length and complete, and the boxes lie in the chunk."""
        return (
            self.check.nbytes == self.nbytes
            and self.check.is_complete
            and all(
                len(box.offsets) == len(self.sizes) == len(box.lengths)
                and all(o >= 0 and o + n <= s for o, n, s in zip(box.offsets, box.lengths, self.sizes, strict=True))
                for box in self.boxes
            )
        )

    @property
    def is_all_in_one(self) -> bool:
        """Whether there is one box, which wants the whole chunk."""
        return len(self.boxes) == 1 and self.boxes[0].lengths == self.sizes

    def rows(self, box: Box) -> Rows | None:
        """The box as equally spaced rows of the payload; None where it is empty, or its rows are not equally spaced."""
        if box.is_empty:
            return None
        if box.lengths == self.sizes:  # nearly all of them
            count = math.prod(self.sizes)
            return Rows(0, count, count, 1)
        return rows_of(self.sizes, box.offsets, box.lengths)

    @property
    def in_pieces(self) -> bool:
        """Whether each box is taken by itself, piece by piece: so if any of them is converted, or is not rows."""
        return any(not box.is_empty and (not box.is_direct or self.rows(box) is None) for box in self.boxes)

    def ranges(self, shape: ReadShape) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of every read, in order; in bytes of the file."""
        for section in self.sections(shape):
            for at in range(section.start, section.end, section.step):
                yield self.offset + at, self.offset + min(at + section.step, section.end)

    def sections(self, shape: ReadShape) -> list[Section]:
        """The sections to read, in order: whole blocks where blocks are checked, and nothing that no box needs.

        A section of one box goes on where the one before has ended or begins at a block, so a block may be checked
        over several reads; see ``RunningCheck``.
        """
        if all(box.is_empty for box in self.boxes):
            return []
        in_pieces = self.in_pieces
        if self.check.needs_all and not in_pieces:
            straight = self.is_all_in_one and self.boxes[0].is_direct
            step = shape.piece_nbytes if straight else shape.unit_nbytes
            return [Section(0, self.nbytes, step, ALL, straight)]
        found: list[Section] = []
        for number, box in enumerate(self.boxes):
            if in_pieces:
                found += self._pieces(number, box)
            elif (rows := self.rows(box)) is not None:
                found += self._of_rows(number, rows, shape)
        return found

    def _of_rows(self, number: int, rows: Rows, shape: ReadShape) -> Iterator[Section]:
        size, unit = self.itemsize, shape.unit_nbytes
        for first, last in spans(rows, self.check.block_nbytes // size):
            start, end = first * size, min(last * size, self.nbytes)
            low = high = end
            if rows.num == 1:
                # The units that belong to the one row alone go straight to it.
                low = min(start - (start - rows.first * size) // unit * unit, end)
                high = max(low, end if rows.end * size >= end else start + (rows.end * size - start) // unit * unit)
            if start < low:
                yield Section(start, low, unit, number, False)
            if low < high:
                yield Section(low, high, shape.piece_nbytes, number, True)
            if high < end:
                yield Section(high, end, unit, number, False)

    def _pieces(self, number: int, box: Box) -> Iterator[Section]:
        block = self.check.block_nbytes
        for piece in box_pieces(self.sizes, box.offsets, box.lengths, self.itemsize, BOX_NBYTES):
            start = piece.start // block * block
            end = min(-(-(piece.start + math.prod(piece.sizes) * self.itemsize) // block) * block, self.nbytes)
            yield Section(start, end, end - start, number, False, piece)


def read_of_entry(entry: Entry, boxes: tuple[Box, ...], *, unchecked: bool = False) -> RecordRead:
    """The read for ``boxes`` of a tensor that a manifest describes; ``unchecked`` where it has no checksums."""
    check = Check(entry.payload_nbytes, None if unchecked else entry.block_crcs)
    return RecordRead(
        entry.file, entry.fqn, entry.payload_offset, entry.payload_nbytes, check, entry.dtype or "",
        entry.sizes or (), boxes,
    )  # fmt: skip
