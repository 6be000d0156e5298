"""The record of one number, string, boolean or None, written and read without torch's pickler: there are thousands."""

from __future__ import annotations

import io
import pickle
import struct
from contextlib import suppress
from typing import IO, Any

from ray_dcp.format.checksums import crc32
from ray_dcp.format.zip_record import frame_pickle

PYTHON_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
"""Types of the values that are stored in such records."""
_PICKLE_PROTOCOL = 2
"""What ``torch.save`` writes by default."""


def scalar_record(value: Any) -> bytes:
    """A record that ``torch.load`` turns into ``value``, which is of one of ``PYTHON_SCALARS``."""
    return frame_pickle(pickle.dumps(value, _PICKLE_PROTOCOL))


class NotAScalarError(Exception):
    """A record holds something else than one number, string, boolean or None; ``torch.load`` may know it."""


def read_scalar(content: IO[bytes]) -> Any:
    """The number, string, boolean or None in a record that ``scalar_record`` made; ``content`` is left where it was.

    Torch's restricted unpickler takes a hundred times as long. Nothing but the very bytes that such a value has is
    accepted, so there is nothing to be run. Raises ``NotAScalarError`` for everything else.
    """
    if not isinstance(content, io.BytesIO) or content.tell():
        raise NotAScalarError
    return scalar_of(content.getvalue())


def scalar_of(record: bytes) -> Any:
    """The number, string, boolean or None in a record in memory. Raises ``NotAScalarError`` for everything else."""
    if not record.startswith(_HEAD) or len(record) < _PICKLE_AT:
        raise NotAScalarError
    # A local header has its entry's checksum; what stands behind the pickle says the same once more.
    checksum, nbytes = _CHECKSUM_AND_SIZE.unpack_from(record, len(_HEAD))
    pickled = record[_PICKLE_AT : _PICKLE_AT + nbytes]
    value = _scalar(pickled)
    if crc32(pickled) != checksum:
        raise NotAScalarError
    return value


_FRAME = frame_pickle(b"")
_PICKLE_AT = _FRAME.index(b"PK\x01\x02")
"""Offset of the pickle: behind the local headers, which end where the directory begins if the pickle is empty."""
_HEAD = _FRAME[: _FRAME.index(b"PK\x03\x04", 1) + 14]
"""The bytes of a record up to the checksum in the pickle's own header; the size follows the checksum."""
_CHECKSUM_AND_SIZE = struct.Struct("<II")
_FLOAT = struct.Struct(">3sdc")
_PICKLED_CONSTANTS = {pickle.dumps(value, _PICKLE_PROTOCOL): value for value in (None, True, False)}
_PICKLE_BEGINS = b"\x80" + bytes([_PICKLE_PROTOCOL])
_FLOAT_BEGINS = _PICKLE_BEGINS + b"G"
_UNSIGNED = {b"K": 1, b"M": 2}
"""Opcodes of small whole numbers, and how many bytes follow."""


def _scalar(pickled: bytes) -> Any:
    if len(pickled) == _FLOAT.size:  # most are
        begin, number, end = _FLOAT.unpack(pickled)
        if begin == _FLOAT_BEGINS and end == b".":
            return number
    if pickled in _PICKLED_CONSTANTS:
        return _PICKLED_CONSTANTS[pickled]
    opcode, argument = pickled[2:3], pickled[3:-1]
    if pickled[:2] != _PICKLE_BEGINS or pickled[-1:] != b".":
        raise NotAScalarError
    if _UNSIGNED.get(opcode) == len(argument):
        return int.from_bytes(argument, "little")
    if opcode == b"J" and len(argument) == 4:
        return int.from_bytes(argument, "little", signed=True)
    if opcode == b"\x8a" and argument and argument[0] == len(argument) - 1:
        return int.from_bytes(argument[1:], "little", signed=True)
    if opcode == b"X" and argument[-2:] == b"q\x00" and int.from_bytes(argument[:4], "little") == len(argument) - 6:
        with suppress(UnicodeDecodeError):
            return argument[4:-2].decode()
    raise NotAScalarError
