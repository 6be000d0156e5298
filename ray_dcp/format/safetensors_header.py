"""The header of a safetensors file: read with every check there is to make, and written.

A file is eight bytes (the header's length, little-endian), the header (JSON: name to dtype, shape and place, and the
texts in ``__metadata__``), and the tensors' bytes, row-major, one after the other without a gap. It has no checksum.
This module knows neither torch nor stores.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import are_counts

MAX_HEADER_NBYTES = 100_000_000
"""Most bytes that a header may have, as in the format's own library."""
TEXTS = "__metadata__"

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_DTYPE_OF = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F4": ("float4_e2m1fn_x2", 1),
}
_TWO_IN_A_BYTE = "F4"
"""A dtype whose shape counts values here and bytes in torch: there the last dimension is half as long."""
_NAME_OF = {name: safetensors for safetensors, (name, _) in _DTYPE_OF.items()}


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """One tensor of a file. ``offset`` counts bytes from the start of the file.

    ``dtype`` is torch's word for it, or the format's where torch has none; ``has_dtype`` is false of that.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    tensors: Sequence[TensorInFile]
    """The tensors in the order of their bytes."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The texts in ``__metadata__``."""


def has_dtype(dtype: str) -> bool:
    """Whether the format has a word for what torch calls ``dtype``."""
    return dtype in _NAME_OF


def read_header(read: Callable[[int, int], bytes], file_nbytes: int, *, file: str) -> Header:
    """The header of a file of ``file_nbytes``; ``read(offset, nbytes)`` reads from it, twice.

    Raises ``CorruptCheckpointError``, with ``file`` and the tensor, unless the tensors' bytes are as long as their
    shapes say and fill the rest of the file without gap or overlap. Of unknown dtypes any length is believed.
    """
    if file_nbytes < _LENGTH.size:
        raise CorruptCheckpointError(f"not a safetensors file: it has {file_nbytes} bytes", file=file)
    (length,) = _LENGTH.unpack(read(0, _LENGTH.size))
    if length > MAX_HEADER_NBYTES:
        raise CorruptCheckpointError(
            f"not a safetensors file: its header would have {length} bytes, at most {MAX_HEADER_NBYTES} are read",
            file=file,
        )
    start = _LENGTH.size + length
    if start > file_nbytes:
        raise CorruptCheckpointError(f"ends within its header, which has {length} bytes", file=file, nbytes=start)
    parsed = _parse_json(read(_LENGTH.size, length), file)
    texts = _parse_texts(parsed.pop(TEXTS, {}), file)
    tensors = [_parse_tensor(name, described, start, file) for name, described in parsed.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _require_contiguous(tensors, start, file_nbytes, file)
    return Header(tensors, texts)


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int]]], texts: Mapping[str, str]) -> tuple[bytes, Header]:
    """What a file of ``tensors`` (name, torch's dtype, shape; in the order of their bytes) begins with.

    The tensors' bytes follow at once and start at a multiple of eight. ``has_dtype`` must be true of each dtype.
    """
    described: dict[str, Any] = {TEXTS: dict(texts)} if texts else {}
    placed, at = [], 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * _DTYPE_OF[_NAME_OF[dtype]][1]
        stored_shape = _stored_shape(_NAME_OF[dtype], shape)
        described[name] = {
            "dtype": _NAME_OF[dtype],
            "shape": stored_shape,
            "data_offsets": [at, at + nbytes],
        }
        placed.append((name, dtype, tuple(shape), at, nbytes))
        at += nbytes
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    front = _LENGTH.pack(len(text)) + text
    return front, Header(
        [TensorInFile(name, dtype, shape, len(front) + at, nbytes) for name, dtype, shape, at, nbytes in placed], texts
    )


def parse_json_object(content: bytes, *, what: str, file: str) -> dict[str, Any]:
    """The JSON object in ``content``, every name in it once. Raises ``CorruptCheckpointError`` for all else."""
    try:
        parsed = json.loads(content.decode(), object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not JSON: {error}", file=file) from error
    if not isinstance(parsed, dict):
        raise CorruptCheckpointError(f"{what} is a JSON {type(parsed).__name__}, not an object", file=file)
    return parsed


def _parse_json(text: bytes, file: str) -> dict[str, Any]:
    if text[:1] != b"{":
        raise CorruptCheckpointError("not a safetensors file: its header does not begin with {", file=file)
    return parse_json_object(text, what="its header", file=file)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    for name in found:
        name.encode()  # JSON can spell half of a character
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _parse_texts(texts: Any, file: str) -> dict[str, str]:
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise CorruptCheckpointError(f"its {TEXTS} holds something else than texts", file=file)
    return texts


def _parse_tensor(name: str, described: Any, start: int, file: str) -> TensorInFile:
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpointError("its header needs dtype, shape and data_offsets, and no more", file=file, fqn=name)
    dtype, shape, place = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str):
        raise CorruptCheckpointError(f"its dtype is {dtype!r}", file=file, fqn=name)
    if not _is_list_of_counts(shape):
        raise CorruptCheckpointError(f"its shape is {shape!r}", file=file, fqn=name)
    if not _is_list_of_counts(place) or len(place) != 2 or place[0] > place[1]:
        raise CorruptCheckpointError(f"its data_offsets are {place!r}", file=file, fqn=name)
    nbytes = place[1] - place[0]
    if dtype not in _DTYPE_OF:
        return TensorInFile(name, dtype, tuple(shape), start + place[0], nbytes)
    torch_name, itemsize = _DTYPE_OF[dtype]
    if dtype == _TWO_IN_A_BYTE:
        if not shape or shape[-1] % 2:
            raise CorruptCheckpointError(f"its shape is {shape!r}, and {dtype} has two in a byte", file=file, fqn=name)
        shape = [*shape[:-1], shape[-1] // 2]
    if math.prod(shape) * itemsize != nbytes:
        raise CorruptCheckpointError(
            f"shape {tuple(_stored_shape(dtype, shape))} of {dtype} takes {math.prod(shape) * itemsize} bytes, "
            f"its data_offsets say {nbytes}",
            file=file,
            fqn=name,
        )
    return TensorInFile(name, torch_name, tuple(shape), start + place[0], nbytes)


def _stored_shape(dtype: str, shape: Sequence[int]) -> list[int]:
    """``shape`` as the format counts it; a tensor without dimensions has nothing to count by."""
    return [*shape[:-1], shape[-1] * 2] if dtype == _TWO_IN_A_BYTE and shape else list(shape)


def _is_list_of_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and are_counts(numbers)


def _require_contiguous(tensors: Sequence[TensorInFile], start: int, end: int, file: str) -> None:
    at = start
    for tensor in tensors:
        if tensor.offset != at:
            kind = "a gap before it" if tensor.offset > at else "it lies over another tensor"
            raise CorruptCheckpointError(
                f"the tensors' bytes are not one after the other: {kind}",
                file=file,
                fqn=tensor.name,
                offset=tensor.offset,
                nbytes=tensor.nbytes,
            )
        at += tensor.nbytes
    if at != end:
        problem = f"ends too early: {at - end} bytes are missing" if at > end else f"has {end - at} bytes too many"
        last = tensors[-1].name if tensors and at > end else ""
        raise CorruptCheckpointError(problem, file=file, fqn=last)
