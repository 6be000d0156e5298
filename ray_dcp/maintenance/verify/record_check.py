"""One record: its structure checked, and what its contents should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ray_dcp.format.checksums import Check, crc32, crc_of_blocks
from ray_dcp.format.manifest import Entry
from ray_dcp.format.zip_record import END, LOCAL_SIGNATURE, PAYLOAD, NotARecordError, RecordEntry, read_entries
from ray_dcp.maintenance.verify.findings import Fault, Item, Unchecked
from ray_dcp.maintenance.verify.row_check import inspect_following
from ray_dcp.maintenance.verify.zip_check import find_zip_problems

_END_NBYTES = 4096
_MAX_ENTRY_NBYTES = 64 << 20
"""Far more than any entry has but the payload: a damaged number must not lead to a read of all there is."""
_OLD_FORMATS = b"\x80"
"""What a pickle begins with; torch wrote pickles before it wrote zip files."""
Read = Callable[[int, int], bytes]
"""(offset in the file, nbytes) -> as many bytes"""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of content under one checksum."""

    item: Item
    start: int
    """Offset in the file, in bytes."""
    nbytes: int
    crc: int
    name: str
    """What it is, for messages."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def fault(self) -> Fault:
        return self.item.content_fault(f"{self.name} fails its checksum", self.start, self.end)


@dataclass(frozen=True, slots=True)
class InspectedRecord:
    """What a record's structure says; its contents are still to be checked."""

    item: Item
    faults: Sequence[Fault] = ()
    unchecked: Sequence[Unchecked] = ()
    entries: Sequence[RecordEntry] = ()
    """The entries whose checksums count: those of a record that no manifest describes."""
    seen: Sequence[tuple[int, bytes]] = ()
    """All bytes outside of ``spans``, with their offsets in the file."""

    @property
    def num_spans(self) -> int:
        return len(self.item.entry.block_crcs) if self.item.entry is not None else len(self.entries)

    def spans(self) -> Iterator[Span]:
        """Everything that has a checksum, in the order of the file."""
        item, listed = self.item, self.item.entry
        if listed is not None:
            many = len(listed.block_crcs) > 1
            for number, (start, nbytes, crc) in enumerate(Check(listed.payload_nbytes, listed.block_crcs).blocks()):
                name = f"block {number} of its payload" if many else "its payload"
                yield Span(item, listed.payload_offset + start, nbytes, crc, name)
        for entry in self.entries:
            yield Span(item, item.start + entry.offset, entry.nbytes, entry.crc, f"the zip entry {entry.name}")


def inspect_record(item: Item, read: Read) -> InspectedRecord:
    """Check all of a record and the padding in front of it, except what ``spans`` of the result has.

    Little is asked of ``read``: a record's ends, and what stands between its entries. What it raises passes.
    """
    remembered = _Remembered(read)
    if item.shared_nbytes:
        return _inspect_following(item, remembered)
    remembered.prefetch(item)
    padding = remembered(item.start - item.padding, item.padding)
    faults = [item.fault("bytes in front of its record are not zero", item.start - item.padding, item.start)]
    faults = faults if any(padding) else []
    entry = item.entry
    if entry is None:
        inspected = _inspect_unlisted(item, remembered, faults)
    elif entry.payload_offset == item.start and entry.payload_nbytes == item.nbytes:
        inspected = InspectedRecord(item, faults)
    else:
        faults += _listed_faults(item, entry, remembered)
        inspected = InspectedRecord(item, faults)
    return InspectedRecord(item, inspected.faults, inspected.unchecked, inspected.entries, remembered.ranges)


class _Remembered:
    """A ``Read`` that keeps what it has read, and asks for none of it twice."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.ranges: list[tuple[int, bytes]] = []

    def prefetch(self, item: Item) -> None:
        """Read the ends of a record: they hold its structure, except perhaps a few bytes."""
        begin = item.start - item.padding
        payload = item.entry is not None and item.entry.payload_nbytes > 0
        head = item.entry.payload_offset - begin if payload and item.entry is not None else _END_NBYTES
        self(begin, min(head, item.end - begin))
        self(max(begin, item.end - _END_NBYTES), min(_END_NBYTES, item.end - begin))

    def __call__(self, start: int, nbytes: int) -> bytes:
        for at, content in self.ranges:
            if at <= start and start + nbytes <= at + len(content):
                return content[start - at : start - at + nbytes]
        content = self._read(start, nbytes)
        self.ranges.append((start, content))
        return content


def _listed_faults(item: Item, entry: Entry, read: Read) -> list[Fault]:
    """What is wrong with the zip file around a payload that the manifest describes."""
    try:
        entries = read_entries(lambda offset, nbytes: read(item.start + offset, nbytes), item.nbytes)
    except NotARecordError as error:
        return [item.content_fault(f"its record is damaged: {error}", item.start, item.end)]
    faults = _structure_faults(item, read)
    faults += _payload_faults(item, entry, entries.pop(PAYLOAD, None))
    for other in entries.values():
        start = item.start + other.offset
        if other.nbytes > _MAX_ENTRY_NBYTES or crc32(read(start, other.nbytes)) != other.crc:
            faults.append(
                item.content_fault(f"the zip entry {other.name} fails its checksum", start, start + other.nbytes)
            )
    return faults


def _payload_faults(item: Item, entry: Entry, payload: RecordEntry | None) -> list[Fault]:
    """What the record says of its payload and the manifest does not."""
    if entry.payload_nbytes:
        if payload is None or (item.start + payload.offset, payload.nbytes) != (
            entry.payload_offset, entry.payload_nbytes
        ):  # fmt: skip
            return [item.fault(f"its record has no {PAYLOAD} where the manifest says")]
        if payload.crc != crc_of_blocks(entry.block_crcs, entry.payload_nbytes):
            return [item.fault(f"its record has another checksum for {PAYLOAD} than the manifest")]
    elif payload is not None and payload.nbytes:
        return [item.fault(f"its record has {payload.nbytes} bytes where the manifest says none")]
    return []


def _inspect_following(item: Item, read: _Remembered) -> InspectedRecord:
    """Inspect what is its own of a record that shares the head of those before it."""
    faults, payload = inspect_following(item, read)
    if item.entry is not None:
        # Where its record tells nothing of its payload, that is a fault already.
        faults += _payload_faults(item, item.entry, payload) if payload is not None else []
        return InspectedRecord(item, faults, (), (), read.ranges)
    return InspectedRecord(item, faults, (), [payload] if payload is not None else [], read.ranges)


def _structure_faults(item: Item, read: Read) -> list[Fault]:
    found = find_zip_problems(lambda offset, nbytes: read(item.start + offset, nbytes), item.nbytes)
    return [item.content_fault(one.problem, item.start + one.start, item.start + one.end) for one in found]


def _inspect_unlisted(item: Item, read: Read, faults: list[Fault]) -> InspectedRecord:
    """Inspect a record that no manifest describes, by its own checksums where it has any."""
    if item.not_checkable:
        return InspectedRecord(item, faults, [item.unchecked(item.not_checkable)])
    try:
        entries = read_entries(lambda offset, nbytes: read(item.start + offset, nbytes), item.nbytes)
    except NotARecordError as error:
        if _is_no_zip_file(item, read):
            return InspectedRecord(item, faults, [item.unchecked("it is not a zip file, so it has no checksums")])
        return InspectedRecord(
            item, [*faults, item.content_fault(f"its record is damaged: {error}", item.start, item.end)]
        )
    faults = [*faults, *_structure_faults(item, read)]
    if not any(entry.crc for entry in entries.values()):
        return InspectedRecord(item, faults, [item.unchecked("torch wrote it with its checksums turned off")])
    faults += [
        item.fault(f"the zip entry {entry.name} is empty and has a checksum")
        for entry in entries.values()
        if entry.crc and not entry.nbytes
    ]
    filled = [entry for entry in entries.values() if entry.nbytes]
    return InspectedRecord(item, faults, (), sorted(filled, key=lambda entry: entry.offset))


def _is_no_zip_file(item: Item, read: Read) -> bool:
    """Whether neither end says that it is a zip file, and it begins as other formats do."""
    begin = read(item.start, min(9, item.nbytes))
    end = read(max(item.start, item.end - END.size), min(END.size, item.nbytes))
    is_zip = begin.startswith(LOCAL_SIGNATURE[:2]) or end.startswith(LOCAL_SIGNATURE[:2])
    return not is_zip and (begin.startswith(_OLD_FORMATS) or begin[8:] == b"{")
