"""Decides which ranks of a node read which stored blocks for each other, from what each of them wants.

::

    rank: ShareOffer -> plan_shares (all offers, the coordinator) -> NodeShare -> windows_of (each rank) -> pieces

The same offers give the same result wherever and whenever it is computed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ray_dcp.format.names import BLOCK_NBYTES, PAYLOAD_ALIGNMENT
from ray_dcp.store.ranges import joined

MAX_MEMORY_NBYTES = 256 * BLOCK_NBYTES
"""Most memory of a node, in bytes, for all windows that are in memory at once."""
MIN_WINDOW_NBYTES = 2 * BLOCK_NBYTES
"""Least size of a window, in bytes: where shared memory has no room for it, nothing is shared."""
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ShareRules:
    """The rules for what is worth sharing, for one kind of store."""

    min_repeats: float
    """Number of ranks of a node that must on average want a block of a record."""
    rank_nbytes: int
    """Bytes of a window that each rank reads; whole blocks."""
    num_windows: int = 2
    """Number of windows that are in memory at once: some are read while others are taken from."""
    straight_weight: float = 1.0
    """Weight of a rank that would read straight to where the bytes belong: it has one copy less to save."""


@dataclass(frozen=True, slots=True)
class Want:
    """A run of blocks that a rank wants of one record."""

    number: int
    """Number of the record's entry in the manifest."""
    nbytes: int
    """Length of the record's payload, in bytes."""
    first: int
    """First block of the run."""
    end: int
    """The block behind the last one of the run."""
    is_straight: bool = False
    """Whether the rank would read it straight to where it belongs, not through memory of the reader's."""

    @property
    def payload_nbytes(self) -> int:
        """Length of the run, in bytes; the payload's last block may be short."""
        return min(self.end * BLOCK_NBYTES, self.nbytes) - self.first * BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class ShareOffer:
    """What a rank could have others read for it."""

    memory: str
    """Name of the memory: ranks with the same name can share memory, and mean the same by the number of an entry."""
    free_nbytes: int
    """Free bytes of that memory."""
    token: str
    """A name for the memory of this load, which no other load ever has."""
    rules: ShareRules
    packed: bytes
    """The rank's ``Want``s, as ``pack_wants`` packs them: a rank may have thousands."""


def pack_wants(wants: Iterable[Want]) -> bytes:
    """Pack ``wants``, at most one for each record, for a ``ShareOffer``."""
    rows = [(want.number, want.nbytes, want.first, want.end, want.is_straight) for want in wants]
    return np.array(rows, dtype=np.int64).tobytes()


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What some ranks of a node read for each other."""

    token: str
    members: tuple[int, ...]
    """The ranks that take part. A member's place in here is its slot."""
    runs: tuple[Want, ...]
    """Disjoint runs, sorted by number and block: they have each block that a member wants of these records once."""
    window_nbytes: int
    """Size of a window, in bytes; whole blocks."""
    num_windows: int
    """Number of windows that are in memory at once."""

    @property
    def nbytes(self) -> int:
        """Length of all runs together, in bytes."""
        return sum(run.payload_nbytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class ReadShare:
    """A part of one payload in one window, from one block to another, that one member reads."""

    number: int
    """Number of the record's entry in the manifest."""
    start: int
    """First byte in the payload."""
    end: int
    """The byte of the payload behind the last one."""
    at: int
    """Offset in the window where the part goes, in bytes; a multiple of the payload alignment."""
    slot: int
    """Slot of the member that reads it."""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def plan_shares(offers: Sequence[ShareOffer | None]) -> list[NodeShare | None]:
    """The share of each rank, in rank order; None for a rank that reads everything by itself."""
    shares: list[NodeShare | None] = [None] * len(offers)
    by_memory: dict[str, list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        if offer is not None and offer.packed:
            by_memory[offer.memory].append(rank)
    for ranks in by_memory.values():
        if len(ranks) > 1:
            share = _plan_node([(rank, offer) for rank in ranks if (offer := offers[rank]) is not None])
            for rank in share.members if share is not None else ():
                shares[rank] = share
    return shares


def _plan_node(offers: Sequence[tuple[int, ShareOffer]]) -> NodeShare | None:
    rules = offers[0][1].rules
    tables = [np.frombuffer(offer.packed, dtype=np.int64).reshape(-1, 5) for _, offer in offers]
    rows = np.concatenate(tables)
    owners = np.repeat([rank for rank, _ in offers], [len(table) for table in tables])
    # A block is wanted by no more ranks than want some of its record: that alone rules out most records.
    _, which, counts = np.unique(rows[:, 0], return_inverse=True, return_counts=True)
    often = counts[which] >= rules.min_repeats
    rows, owners = rows[often], owners[often]
    order = np.lexsort((rows[:, 3], rows[:, 2], rows[:, 0]))
    wanted_by: dict[int, list[tuple[Want, int]]] = defaultdict(list)
    for row, owner in zip(rows[order].tolist(), owners[order].tolist(), strict=True):
        wanted_by[row[0]].append((Want(row[0], row[1], row[2], row[3], bool(row[4])), owner))
    runs: list[Want] = []
    members: set[int] = set()
    for wanted in wanted_by.values():
        wants = [want for want, _ in wanted]
        once = [
            Want(run[0].number, run[0].nbytes, first, end)
            for first, end, run in joined(wants, lambda want: (want.first, want.end))
        ]
        repeats = sum((want.end - want.first) * (rules.straight_weight if want.is_straight else 1) for want in wants)
        if repeats >= rules.min_repeats * sum(run.end - run.first for run in once) - _ROUNDING:
            runs += once
            members.update(owner for _, owner in wanted)
    if not runs:
        return None
    room = min(MAX_MEMORY_NBYTES, min(offer.free_nbytes for _, offer in offers) // 2) // rules.num_windows
    window_nbytes = min(len(members) * rules.rank_nbytes, room) // BLOCK_NBYTES * BLOCK_NBYTES
    if window_nbytes < MIN_WINDOW_NBYTES:
        return None
    return NodeShare(offers[0][1].token, tuple(sorted(members)), tuple(runs), window_nbytes, rules.num_windows)


def windows_of(share: NodeShare) -> Iterator[tuple[ReadShare, ...]]:
    """Yield the windows in order; in each every member reads one run of neighbouring pieces, all of about one size."""
    spans: list[tuple[Want, int, int, int]] = []
    at = 0
    for run in share.runs:
        start, end = run.first * BLOCK_NBYTES, min(run.end * BLOCK_NBYTES, run.nbytes)
        while start < end:
            room = (share.window_nbytes - at) // BLOCK_NBYTES * BLOCK_NBYTES
            if not room:
                yield tuple(_assigned(spans, len(share.members)))
                spans, at = [], 0
                continue
            until = min(end, start + room)
            spans.append((run, start, until, at))
            at = -(-(at + until - start) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
            start = until
    if spans:
        yield tuple(_assigned(spans, len(share.members)))


def _assigned(spans: Sequence[tuple[Want, int, int, int]], num_members: int) -> Iterator[ReadShare]:
    """Share ``spans`` out to the members, cut at blocks, so that no member reads more than a block above its part."""
    total = sum(until - start for _, start, until, _ in spans)
    passed = 0
    for run, start, until, at in spans:
        while start < until:
            slot = passed * num_members // total
            left = -(-total * (slot + 1) // num_members) - passed
            end = min(until, start + -(-left // BLOCK_NBYTES) * BLOCK_NBYTES)
            yield ReadShare(run.number, start, end, at, slot)
            passed, at, start = passed + end - start, at + end - start, end


def segment_nbytes(share: NodeShare) -> int:
    """Bytes of memory that the windows take; where there are fewer than ``num_windows``, only what they need."""
    first = list(itertools.islice(windows_of(share), share.num_windows))
    if len(first) == share.num_windows:
        return share.window_nbytes * share.num_windows  # a later one in the last's place may be longer than that
    last = first[-1][-1]
    return share.window_nbytes * (len(first) - 1) + last.at + last.nbytes
