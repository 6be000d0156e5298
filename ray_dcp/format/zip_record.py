"""The zip file that a record is: what stands before and behind a payload, and what a reader finds in one.

``torch.load`` needs three entries: ``data.pkl`` (a pickle that says what the value is), ``data/0`` (a tensor's bytes)
and ``version``. Entries are stored, not compressed. This module knows bytes only, neither torch nor tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ray_dcp.format.checksums import crc32
from ray_dcp.format.names import PAYLOAD_ALIGNMENT

ARCHIVE = "archive"
"""The folder in the record of a value without a payload, as torch names it for a file without a name."""
TENSOR_ARCHIVE = "a"
"""The folder in a tensor's record, which says it six times: ``archive`` would be a tenth of a small record's bytes."""
PICKLE, PAYLOAD, VERSION, BYTEORDER = "data.pkl", "data/0", "version", "byteorder"
_PAYLOAD_NAME = f"{TENSOR_ARCHIVE}/{PAYLOAD}".encode()

LOCAL = struct.Struct("<4s5H3I2H")
"""signature, version, flags, method, time, date, crc, compressed and full size, name length, extra length"""
CENTRAL = struct.Struct("<4s6H3I5H2I")
"""signature, made by, needed, flags, method, time, date, crc, sizes, name, extra, comment lengths, disk, attributes,
offset of the local header"""
END = struct.Struct("<4s4H2IH")
"""signature, disks, entries here and in all, central directory's length and offset, comment length"""
END_64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR_64 = struct.Struct("<4sIQI")
DESCRIPTOR, DESCRIPTOR_64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
LOCAL_SIGNATURE, CENTRAL_SIGNATURE, END_SIGNATURE = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END_64_SIGNATURE, LOCATOR_64_SIGNATURE, DESCRIPTOR_SIGNATURE = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
PADDING_ID = 0x4246
"""Id of the extra field that fills the gap before a payload; torch has the same."""
ZIP64_ID = 1
ZIP64 = 0xFFFFFFFF
"""In a 32-bit field this says that the number, which is as large or larger, stands in a zip64 field."""
LOCAL_CRC_AT, CENTRAL_CRC_AT = 14, 16
"""Offset of the checksum in a local header, and in a line of the directory, in bytes."""
_CRC_IN_DESCRIPTOR_AT = 4
_DATE = 0x21
"""1980-01-01, the first day a zip file knows: equal values make equal records."""
CRC_FOLLOWS = 1 << 3
_PLAIN, _LARGE = 20, 45
"""The version of the zip format that a reader needs, without zip64 fields and with them."""
_MAX_TAIL_NBYTES = 4096
MAX_ROW_NBYTES = 4096
"""Most bytes of a whole row: a reader that does not know of rows may read all of it for the last record."""
MAX_ROW_PAYLOAD_NBYTES = 8
"""Most bytes of a payload in a row: one number. Older readers that convert take longer ones for one memory."""


class NotARecordError(ValueError):
    """The bytes are not a zip file of stored entries; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """A record of one payload, but for the payload and its checksum.

    ``head`` ends where the payload starts, ``payload_at`` bytes into the record; ``tail(crc)`` follows the payload. The
    record is ``nbytes`` long. All of it is plain data, so that a process that has only the payload's bytes can end a
    record.
    """

    head: bytes
    payload_at: int
    payload_nbytes: int
    nbytes: int
    _around_crcs: tuple[bytes, ...]
    """What follows the payload, cut where its checksum stands."""

    def tail(self, crc: int) -> bytes:
        return crc.to_bytes(4, "little").join(self._around_crcs)


def frame_payload(pickled: bytes, payload_nbytes: int, *, position: int = 0, alignment: int = PAYLOAD_ALIGNMENT,
                  crc: int | None = None) -> RecordFrame:  # fmt: skip
    """Frame a payload of ``payload_nbytes`` whose record begins at ``position`` of its file.

    The payload then lies at a multiple of ``alignment`` of the file. Without ``crc`` the payload's checksum stands
    behind it (a data descriptor), since it is known only when the bytes have passed.
    """
    front = _front(pickled, TENSOR_ARCHIVE)
    unpadded = len(front.local) + len(_payload_header(payload_nbytes, crc))
    padding = _padding(-(position + unpadded) % alignment, alignment)
    head = front.local + _payload_header(payload_nbytes, crc, padding)
    tail = _tail(front, len(front.local), len(head), payload_nbytes, 0, described=crc is None)
    descriptor_nbytes = _descriptor(payload_nbytes).size if crc is None else 0
    crcs_at = [_CRC_IN_DESCRIPTOR_AT] if crc is None else []
    crcs_at.append(descriptor_nbytes + len(front.central) + CENTRAL_CRC_AT)
    starts = [0, *(at + 4 for at in crcs_at)]
    parts = tuple(tail[start:end] for start, end in zip(starts, [*crcs_at, len(tail)], strict=True))
    return RecordFrame(head, len(head), payload_nbytes, len(head) + payload_nbytes + len(tail), parts)


def frame_pickle(pickled: bytes) -> bytes:
    """The whole record of a value that is all in its pickle."""
    front = _front(pickled, ARCHIVE)
    return front.local + front.central + _end(front.num_entries, len(front.central), len(front.local))


@dataclass(frozen=True, slots=True)
class SmallRecord:
    """All of a record but its payload, and its place in a row, which begins at a multiple of the alignment."""

    payload_at: int
    """Offset of the payload in the row, in bytes."""
    end: int
    """Offset in the row of what follows the record, in bytes."""
    _parts: tuple[bytes, bytes, bytes, bytes]

    def around(self, content: bytes | memoryview, crc: int) -> bytes:
        """What follows the record before it in the row, up to its own end."""
        checksum = crc.to_bytes(4, "little")
        head, before, behind, end = self._parts
        return b"".join((head, checksum, before, content, behind, checksum, end))


class SmallFrame:
    """The frame of payloads that are all there when they are framed: what is known before, put together once.

    Several tiny ones in a row share their head, the entries in front of the first payload. Each record begins there
    and ends with a directory of its own; between its entries lie the records before it.
    """

    def __init__(self, pickled: bytes, payload_nbytes: int) -> None:
        self._payload_nbytes = payload_nbytes
        self._front = _front(pickled, TENSOR_ARCHIVE)
        frame = frame_payload(pickled, payload_nbytes, crc=0)
        header_at = len(self._front.local)
        self.first = self._record(0, header_at, frame.head)
        """The first record of a row, or the only one."""
        self._row = [self.first]

    def in_row(self, number: int) -> SmallRecord | None:
        """The record behind ``number`` others; None where the row is full. Records are asked for in order."""
        if number < len(self._row):
            return self._row[number]
        if not 0 < self._payload_nbytes <= MAX_ROW_PAYLOAD_NBYTES:
            return None
        begin = self._row[-1].end
        header = _payload_header(self._payload_nbytes)
        gap = -(begin + len(header)) % PAYLOAD_ALIGNMENT
        record = self._record(begin, begin + gap, bytes(gap) + header)
        if record.end > MAX_ROW_NBYTES:
            return None
        self._row.append(record)
        return record

    def _record(self, begin: int, header_at: int, head: bytes) -> SmallRecord:
        payload_at = begin + len(head)
        tail = _tail(self._front, header_at, payload_at, self._payload_nbytes, 0, described=False)
        in_head = header_at - begin + LOCAL_CRC_AT
        in_tail = len(self._front.central) + CENTRAL_CRC_AT
        return SmallRecord(
            payload_at,
            payload_at + self._payload_nbytes + len(tail),
            (head[:in_head], head[in_head + 4 :], tail[:in_tail], tail[in_tail + 4 :]),
        )


@dataclass(frozen=True, slots=True)
class _Front:
    """The entries in front of a payload."""

    local: bytes
    central: bytes
    num_entries: int


def _entry(name: str, content: bytes, header_at: int) -> tuple[bytes, bytes]:
    """An entry, and its line in the directory."""
    encoded, crc, nbytes = name.encode(), crc32(content), len(content)
    local = LOCAL.pack(LOCAL_SIGNATURE, _PLAIN, 0, 0, 0, _DATE, crc, nbytes, nbytes, len(encoded), 0)
    central = CENTRAL.pack(
        CENTRAL_SIGNATURE, 0, _PLAIN, 0, 0, 0, _DATE, crc, nbytes, nbytes, len(encoded), 0, 0, 0, 0, 0, header_at
    )
    return local + encoded + content, central + encoded


_VERSION_ENTRIES = {folder: _entry(f"{folder}/{VERSION}", b"3\n", 0) for folder in (ARCHIVE, TENSOR_ARCHIVE)}


def _front(pickled: bytes, folder: str) -> _Front:
    version = _VERSION_ENTRIES[folder]
    local, central = _entry(f"{folder}/{PICKLE}", pickled, len(version[0]))
    return _Front(version[0] + local, version[1] + central, 2)


def _payload_header(payload_nbytes: int, crc: int | None = 0, padding: bytes = b"") -> bytes:
    """What stands in front of a payload; without ``crc`` that and the size follow it."""
    name = _PAYLOAD_NAME
    large = payload_nbytes >= ZIP64
    known = payload_nbytes if crc is not None else 0
    zip64 = struct.pack("<2H2Q", ZIP64_ID, 16, known, known) if large else b""
    size = ZIP64 if large else known
    header = LOCAL.pack(
        LOCAL_SIGNATURE, _LARGE if large else _PLAIN, 0 if crc is not None else CRC_FOLLOWS, 0, 0, _DATE, crc or 0,
        size, size, len(name), len(zip64) + len(padding),
    )  # fmt: skip
    return b"".join((header, name, zip64, padding))


def _padding(gap: int, alignment: int) -> bytes:
    if not gap:
        return b""
    while gap < 4:  # an extra field has a head of four bytes
        gap += alignment
    return struct.pack("<2H", PADDING_ID, gap - 4) + bytes(gap - 4)


def _descriptor(payload_nbytes: int) -> struct.Struct:
    """What stands right behind a payload whose checksum is not in front of it."""
    return DESCRIPTOR_64 if payload_nbytes >= ZIP64 else DESCRIPTOR


def _tail(front: _Front, header_at: int, payload_at: int, payload_nbytes: int, crc: int, *, described: bool) -> bytes:
    large = payload_nbytes >= ZIP64
    descriptor = b""
    if described:
        descriptor = _descriptor(payload_nbytes).pack(DESCRIPTOR_SIGNATURE, crc, payload_nbytes, payload_nbytes)
    name = _PAYLOAD_NAME
    size = ZIP64 if large else payload_nbytes
    zip64 = struct.pack("<2H2Q", ZIP64_ID, 16, payload_nbytes, payload_nbytes) if large else b""
    central = front.central + CENTRAL.pack(
        CENTRAL_SIGNATURE, 0, _LARGE if large else _PLAIN, CRC_FOLLOWS if described else 0, 0, 0, _DATE,
        crc, size, size, len(name), len(zip64), 0, 0, 0, 0, header_at,
    ) + name + zip64  # fmt: skip
    starts_at = payload_at + payload_nbytes + len(descriptor)
    return descriptor + central + _end(front.num_entries + 1, len(central), starts_at)


def _end(num_entries: int, nbytes: int, starts_at: int) -> bytes:
    """The end of a zip file whose central directory has ``nbytes`` and starts at ``starts_at``."""
    if starts_at < ZIP64:
        return END.pack(END_SIGNATURE, 0, 0, num_entries, num_entries, nbytes, starts_at, 0)
    return (
        END_64.pack(END_64_SIGNATURE, END_64.size - 12, 0, _LARGE, 0, 0, num_entries, num_entries, nbytes, starts_at)
        + LOCATOR_64.pack(LOCATOR_64_SIGNATURE, 0, starts_at + nbytes, 1)
        + END.pack(END_SIGNATURE, 0, 0, num_entries, num_entries, nbytes, ZIP64, 0)
    )


# Reading.


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One stored entry: where its content lies in the record, and its checksum."""

    name: str
    """Name without the archive's folder."""
    offset: int
    nbytes: int
    crc: int


Read = Callable[[int, int], bytes]
"""(offset in the record, nbytes) -> as many bytes. The range lies within the record."""


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """What the directory of a record says of one entry."""

    header_at: int
    """Offset in the record of the entry's own header, which stands in front of its content, in bytes."""
    name: str
    """Name as it is stored, with the archive's folder."""
    nbytes: int
    crc: int
    version: int
    flags: int
    time: int
    date: int


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory of a record: the part of a zip file behind all contents."""

    entries: tuple[DirectoryEntry, ...]
    """The entries in the order in which the directory has them."""
    offset: int
    """Offset of the directory in the record, in bytes."""
    nbytes: int
    """Length up to the end of the zip file, which follows and says where the directory is."""


def read_entries(read: Read, nbytes: int) -> dict[str, RecordEntry]:
    """The entries of the record of ``nbytes`` that ``read`` reads, by name.

    Reads its last part and each entry's header, not the contents. Raises ``NotARecordError`` for everything but
    a zip file without a comment whose entries are stored, apart from each other and within it.
    """
    directory = read_directory(read, nbytes)
    found: dict[str, RecordEntry] = {}
    end = 0
    for entry in sorted(directory.entries, key=lambda entry: entry.header_at):
        placed = placed_entry(read, directory, entry, end)
        end = placed.offset + placed.nbytes
        if placed.name in found:
            raise NotARecordError(f"it has two entries {placed.name!r}")
        found[placed.name] = placed
    return found


def placed_entry(read: Read, directory: Directory, entry: DirectoryEntry, begin: int) -> RecordEntry:
    """The entry with the place of its content, which must lie behind ``begin``. Raises ``NotARecordError`` if not."""
    name = entry.name
    if entry.header_at < begin or entry.header_at + LOCAL.size > directory.offset:
        raise NotARecordError(f"its entry {name!r} lies over another one")
    offset = entry.header_at + _local_nbytes(read(entry.header_at, LOCAL.size), name)
    if offset + entry.nbytes > directory.offset:
        raise NotARecordError(f"its entry {name!r} reaches past its end")
    return RecordEntry(name.partition("/")[2], offset, entry.nbytes, entry.crc)


def read_directory(read: Read, nbytes: int) -> Directory:
    """The directory alone, from the last part of the record. Raises ``NotARecordError`` as ``read_entries`` does."""
    tail_nbytes = min(nbytes, _MAX_TAIL_NBYTES)
    tail = read(nbytes - tail_nbytes, tail_nbytes)
    num_entries, length, offset, ends_at = _read_end(tail, nbytes)
    # Numbers that are damaged must not lead to a read of all there is.
    if offset + length != ends_at:
        raise NotARecordError("its directory does not lie right in front of its end")
    tail_at = nbytes - tail_nbytes
    content = tail[offset - tail_at :][:length] if offset >= tail_at else read(offset, length)
    return Directory(tuple(_directory_entries(content, num_entries)), offset, length)


def _read_end(tail: bytes, nbytes: int) -> tuple[int, int, int, int]:
    """Number of entries, length of the directory, where in the record it starts and where it ends."""
    if len(tail) < END.size or tail[-END.size :][:4] != END_SIGNATURE:
        raise NotARecordError("it has no end of a zip file")
    _, _, _, _, num_entries, length, offset, comment = END.unpack(tail[-END.size :])
    if comment:
        raise NotARecordError("it has a comment")
    tail_at = nbytes - len(tail)
    locator = tail[-END.size - LOCATOR_64.size : -END.size]
    if locator[:4] != LOCATOR_64_SIGNATURE or len(locator) != LOCATOR_64.size:
        return num_entries, length, offset, nbytes - END.size
    at = LOCATOR_64.unpack(locator)[2] - tail_at
    if not 0 <= at <= len(tail) - END_64.size or tail[at : at + 4] != END_64_SIGNATURE:
        raise NotARecordError("its zip64 end is not where it should be")
    *_, num_entries, length, offset = END_64.unpack(tail[at : at + END_64.size])
    return num_entries, length, offset, tail_at + at


def _directory_entries(content: bytes, num_entries: int) -> Iterator[DirectoryEntry]:
    at = 0
    for _ in range(num_entries):
        if at + CENTRAL.size > len(content) or content[at : at + 4] != CENTRAL_SIGNATURE:
            raise NotARecordError("its directory ends too early")
        (_, _, version, flags, method, time, date, crc, stored, size, name_nbytes, extra_nbytes, comment_nbytes, _, _,
         _, header_at) = CENTRAL.unpack_from(content, at)  # fmt: skip
        at += CENTRAL.size
        raw, extra = content[at : at + name_nbytes], content[at + name_nbytes :][:extra_nbytes]
        at += name_nbytes + extra_nbytes + comment_nbytes
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise NotARecordError(f"its entry {raw!r} has no name") from None
        if method or flags & 1:
            raise NotARecordError(f"its entry {name!r} is compressed or encrypted")
        size, stored, header_at = _large_numbers(extra, (size, stored, header_at), name)
        if stored != size:
            raise NotARecordError(f"its entry {name!r} has two sizes")
        yield DirectoryEntry(header_at, name, size, crc, version, flags, time, date)
    if at != len(content):
        raise NotARecordError("its directory has something behind it")


def _large_numbers(extra: bytes, numbers: tuple[int, ...], name: str) -> tuple[int, ...]:
    """``numbers``, those that did not fit taken from the zip64 field in ``extra``."""
    if ZIP64 not in numbers:
        return numbers
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == ZIP64_ID:
            count = min(length, len(extra) - 4) // 8
            large = list(struct.unpack_from(f"<{count}Q", extra, 4))
            if len(large) < numbers.count(ZIP64):
                break
            return tuple(large.pop(0) if number == ZIP64 else number for number in numbers)
        extra = extra[4 + length :]
    raise NotARecordError(f"its entry {name!r} has no size")


def _local_nbytes(header: bytes, name: str) -> int:
    if len(header) != LOCAL.size or header[:4] != LOCAL_SIGNATURE:
        raise NotARecordError(f"its entry {name!r} has no header")
    name_nbytes, extra_nbytes = LOCAL.unpack(header)[-2:]
    if name_nbytes != len(name.encode()):
        raise NotARecordError(f"its entry {name!r} has another name in its header")
    return LOCAL.size + int(name_nbytes) + int(extra_nbytes)
