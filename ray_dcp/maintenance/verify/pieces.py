"""Reading files in large pieces, several at a time, and checking each piece in memory.

What a record's structure says is needed before its contents can be checked. A record that fits into a piece is
inspected there, together with its neighbours; the structure of a larger one is read first, by itself.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ray_dcp.errors import ObjectNotFoundError, ObjectTooShortError
from ray_dcp.format.checksums import crc32
from ray_dcp.maintenance.verify.findings import Fault, FilePlan, Item, Unchecked
from ray_dcp.maintenance.verify.record_check import InspectedRecord, Span, inspect_record
from ray_dcp.store.parallel import in_parallel
from ray_dcp.store.ranges import joined
from ray_dcp.store.reading import get_into
from ray_dcp.store.store import Store

READ_NBYTES = 16 << 20
NUM_READERS = 4
"""Number of threads: they compute checksums side by side, and a bucket answers one while another one checks."""
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class PartOfSpan:
    """The part of a span that lies in one piece."""

    span: Span
    start: int
    """Offset in the file, in bytes."""
    nbytes: int

    @property
    def is_whole(self) -> bool:
        return self.nbytes == self.span.nbytes


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A range of a file that is read at once, and what is to be checked in it."""

    file: str
    start: int
    nbytes: int
    items: Sequence[Item] = ()
    """Items whose whole records lie in it, to be inspected."""
    parts: Sequence[PartOfSpan] = ()
    """Parts of the contents of records that have been inspected."""
    seen: Sequence[tuple[int, bytes]] = ()
    """Bytes that were read and checked before, with their offsets in the file: they must still be the same."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class CheckedPiece:
    """What a piece turned out to be."""

    piece: FilePiece
    faults: Sequence[Fault] = ()
    unchecked: Sequence[Unchecked] = ()
    inspected: Sequence[InspectedRecord] = ()
    checked: Sequence[PartOfSpan] = ()
    """Whole spans that were checked, right or wrong."""
    crcs: Sequence[tuple[PartOfSpan, int]] = ()
    """Parts of spans that reach beyond the piece, each with its CRC-32."""


def is_large(item: Item, small_nbytes: int) -> bool:
    """Whether a record's structure is read by itself, before its content."""
    return item.padding + item.nbytes > small_nbytes


def inspect_large(store: Store, item: Item) -> InspectedRecord:
    """Inspect the structure of a record by small reads. Bytes that are missing are a fault."""
    try:
        return inspect_record(item, lambda start, nbytes: store.get(item.file, start, nbytes))
    except (ObjectNotFoundError, ObjectTooShortError) as error:
        return InspectedRecord(item, [_lost(item, error)])


def small_pieces(file: FilePlan, small_nbytes: int) -> Iterator[FilePiece]:
    """The small records, in as few pieces as they fit in. Only neighbours are read together."""
    small = [item for item in file.items if not is_large(item, small_nbytes)]
    for start, end, rows in joined(_rows(small), lambda row: (row[0].begin, row[-1].end), max_length=READ_NBYTES):
        yield FilePiece(file.key, start, end - start, tuple(item for row in rows for item in row))


def _rows(items: Sequence[Item]) -> list[list[Item]]:
    """Each item with those behind it that share bytes with it: they are inspected together."""
    rows: list[list[Item]] = []
    for item in items:
        if item.shared_nbytes and rows:
            rows[-1].append(item)
        else:
            rows.append([item])
    return rows


def span_pieces(item: Item, spans: Iterable[Span]) -> Iterator[FilePiece]:
    """Pieces that hold these spans of one record, which are in the order of the file; nothing else is read."""
    parts: list[PartOfSpan] = []
    room = READ_NBYTES
    for span in spans:
        if parts and span.start != parts[-1].start + parts[-1].nbytes:
            yield _parts_piece(item, parts)
            parts, room = [], READ_NBYTES
        at = span.start
        while at < span.end:
            nbytes = min(span.end - at, room)
            parts.append(PartOfSpan(span, at, nbytes))
            at += nbytes
            room -= nbytes
            if not room:
                yield _parts_piece(item, parts)
                parts, room = [], READ_NBYTES
    if parts:
        yield _parts_piece(item, parts)


def every_byte(file: FilePlan, inspected: Mapping[int, InspectedRecord], small_nbytes: int) -> Iterator[FilePiece]:
    """All of a file, in order. ``inspected`` has each large record by where its own bytes begin."""
    end = 0
    small = {piece.start: piece for piece in small_pieces(file, small_nbytes)}
    for item in file.items:
        begin = item.begin
        if begin < end:
            continue  # in the piece of its neighbours
        yield from _unlisted(file.key, end, begin)
        if begin in small:
            yield small[begin]
            end = small[begin].end
        else:
            yield from _tiles(item, inspected[begin])
            end = item.end
    yield from _unlisted(file.key, end, file.nbytes)


def _unlisted(key: str, start: int, end: int) -> Iterator[FilePiece]:
    """Bytes that belong to no record."""
    for at in range(start, end, READ_NBYTES):
        yield FilePiece(key, at, min(READ_NBYTES, end - at))


def _tiles(item: Item, inspected: InspectedRecord) -> Iterator[FilePiece]:
    spans = inspected.spans()
    span = next(spans, None)
    for at in range(item.begin, item.end, READ_NBYTES):
        end = min(at + READ_NBYTES, item.end)
        parts = []
        while span is not None and span.start < end:
            start = max(span.start, at)
            parts.append(PartOfSpan(span, start, min(span.end, end) - start))
            if span.end > end:
                break
            span = next(spans, None)
        seen = [
            (max(start, at), content[max(0, at - start) : max(0, end - start)]) for start, content in inspected.seen
        ]
        yield FilePiece(item.file, at, end - at, (), parts, [(start, content) for start, content in seen if content])


def _parts_piece(item: Item, parts: Sequence[PartOfSpan]) -> FilePiece:
    begin = parts[0].start
    return FilePiece(item.file, begin, parts[-1].start + parts[-1].nbytes - begin, (), tuple(parts))


def check_piece(store: Store, piece: FilePiece, view: memoryview) -> CheckedPiece:
    """Read a piece into ``view``, which is as long, and check it. Bytes that are missing are a fault."""
    try:
        get_into(store, piece.file, piece.start, [view])
    except (ObjectNotFoundError, ObjectTooShortError) as error:
        concerned = {item.begin: item for item in (*piece.items, *(part.span.item for part in piece.parts))}
        faults = [_lost(item, error) for item in concerned.values()]
        return CheckedPiece(piece, faults or [_unlisted_lost(piece, error)])
    inspected = [
        inspect_record(item, lambda start, nbytes: bytes(view[start - piece.start :][:nbytes])) for item in piece.items
    ]
    whole = [PartOfSpan(span, span.start, span.nbytes) for record in inspected for span in record.spans()]
    faults = [fault for record in inspected for fault in record.faults]
    faults += [
        Fault(piece.file, start, start + len(content), "two reads of these bytes differ")
        for start, content in piece.seen
        if view[start - piece.start :][: len(content)] != content
    ]
    crcs = []
    for part in itertools.chain(whole, piece.parts):
        crc = crc32(view[part.start - piece.start :][: part.nbytes])
        if not part.is_whole:
            crcs.append((part, crc))
        elif crc != part.span.crc:
            faults.append(part.span.fault())
    unchecked = [one for record in inspected for one in record.unchecked]
    whole += [part for part in piece.parts if part.is_whole]
    return CheckedPiece(piece, faults, unchecked, inspected, whole, crcs)


def _lost(item: Item, error: Exception) -> Fault:
    missing = isinstance(error, ObjectNotFoundError)
    return item.fault("its file is missing" if missing else "its file ends too early")


def _unlisted_lost(piece: FilePiece, error: Exception) -> Fault:
    missing = isinstance(error, ObjectNotFoundError)
    return Fault(piece.file, piece.start, piece.end, "the file is missing" if missing else "the file ends too early")


def read_ahead(
    work: Callable[[_T], _R], tasks: Iterable[_T], *, max_ahead: int = 2 * NUM_READERS
) -> Generator[_R, None, None]:
    """Yield what ``work`` makes of each task, in the order of the tasks; see ``in_parallel``."""
    for _, made in in_parallel(work, tasks, max_at_once=NUM_READERS, in_order=True, max_ahead=max_ahead):
        yield made


class ThreadBuffers(threading.local):
    """One buffer for each thread, which its next piece overwrites."""

    def __init__(self) -> None:
        self._held = bytearray()

    def get(self, nbytes: int) -> memoryview:
        if len(self._held) < nbytes:
            self._held = bytearray(max(nbytes, 1 << 20))
        return memoryview(self._held)[:nbytes]
