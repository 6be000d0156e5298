"""Finds the payload in a record that torch wrote, so that it can be read as one of ray_dcp's own."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

import torch

from ray_dcp.format.checksums import crc32
from ray_dcp.format.tensor_pickle import tensor_pickle, torchs_pickle
from ray_dcp.format.zip_record import (
    BYTEORDER,
    PAYLOAD,
    PICKLE,
    VERSION,
    NotARecordError,
    Read,
    RecordEntry,
    read_entries,
)

_MAX_SMALL_NBYTES = 1 << 16
"""Most bytes of any entry but the payload."""


@dataclass(frozen=True, slots=True)
class FoundPayload:
    """The place of a payload in its record, and its checksum."""

    offset: int
    """Offset in the record, in bytes."""
    nbytes: int
    crc: int | None
    """The payload's CRC-32; None where it was written with torch's checksums turned off: torch then puts 0 for all."""


def find_payload(read: Read, record_nbytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> FoundPayload | None:
    """The payload of a record that holds a contiguous CPU tensor of this dtype and shape.

    None where it holds something else that ``torch.load`` may know: a transposed tensor, an older layout, a class.
    Where a payload is returned, the other entries that count have been checked. Raises ``NotARecordError`` where the
    record is damaged.
    """
    entries = read_entries(read, record_nbytes)
    payload = entries.get(PAYLOAD)
    if payload is None or PICKLE not in entries or VERSION not in entries:
        return None
    has_checksums = any(entry.crc for entry in entries.values())
    contents = {name: _content(read, entry, has_checksums) for name, entry in entries.items() if name != PAYLOAD}
    # The sizes may come from a damaged file.
    if payload.nbytes != math.prod(sizes) * dtype.itemsize or contents.get(BYTEORDER, b"little") != b"little":
        return None
    with suppress(KeyError):  # torch.save has nothing for this dtype
        if contents[PICKLE] in (tensor_pickle(dtype, sizes), torchs_pickle(dtype, sizes)):
            return FoundPayload(payload.offset, payload.nbytes, payload.crc if has_checksums else None)
    return None


def _content(read: Read, entry: RecordEntry, has_checksums: bool) -> bytes:
    """The checked content of an entry; empty where it is too long to be one that counts."""
    if entry.nbytes > _MAX_SMALL_NBYTES:
        return b""
    content = read(entry.offset, entry.nbytes)
    if has_checksums and crc32(content) != entry.crc:
        raise NotARecordError(f"its entry {entry.name!r} fails its checksum")
    return content
