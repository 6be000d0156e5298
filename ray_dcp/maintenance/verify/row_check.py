"""A record behind others in its row: it begins with the head of the first one, and what is its own lies at its end.

Damage in the head is the first record's. So the others are compared with what its directory says of the head, and with
the head itself only where that does not help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray_dcp.format.checksums import crc32
from ray_dcp.format.names import PAYLOAD_ALIGNMENT
from ray_dcp.format.zip_record import (
    PAYLOAD,
    Directory,
    DirectoryEntry,
    NotARecordError,
    Read,
    RecordEntry,
    placed_entry,
    read_directory,
)
from ray_dcp.maintenance.verify.findings import Fault, Item
from ray_dcp.maintenance.verify.zip_check import find_differing, find_zip_problems


def inspect_following(item: Item, read: Callable[[int, int], bytes]) -> tuple[list[Fault], RecordEntry | None]:
    """What is wrong with a record except in its payload's content, and where that lies if it can be told.

    ``read`` takes offsets in the file.
    """

    def in_record(offset: int, nbytes: int) -> bytes:
        return read(item.start + offset, nbytes)

    try:
        directory = read_directory(in_record, item.nbytes)
        shared, own = _parted(directory, item.shared_nbytes)
        payload = placed_entry(in_record, directory, own, item.shared_nbytes)
    except NotARecordError as error:
        return [item.fault(f"its record is damaged: {error}")], None
    begin, header_at = item.start + item.shared_nbytes, item.start + own.header_at
    faults = []
    # Damaged numbers must not lead to a large read.
    if header_at - begin >= PAYLOAD_ALIGNMENT or any(read(begin, header_at - begin)):
        faults.append(item.fault("bytes in front of its payload's header are not zero", begin, header_at))
    problems = find_zip_problems(in_record, item.nbytes, begin=item.shared_nbytes)
    faults += [item.fault(one.problem, item.start + one.start, item.start + one.end) for one in problems]
    if shared != _shared_by_first(item, in_record) and not _is_head(shared, item.shared_nbytes, in_record):
        at = item.start + directory.offset
        faults.append(item.fault("the zip directory differs from its entries", at, at + directory.nbytes))
    return faults, payload


def _parted(directory: Directory, shared_nbytes: int) -> tuple[Sequence[DirectoryEntry], DirectoryEntry]:
    """The entries of the head, and the payload's."""
    entries = sorted(directory.entries, key=lambda entry: entry.header_at)
    own = entries[-1] if len(entries) > 1 else None
    if own is None or own.header_at < shared_nbytes or own.name.partition("/")[2] != PAYLOAD:
        raise NotARecordError("it has no payload behind the records before it")
    return entries[:-1], own


def _shared_by_first(item: Item, read: Read) -> Sequence[DirectoryEntry] | None:
    try:
        directory = read_directory(read, item.first_nbytes)
    except NotARecordError:
        return None
    return sorted(directory.entries, key=lambda entry: entry.header_at)[:-1]


def _is_head(entries: Sequence[DirectoryEntry], shared_nbytes: int, read: Read) -> bool:
    """Whether ``entries`` stand where they should be, whole, with nothing between them."""
    end = 0
    row = Directory(tuple(entries), shared_nbytes, 0)
    try:
        for entry in entries:
            placed = placed_entry(read, row, entry, end)
            end = placed.offset + placed.nbytes
            if crc32(read(placed.offset, placed.nbytes)) != placed.crc:
                return False
    except NotARecordError:
        return False
    return not list(find_differing(entries, 0, end, read))
