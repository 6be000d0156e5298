"""A rank's part in what the ranks of its node read for each other; see ``planning/node_sharing.py``.

Window after window, a rank reads and checks its part and takes what it wants of it, and takes what it wants of what the
others have read some windows before. There is room for several windows, so that ranks seldom wait.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from ray_dcp.format.checksums import crc32
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.planning.node_sharing import (
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
from ray_dcp.reads.fill import TORCH_DTYPES, RowBytes, RowsTarget
from ray_dcp.reads.plan.record_read import RecordRead
from ray_dcp.reads.plan.rows import rows_of
from ray_dcp.reads.plan.shape import ReadShape
from ray_dcp.reads.sharing.segment import Counter, NodeMemory, SharedSegment, remove_stale
from ray_dcp.reads.wanted import WantedRecord
from ray_dcp.store.ranges import joined
from ray_dcp.store.store import StoreTraits

logger = logging.getLogger(__name__)

ReadBlocks = Callable[[int, int, memoryview, Lane], None]
"""A function (number of an entry, start in its payload, buffer, lane) that fills the buffer with checked bytes.

The bytes are those from ``start`` on, in whole blocks.
"""


def share_rules(traits: StoreTraits) -> ShareRules:
    """The rules for a store of these traits.

    What the page cache holds passes in pieces that fit a core's own cache; a bucket gets few large requests.

    Two ranks that take rows out of the same blocks are quicker together (1 GiB, columns of what is stored by rows: 227
    to 247 ms). What goes straight to its place, each of two ranks reads sooner from the page cache by itself.
    """
    if traits.page_cache:
        return ShareRules(min_repeats=2, rank_nbytes=2 * BLOCK_NBYTES, num_windows=4, straight_weight=2 / 3)
    return ShareRules(min_repeats=1.5, rank_nbytes=16 * BLOCK_NBYTES)


def offer_of(
    wants: Sequence[Want], sharing: NodeMemory, rules: ShareRules, opened: OpenedCheckpoint
) -> ShareOffer | None:
    """The offer of a rank that has ``opened`` a checkpoint; None where it can share memory with nobody."""
    memory = sharing.memory()
    if memory is None:
        return None
    # An entry's number means the same to ranks that have the same manifest.
    return ShareOffer(
        f"{memory}:{opened.checkpoint_id}:{crc32(opened.manifest or b''):08x}",
        sharing.free_nbytes(),
        uuid.uuid4().hex,
        rules,
        pack_wants(wants),
    )


def want_of(number: int, read: RecordRead) -> Want | None:
    """The blocks that the boxes of a read need, as a ``Want``; None where they are not one run."""
    unit = BLOCK_NBYTES // read.itemsize
    of_boxes = [rows for box in read.boxes if (rows := read.rows(box)) is not None]
    # Gaps of a block or more between two rows are not read.
    if not of_boxes or any(rows.num > 1 and rows.stride - rows.width >= unit for rows in of_boxes):
        return None
    runs = sorted((rows.first // unit, -(-rows.end // unit)) for rows in of_boxes)
    (first, end, _), *others = joined(runs, lambda run: run)
    is_straight = all(rows.num == 1 for rows in of_boxes) and all(box.is_direct for box in read.boxes)
    return None if others else Want(number, read.nbytes, first, end, is_straight)


def goes_straight(record: WantedRecord) -> bool:
    """Whether each part that is wanted of a record is one run of its bytes; known before there are targets."""
    if record.table is None:
        return False
    sizes = record.table.sizes[record.number] or ()
    return all(_is_one_run(sizes, tuple(item.storage_offsets), tuple(item.lengths)) for item in record.items)


def _is_one_run(sizes: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    if not len(sizes) == len(offsets) == len(lengths):
        return False  # damage, which is told when it is read
    return 0 in lengths or ((rows := rows_of(sizes, offsets, lengths)) is not None and rows.num == 1)


class Passing:
    """Takes what is wanted of a record whose bytes pass in a segment.

    There is one contiguous target for each box; torch fills those of another dtype or on another device.
    """

    def __init__(self, read: RecordRead, targets: Sequence[torch.Tensor]) -> None:
        self._dtype = TORCH_DTYPES[read.dtype]
        self._direct: list[RowBytes] = []
        self._converted: list[RowsTarget] = []
        self._spans: list[tuple[int, int]] = []
        for box, target in zip(read.boxes, targets, strict=True):
            rows = read.rows(box)
            if rows is None:
                continue
            self._spans.append((rows.first * read.itemsize, rows.end * read.itemsize))
            if box.is_direct:
                self._direct.append(RowBytes(rows, target))
            else:
                self._converted.append(RowsTarget(rows, target.view(rows.num, rows.width)))

    def touches(self, piece: ReadShare) -> bool:
        """Whether some of ``piece`` may be wanted."""
        return any(start < piece.end and piece.start < end for start, end in self._spans)

    def take(self, piece: ReadShare, content: memoryview) -> None:
        """Fill the targets from ``content``, the bytes of ``piece``."""
        for rows in self._direct:
            rows.take(content, piece.start)
        if self._converted:
            stored = torch.frombuffer(content, dtype=self._dtype)
            for one in self._converted:
                one.take(stored, piece.start // self._dtype.itemsize)


class SharedReads:
    """One rank's part in a share. ``nbytes_read`` counts the bytes it has read from the store, also where it fails."""

    def __init__(self, share: NodeShare, rank: int, sharing: NodeMemory, read: ReadBlocks, shape: ReadShape) -> None:
        self._share = share
        self._slot = share.members.index(rank)
        self._sharing = sharing
        self._read_blocks = read
        self._shape = shape
        self._left = Counts[int]()
        """Number of bytes of each record that have not passed yet, by entry number."""
        for run in share.runs:
            self._left[run.number] += run.payload_nbytes
        self.nbytes_read = 0

    def fill(self, targets: Mapping[int, Passing]) -> list[int]:
        """Fill ``targets``, which are by entry number; return the numbers of the entries that are filled.

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
        with segment, closing(Lane()) as lane:
            if not self._pass_all(segment, targets, lane):
                logger.info("other ranks of this node have failed or stand still; what they were to read is read here")
        return [number for number in targets if not self._left[number]]

    def _pass_all(self, segment: SharedSegment, targets: Mapping[int, Passing], lane: Lane) -> bool:
        """Read and take all windows; whether they passed to the end.

        This member takes what it has read at once, while the CPU's cache has it. It takes what others read some windows
        later, when that is likely to be there: nobody waits unless one falls far behind.
        """
        behind: deque[tuple[int, Sequence[ReadShare]]] = deque()
        max_behind = self._share.num_windows // 2
        for number, window in enumerate(windows_of(self._share)):
            if not segment.everyone_reaches(Counter.TAKEN, number + 1 - self._share.num_windows):
                return False
            self._read(segment, number, window, lane)
            if not number:
                if not segment.everyone_reaches(Counter.SIGNS, 1):
                    return False
                segment.unlink()
            self._take(segment, number, [piece for piece in window if piece.slot == self._slot], targets)
            behind.append((number, window))
            if len(behind) > max_behind and not self._take_others(segment, *behind.popleft(), targets):
                return False
        return all(self._take_others(segment, *behind.popleft(), targets) for _ in range(len(behind)))

    def _read(self, segment: SharedSegment, number: int, window: Sequence[ReadShare], lane: Lane) -> None:
        """Read and check this member's pieces, and tell the others."""
        start = number % self._share.num_windows * self._share.window_nbytes
        unit_nbytes = max(self._shape.unit_nbytes, BLOCK_NBYTES)  # each read is checked by itself
        reads = [
            functools.partial(self._read_part, piece, at, segment.part(start + piece.at + at, nbytes))
            for piece in window
            if piece.slot == self._slot
            for at in range(0, piece.nbytes, unit_nbytes)
            if (nbytes := min(unit_nbytes, piece.nbytes - at))
        ]
        if self._shape.num_in_flight == 1:
            for read in reads:
                self.nbytes_read += read(lane)
                segment.sign()
        else:
            with closing(finished([Task(read, None) for read in reads], self._shape.num_in_flight)) as ended:
                for _, nbytes in ended:
                    self.nbytes_read += nbytes
                    segment.sign()
        segment.tell(Counter.READ, number + 1)

    def _read_part(self, piece: ReadShare, at: int, into: memoryview, lane: Lane) -> int:
        self._read_blocks(piece.number, piece.start + at, into, lane)
        return len(into)

    def _take_others(
        self, segment: SharedSegment, number: int, window: Sequence[ReadShare], targets: Mapping[int, Passing]
    ) -> bool:
        """Fill targets from what others read of a window, once it is there; False where it does not come.

        Then tell the others that nothing of that window is needed any more.
        """
        wanted = [
            piece
            for piece in window
            if piece.slot != self._slot and piece.number in targets and targets[piece.number].touches(piece)
        ]
        if not segment.everyone_reaches(Counter.READ, number + 1, {piece.slot for piece in wanted}):
            return False
        self._take(segment, number, wanted, targets)
        for piece in window:
            self._left[piece.number] -= piece.nbytes
        segment.tell(Counter.TAKEN, number + 1)
        return True

    def _take(
        self, segment: SharedSegment, number: int, pieces: Sequence[ReadShare], targets: Mapping[int, Passing]
    ) -> None:
        start = number % self._share.num_windows * self._share.window_nbytes
        for piece in pieces:
            if piece.number in targets:
                targets[piece.number].take(piece, segment.part(start + piece.at, piece.nbytes))
                segment.sign()
                advance()
