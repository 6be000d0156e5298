"""Checks that every byte of a record outside of its contents is as its writer left it.

A zip file says most things twice, and what it says once is fixed by how records are written: so each of these bytes
can be told from what the others say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ray_dcp.format.zip_record import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    CRC_FOLLOWS,
    DESCRIPTOR,
    DESCRIPTOR_64,
    DESCRIPTOR_SIGNATURE,
    END,
    END_64,
    END_64_SIGNATURE,
    END_SIGNATURE,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR_64,
    LOCATOR_64_SIGNATURE,
    PADDING_ID,
    ZIP64,
    ZIP64_ID,
    Directory,
    DirectoryEntry,
    Read,
    read_directory,
)

_MADE_BY_64 = (0, 0x31E)
"""What a zip64 end says that made it: in ray_dcp's records and in torch's."""
_VERSION_64 = 45
_TORCHS_VERSION = 0
"""The version of the zip format that torch gives for every entry."""


@dataclass(frozen=True, slots=True)
class ZipProblem:
    """Bytes of a record that are not as they were written."""

    start: int
    """Offset of the first byte in the record."""
    end: int
    """Offset behind the last byte in the record."""
    problem: str


def find_zip_problems(read: Read, nbytes: int, *, begin: int = 0) -> Iterator[ZipProblem]:
    """Each part of a record's zip structure that is damaged; contents are not looked at.

    For a record that ``zip_record.read_entries`` reads. All of the structure is read, most of it twice; of entries in
    front of ``begin`` only their lines in the directory.
    """
    directory = read_directory(read, nbytes)
    directory_end = directory.offset + directory.nbytes
    own = sorted((one for one in directory.entries if one.header_at >= begin), key=lambda one: one.header_at)
    differing = list(find_differing(own, own[0].header_at if begin else 0, directory.offset, read))
    yield from differing
    if differing or read(directory.offset, directory.nbytes) != b"".join(map(_central, directory.entries)):
        # Where two disagree, either may be the damaged one.
        problem = "the zip directory is damaged" if not differing else "the zip directory differs from its entries"
        yield ZipProblem(directory.offset, directory_end, problem)
    if read(directory_end, nbytes - directory_end) not in _ends(directory):
        yield ZipProblem(directory_end, nbytes, "the end of the zip file is damaged")


def find_differing(entries: Sequence[DirectoryEntry], begin: int, end_at: int, read: Read) -> Iterator[ZipProblem]:
    """What stands around the contents of ``entries`` and is not what the directory says.

    They are in their order, begin at ``begin`` and end at ``end_at``.
    """
    before, end = None, begin
    for entry in entries:
        name_nbytes, extra_nbytes = LOCAL.unpack(read(entry.header_at, LOCAL.size))[-2:]
        header_nbytes = LOCAL.size + name_nbytes + extra_nbytes
        yield from _descriptor_problems(before, end, entry.header_at, read)
        header = read(entry.header_at, header_nbytes)
        if not _is_right_header(entry, header[: LOCAL.size], header[LOCAL.size :], name_nbytes):
            problem = f"the zip header of {_plain(entry)} differs from the zip directory"
            yield ZipProblem(entry.header_at, entry.header_at + header_nbytes, problem)
        before, end = entry, entry.header_at + header_nbytes + entry.nbytes
    yield from _descriptor_problems(before, end, end_at, read)


def _plain(entry: DirectoryEntry) -> str:
    return entry.name.partition("/")[2]


def _descriptor_problems(entry: DirectoryEntry | None, start: int, end: int, read: Read) -> Iterator[ZipProblem]:
    """From ``start`` to ``end`` lies the checksum of ``entry`` where its header says so, else there must be nothing."""
    expected = [b""]
    if entry is not None and entry.flags & CRC_FOLLOWS:
        packers = (DESCRIPTOR, DESCRIPTOR_64) if entry.nbytes < ZIP64 else (DESCRIPTOR_64,)
        expected = [one.pack(DESCRIPTOR_SIGNATURE, entry.crc, entry.nbytes, entry.nbytes) for one in packers]
    # Damaged numbers must not lead to a read of all there is.
    if end - start > DESCRIPTOR_64.size or read(start, end - start) not in expected:
        what = f"what stands behind {_plain(entry)}" if entry is not None else "what stands in front"
        yield ZipProblem(start, max(end, start + 1), f"{what} differs from the zip directory")


def _is_right_header(entry: DirectoryEntry, header: bytes, names: bytes, name_nbytes: int) -> bool:
    signature, version, flags, method, time, date, crc, stored, size, _, _ = LOCAL.unpack(header)
    follows = bool(flags & CRC_FOLLOWS)
    known = (signature, version, flags, method, time, date) == (
        LOCAL_SIGNATURE, entry.version, entry.flags, 0, entry.time, entry.date
    )  # fmt: skip
    numbers = (crc, stored, size)
    in_field = min(entry.nbytes, ZIP64)
    allowed = [(entry.crc, in_field, in_field)]
    if follows:
        # What is not known yet is 0, or marked as standing in the zip64 field.
        allowed = [(0, 0, 0), (0, ZIP64, ZIP64)] if entry.nbytes >= ZIP64 else [(0, 0, 0)]
    return (
        known
        and numbers in allowed
        and names[:name_nbytes] == entry.name.encode()
        and _is_right_extra(names[name_nbytes:], entry, follows=follows)
    )


def _is_right_extra(extra: bytes, entry: DirectoryEntry, *, follows: bool) -> bool:
    while extra:
        if len(extra) < 4:
            return False
        kind, nbytes = struct.unpack_from("<2H", extra)
        content, extra = extra[4 : 4 + nbytes], extra[4 + nbytes :]
        if len(content) != nbytes:
            return False
        if kind == PADDING_ID:
            # ray_dcp fills it with zeros, torch with Z.
            if content.strip(b"\0") and content.strip(b"Z"):
                return False
        elif kind == ZIP64_ID:
            if content != _zip64_field(entry, follows=follows):
                return False
        else:
            return False
    return True


def _zip64_field(entry: DirectoryEntry, *, follows: bool) -> bytes:
    """What a header's field of large numbers holds."""
    if entry.version == _TORCHS_VERSION:  # it knows one of two sizes then
        sizes = [entry.nbytes, 0] if entry.nbytes >= ZIP64 else []
        numbers = [*sizes, *([entry.header_at] if entry.header_at >= ZIP64 else [])]
    else:
        numbers = [0, 0] if follows else [entry.nbytes, entry.nbytes]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _central(entry: DirectoryEntry) -> bytes:
    """What the directory must say of ``entry``."""
    name = entry.name.encode()
    large = [number for number in (entry.nbytes, entry.nbytes, entry.header_at) if number >= ZIP64]
    extra = struct.pack(f"<2H{len(large)}Q", ZIP64_ID, 8 * len(large), *large) if large else b""
    nbytes = min(entry.nbytes, ZIP64)
    return b"".join((
        CENTRAL.pack(
            CENTRAL_SIGNATURE, 0, entry.version, entry.flags, 0, entry.time, entry.date, entry.crc, nbytes, nbytes,
            len(name), len(extra), 0, 0, 0, 0, min(entry.header_at, ZIP64),
        ),
        name,
        extra,
    ))  # fmt: skip


def _ends(directory: Directory) -> Sequence[bytes]:
    """The ways in which a zip file with this directory may end."""
    count, nbytes, offset = len(directory.entries), directory.nbytes, directory.offset
    end = END.pack(END_SIGNATURE, 0, 0, count, count, nbytes, min(offset, ZIP64), 0)
    locator = LOCATOR_64.pack(LOCATOR_64_SIGNATURE, 0, offset + nbytes, 1)
    large = [
        END_64.pack(END_64_SIGNATURE, END_64.size - 12, by, _VERSION_64, 0, 0, count, count, nbytes, offset)
        for by in _MADE_BY_64
    ]
    return [*([end] if offset < ZIP64 else []), *(one + locator + end for one in large)]
