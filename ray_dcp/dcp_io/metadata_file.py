"""Reading ``.metadata`` and stored Python objects without running what they say.

Torch reads ``.metadata`` with a plain ``pickle.load``, which runs any code that the file names. Here only DCP's own
metadata classes, ``torch.Size``, dtypes and plain containers are let in.
"""

from __future__ import annotations

import enum
import functools
import importlib
import io
import pickle
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError
from ray_dcp.planning.python_record import NotAScalarError, read_scalar

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    # Where torch before 2.3 had them.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.hf_storage": {"_HFStorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "complex"},
    # StorageMeta.checkpoint_id is a Path where the caller passed one.
    "pathlib": {"PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath"},
}


_LAYOUTS = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}

_allow_list_lock = threading.Lock()


def _find_class(module: str, name: str) -> Any:
    if name in _METADATA_CLASSES.get(module, ()):
        if name in ("WindowsPath", "PureWindowsPath"):
            return str  # a Windows path cannot be made elsewhere; only its text matters
        if name == "_get_layout":
            return _LAYOUTS.__getitem__  # a function has attributes that a pickle could set
        return getattr(importlib.import_module(module), name)
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    raise _NotAllowedError(f"{module}.{name}")


class _FastUnpickler(pickle.Unpickler):
    """For content whose digest has been checked: a damaged number can make it reserve all memory there is."""

    def find_class(self, module: str, name: str) -> Any:
        return _find_class(module, name)


class _CarefulUnpickler(pickle._Unpickler):
    """For content that nothing vouches for: it never reserves more than the content is long, and is slower."""

    dispatch = {**pickle._Unpickler.dispatch}  # noqa: RUF012 - pickle's own table
    del dispatch[pickle.BYTEARRAY8[0]]  # reserves what it is told before it reads

    def find_class(self, module: str, name: str) -> Any:
        return _find_class(module, name)


class _NotAllowedError(Exception):
    pass


@contextmanager
def _classes_kept() -> Iterator[None]:
    """Undo what a pickle has done to the classes that it may name, and refuse it.

    It can set any attribute of an object, and a class is one; the next checkpoint's metadata would suffer.
    """
    before = [(one, dict(vars(one))) for one in _changeable()]
    try:
        yield
    finally:
        changed = [one for one, held in before if _restored(one, held)]
        if changed:
            raise _NotAllowedError(f"attributes of {changed[0]!r}")


@functools.cache
def _changeable() -> list[Any]:
    """The classes in the list, and those of their instances that are there for the whole process."""
    found: list[Any] = []
    for module, names in _METADATA_CLASSES.items():
        with suppress(ImportError):
            loaded = importlib.import_module(module)
            found += [one for name in names if isinstance(one := getattr(loaded, name, None), type)]
    return found + [member for one in found if issubclass(one, enum.Enum) for member in one]


def _restored(one: Any, held: dict[str, Any]) -> bool:
    """Whether its attributes were others than ``held``; Python itself may add annotations at any time."""
    now = dict(vars(one))
    changed = [
        name
        for name in now.keys() | held.keys()
        if now.get(name) is not held.get(name) and not name.startswith("__annotat")
    ]
    for name in changed:
        if name in held:
            setattr(one, name, held[name])
        else:
            delattr(one, name)
    return bool(changed)


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as torch stores it."""
    return pickle.dumps(metadata)


def decode_metadata(content: bytes, *, file: str, trusted: bool = False, digest_checked: bool = False) -> Metadata:
    """The ``Metadata`` in ``content``; ``file`` is where it came from, for messages.

    Raises ``UnsafeDataError`` when it names anything but metadata classes, ``CorruptCheckpointError`` when it is
    no metadata at all. Nothing it names is run, save with ``trusted``: a user's planner may keep anything in it.
    ``digest_checked`` where a manifest vouches for the content: it is then read several times as fast.
    """
    careful = _FastUnpickler if digest_checked else _CarefulUnpickler
    unpickler: Any = pickle.Unpickler if trusted else careful
    try:
        with nullcontext() if trusted else _classes_kept():
            metadata = unpickler(io.BytesIO(content)).load()
    except _NotAllowedError as error:
        raise UnsafeDataError(
            f"asks to load {error}, which is no part of a checkpoint's metadata; it was not loaded. "
            "Pass trusted=True if you trust whoever wrote this checkpoint",
            file=file,
        ) from None
    except Exception as error:
        raise CorruptCheckpointError(f"is no readable metadata: {error}", file=file) from error
    if not isinstance(metadata, Metadata):
        raise CorruptCheckpointError(f"holds a {type(metadata).__name__} instead of metadata", file=file)
    if not digest_checked:
        _require_well_formed(metadata, file)
        _require_places(metadata, file)
    return metadata


def _require_well_formed(metadata: Metadata, file: str) -> None:
    """Damage may leave a pickle that loads: what readers rely on is looked at here, once."""
    try:
        saved = metadata.state_dict_metadata
        odd = [fqn for fqn, value in saved.items() if not isinstance(fqn, str) or not _is_well_formed(value)]
        well_formed = not odd and isinstance(metadata.storage_data, dict | None)
    except (AttributeError, TypeError):
        odd, well_formed = [], False
    if not well_formed:
        fqn = str(odd[0]) if odd else ""
        raise CorruptCheckpointError("is no readable metadata: parts of it are missing", file=file, fqn=fqn)


def _is_well_formed(saved: Any) -> bool:
    if isinstance(saved, BytesStorageMetadata):
        return True
    num_dims = len(saved.size)
    return (
        isinstance(saved.properties.dtype, torch.dtype)
        and _are_counts(saved.size)
        and all(
            len(chunk.offsets) == len(chunk.sizes) == num_dims
            and _are_counts(chunk.offsets)
            and _are_counts(chunk.sizes)
            for chunk in saved.chunks
        )
    )


def _require_places(metadata: Metadata, file: str) -> None:
    """What is missing altogether is left to whoever looks for it; a user's own writer may have put anything."""
    for index, info in (metadata.storage_data or {}).items():
        if not isinstance(info, _StorageInfo):
            continue
        numbers = getattr(info, "offset", 0), getattr(info, "length", 0)
        if not isinstance(getattr(info, "relative_path", ""), str) or not _are_counts(numbers):
            fqn = str(getattr(index, "fqn", ""))
            raise CorruptCheckpointError("is no readable metadata: a place in it is none", file=file, fqn=fqn)


def _are_counts(numbers: Iterable[Any]) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)


_UNREADABLE = (
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    OSError,
    struct.error,
)
"""What ``torch.load`` raises for a pickle that makes no sense."""


def decode_python(content: IO[bytes], *, file: str, fqn: str, trusted: bool, map_location: str = "cpu") -> Any:
    """The Python object that ``torch.save`` put into ``content``, its tensors on ``map_location``.

    With ``trusted`` anything is loaded, running what it says. Without it only tensors, plain containers, numpy
    arrays and what the user allowed by ``torch.serialization.add_safe_globals``; else ``UnsafeDataError``.
    """
    try:
        return read_scalar(content)
    except NotAScalarError:
        pass
    try:
        with _numpy_allowed():
            return torch.load(content, map_location=map_location, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise CorruptCheckpointError(f"cannot be unpickled: {error}", file=file, fqn=fqn) from error
        raise UnsafeDataError(
            "holds a Python object outside the allow-list, and loading it could run code: "
            f"{_first_line(error)}. Allow its class with torch.serialization.add_safe_globals, "
            "or pass trusted=True if you trust whoever wrote this checkpoint",
            file=file,
            fqn=fqn,
        ) from error
    except _UNREADABLE as error:
        if trusted and not isinstance(error, RuntimeError | EOFError | ValueError | KeyError):
            raise  # a class of the user's may raise anything
        raise CorruptCheckpointError(f"cannot be read: {_first_line(error)}", file=file, fqn=fqn) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "global" in line]
    return (named or lines or [type(error).__name__])[0]


@contextmanager
def _numpy_allowed() -> Iterator[None]:
    """Torch's allow-list belongs to the process: one at a time, and what the user has put there stays."""
    with _allow_list_lock:
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([one for one in _numpy_globals() if one not in allowed]):
            yield


def _numpy_globals() -> list[Any]:
    """What numpy arrays and scalars of plain dtypes pickle as: random states hold them."""
    dtypes = [type(np.dtype(kind)) for kind in "?bhilqBHILQefdgFDG"]
    multiarray = importlib.import_module("numpy._core.multiarray")
    return [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, *dtypes]
