"""The record of a Python object: what ``torch.save`` writes for it, and a third of that where no tensor is in it."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.utils.serialization
from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals
from torch.serialization import DEFAULT_PROTOCOL

from ray_dcp.format.checksums import crc32
from ray_dcp.format.names import PAYLOAD_ALIGNMENT
from ray_dcp.format.safe_pickle import plain_values
from ray_dcp.format.safe_pickle.portable_pickle import RenamingPickler, portable_reduce, renaming_dumps
from ray_dcp.format.zip_record import frame_pickle
from ray_dcp.planning.values.compact import compacted
from ray_dcp.planning.values.survey import Survey

SCALARS = frozenset((bool, int, float, str, bytes, type(None)))


def python_record(value: Any, foreign: set[str] | None = None) -> bytes:
    """A record that ``torch.load`` turns into ``value``; of tensors in it only their own bytes.

    ``foreign`` gets the names of the classes and functions in it that a load will not make unless the user allows them.
    Raises ``HiddenPartError`` for what would be lost in it, and whatever pickling it raises.
    """
    if type(value) in SCALARS:
        return frame_pickle(pickle.dumps(value, DEFAULT_PROTOCOL))
    survey = Survey(value)
    if foreign is not None and not survey.named <= plain_values.NAMES:
        foreign |= {name for name in survey.named - plain_values.NAMES if not _is_allowed(name)}
    if survey.pickled is None:
        return _with_tensors(
            value, compacted(survey.tensors), pickle.Pickler if survey.is_portable else RenamingPickler
        )
    return frame_pickle(survey.pickled if survey.is_portable else renaming_dumps(value, DEFAULT_PROTOCOL))


def _is_allowed(name: str) -> bool:
    """Whether torch lets it in, or the user has allowed it."""
    return name in _get_allowed_globals() or name in _get_user_allowed_globals()


def _with_tensors(value: Any, replaced: Mapping[int, torch.Tensor], pickler: Any) -> bytes:
    """What ``torch.save`` writes, with other tensors in place of some, named by ``id``."""

    class Replacing(pickler):
        def reducer_override(self, obj: Any) -> Any:
            replacement = replaced.get(id(obj))
            return portable_reduce(obj) if replacement is None else replacement.__reduce_ex__(DEFAULT_PROTOCOL)

    buffer = io.BytesIO()
    settings = {"save.compute_crc32": True, "save.storage_alignment": PAYLOAD_ALIGNMENT}
    pickling: Any = SimpleNamespace(__name__="pickle", Pickler=Replacing)
    with torch.utils.serialization.config.patch(settings):  # type: ignore[attr-defined]  # put there on import
        torch.save(value, buffer, pickle_module=pickling)
    return buffer.getvalue()


class NotAScalarError(Exception):
    """A record holds something else than one number, string, boolean or None; ``torch.load`` may know it."""


def read_scalar(content: IO[bytes]) -> Any:
    """The number, string, boolean or None in a record that ``python_record`` made; ``content`` is left where it was.

    Torch's restricted unpickler takes a hundred times as long. Nothing but the very bytes that such a value has is
    accepted, so there is nothing to be run. Raises ``NotAScalarError`` for everything else.
    """
    if not isinstance(content, io.BytesIO) or content.tell():
        raise NotAScalarError
    return scalar_of(content.getvalue())


def scalar_of(record: bytes) -> Any:
    """The same of a record in memory."""
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
"""Where the pickle starts: behind the local headers, which end where the directory of a record without one begins."""
_HEAD = _FRAME[: _FRAME.index(b"PK\x03\x04", 1) + 14]
"""All up to the checksum in the pickle's own header, behind which is its size."""
_CHECKSUM_AND_SIZE = struct.Struct("<II")
_FLOAT = struct.Struct(">3sdc")
_CONSTANTS = {pickle.dumps(value, DEFAULT_PROTOCOL): value for value in (None, True, False)}
_PROTOCOL = b"\x80" + bytes([DEFAULT_PROTOCOL])
_FLOAT_BEGINS = _PROTOCOL + b"G"
_UNSIGNED = {b"K": 1, b"M": 2}
"""Opcodes of small whole numbers, and how many bytes follow."""


def _scalar(pickled: bytes) -> Any:
    if len(pickled) == _FLOAT.size:  # most are
        begin, number, end = _FLOAT.unpack(pickled)
        if begin == _FLOAT_BEGINS and end == b".":
            return number
    if pickled in _CONSTANTS:
        return _CONSTANTS[pickled]
    opcode, argument = pickled[2:3], pickled[3:-1]
    if pickled[:2] != _PROTOCOL or pickled[-1:] != b".":
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
