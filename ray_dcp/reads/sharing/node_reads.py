"""A rank's part in what the ranks of its node read for each other; see ``planning/node_sharing.py``.

Window after window: read and check my part, take mine from all parts. One window is read ahead, into the other half of
the segment, so that ranks seldom wait.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from ray_dcp.format.checksums import crc32
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.planning.node_sharing import (
    NUM_HALVES,
    NodeShare,
    ReadShare,
    ShareOffer,
    ShareRules,
    Want,
    pack_wants,
    segment_nbytes,
    windows_of,
)
from ray_dcp.progress import advance
from ray_dcp.reads.checkpoint import OpenedCheckpoint
from ray_dcp.reads.engine import Lane, Task, finished
from ray_dcp.reads.fill import TORCH_DTYPES, RowsTarget
from ray_dcp.reads.plan.record_read import RecordRead
from ray_dcp.reads.plan.shape import ReadShape
from ray_dcp.reads.sharing.segment import Counter, NodeMemory, SharedSegment, remove_stale
from ray_dcp.store.ranges import joined
from ray_dcp.store.store import StoreTraits

logger = logging.getLogger(__name__)

ReadBlocks = Callable[[int, int, memoryview], None]
"""(number of an entry, start in its payload, buffer): fill it with checked bytes from there on; whole blocks."""


def share_rules(traits: StoreTraits) -> ShareRules:
    """Two ranks read a local file each from the page cache sooner than they exchange it."""
    if traits.page_cache:
        return ShareRules(min_repeats=3, rank_nbytes=4 * BLOCK_NBYTES)
    return ShareRules(min_repeats=1.5, rank_nbytes=16 * BLOCK_NBYTES)


def offer_of(
    wants: Sequence[Want], sharing: NodeMemory, rules: ShareRules, opened: OpenedCheckpoint
) -> ShareOffer | None:
    """What a rank offers that has ``opened`` a checkpoint; None where it can share memory with nobody."""
    memory = sharing.memory()
    if memory is None:
        return None
    # An entry's number means the same to those who have the same manifest.
    return ShareOffer(
        f"{memory}:{opened.checkpoint_id}:{crc32(opened.manifest or b''):08x}",
        sharing.free_nbytes(),
        uuid.uuid4().hex,
        rules,
        pack_wants(wants),
    )


def want_of(number: int, read: RecordRead) -> Want | None:
    """The blocks that the boxes of a read need; None where they are not one run."""
    unit = BLOCK_NBYTES // read.itemsize
    of_boxes = [rows for box in read.boxes if (rows := read.rows(box)) is not None]
    # Gaps of a block or more between two rows are not read.
    if not of_boxes or any(rows.num > 1 and rows.stride - rows.width >= unit for rows in of_boxes):
        return None
    runs = sorted((rows.first // unit, -(-rows.end // unit)) for rows in of_boxes)
    (first, end, _), *others = joined(runs, lambda run: run)
    return None if others else Want(number, read.nbytes, first, end)


@dataclass(frozen=True, slots=True)
class Passing:
    """What is taken of a record whose bytes pass in a segment."""

    dtype: torch.dtype
    rows: Sequence[RowsTarget]

    @classmethod
    def of(cls, read: RecordRead, targets: Sequence[torch.Tensor]) -> Passing:
        """Targets, one for each box, are contiguous; they may be of another dtype, or on another device."""
        pairs = [(rows, target) for box, target in zip(read.boxes, targets, strict=True) if (rows := read.rows(box))]
        return cls(
            TORCH_DTYPES[read.dtype], [RowsTarget(rows, into.view(rows.num, rows.width)) for rows, into in pairs]
        )

    def touches(self, piece: ReadShare) -> bool:
        """Whether something of ``piece`` may be wanted."""
        size = self.dtype.itemsize
        return any(one.rows.first * size < piece.end and piece.start < one.rows.end * size for one in self.rows)

    def take(self, piece: ReadShare, content: torch.Tensor) -> None:
        """``content``: the piece's bytes, flat uint8."""
        for one in self.rows:
            one.take(content.view(self.dtype), piece.start // self.dtype.itemsize)


class SharedReads:
    """One rank's part. ``nbytes_read`` counts what it has read from the store, also where it fails."""

    def __init__(self, share: NodeShare, rank: int, sharing: NodeMemory, read: ReadBlocks, shape: ReadShape) -> None:
        self._share = share
        self._slot = share.members.index(rank)
        self._sharing = sharing
        self._read_blocks = read
        self._shape = shape
        self._left = Counts[int]()
        """Bytes of each record that have not passed."""
        for run in share.runs:
            self._left[run.number] += run.payload_nbytes
        self.nbytes_read = 0

    def fill(self, targets: Mapping[int, Passing]) -> list[int]:
        """Take what is wanted, by entry number; the numbers of those that are filled.

        The others are to be read from the store: there was no room, or another rank has failed or stands still.
        Raises what reading raises.
        """
        if not self._slot:
            remove_stale(self._sharing.folder)
        try:
            segment = SharedSegment(
                self._sharing,
                self._share.token,
                num_members=len(self._share.members),
                slot=self._slot,
                nbytes=segment_nbytes(self._share),
            )
        except OSError as error:
            logger.info("reads are not shared with the other ranks of this node: %s", error)
            return []
        with segment:
            if not self._pass_all(segment, targets):
                logger.info("other ranks of this node have failed or stand still; what they were to read is read here")
        return [number for number in targets if not self._left[number]]

    def _pass_all(self, segment: SharedSegment, targets: Mapping[int, Passing]) -> bool:
        """Whether it went on to the end."""
        before: tuple[ReadShare, ...] | None = None
        number = 0
        for number, window in enumerate(windows_of(self._share)):
            goes_on = segment.everyone_reaches(Counter.TAKEN, number + 1 - NUM_HALVES)
            if goes_on:
                self._read(segment, number, window)
            if before is None:
                goes_on = goes_on and segment.everyone_reaches(Counter.SIGNS, 1)
                if goes_on:
                    segment.unlink()
            elif not self._take(segment, number - 1, before, targets):
                return False
            if not goes_on:
                return False
            before = window
        return before is None or self._take(segment, number, before, targets)

    def _read(self, segment: SharedSegment, number: int, window: Sequence[ReadShare]) -> None:
        """Read and check this member's pieces, and say so."""
        start = number % NUM_HALVES * self._share.window_nbytes
        tasks = []
        unit_nbytes = max(self._shape.unit_nbytes, BLOCK_NBYTES)  # each is checked by itself
        for piece in window:
            for at in range(0, piece.nbytes, unit_nbytes) if piece.slot == self._slot else ():
                nbytes = min(unit_nbytes, piece.nbytes - at)
                read = functools.partial(self._read_part, piece, at, segment.part(start + piece.at + at, nbytes))
                tasks.append(Task(read, None))
        with closing(finished(tasks, self._shape.num_in_flight)) as ended:
            for _, nbytes in ended:
                self.nbytes_read += nbytes
                segment.sign()
        segment.tell(Counter.READ, number + 1)

    def _read_part(self, piece: ReadShare, at: int, into: memoryview, lane: Lane) -> int:
        self._read_blocks(piece.number, piece.start + at, into)
        return len(into)

    def _take(
        self, segment: SharedSegment, number: int, window: Sequence[ReadShare], targets: Mapping[int, Passing]
    ) -> bool:
        """Fill targets from a window once it is there, and say so; False where it does not come."""
        wanted = [piece for piece in window if piece.number in targets and targets[piece.number].touches(piece)]
        if not segment.everyone_reaches(Counter.READ, number + 1, {piece.slot for piece in wanted}):
            return False
        start = number % NUM_HALVES * self._share.window_nbytes
        for piece in wanted:
            at = start + piece.at
            targets[piece.number].take(piece, segment.memory[at : at + piece.nbytes])
            segment.sign()
            advance()
        for piece in window:
            self._left[piece.number] -= piece.nbytes
        segment.tell(Counter.TAKEN, number + 1)
        return True
