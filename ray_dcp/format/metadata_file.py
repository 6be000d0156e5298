"""Reading ``.metadata`` and stored Python objects without running what they say, by the rules of ``safe_pickle``."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import importlib
import io
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from ray_dcp.errors import CorruptCheckpointError, StateDictError, UnsafeDataError
from ray_dcp.format.manifest import are_counts
from ray_dcp.format.safe_pickle import value_unpickler
from ray_dcp.format.safe_pickle.metadata_rules import (
    METADATA_CLASSES,
    EnumMember,
    NotAllowedError,
    StandIns,
    as_named_now,
    forget_extensions,
    reserves_no_more_than_it_holds,
    without_reserving,
)
from ray_dcp.format.safe_pickle.portable_pickle import member_by_value
from ray_dcp.format.scalar_record import NotAScalarError, read_scalar
from ray_dcp.format.zip_record import LOCAL_SIGNATURE
from ray_dcp.torch_private import MEM_FORMAT_ENCODING, StorageInfo, load_entries, open_zipfile_reader
from ray_dcp.wording import first_line_of

_LAYOUTS = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the dtype that ``manifest.dtype_name`` calls ``name``; None where this torch does not have it."""
    found = getattr(torch, name or "", None)
    return found if isinstance(found, torch.dtype) else None


def _find_class(module: str, name: str, given: StandIns) -> Any:
    module, name = as_named_now(module, name)
    if (module, name) == ("builtins", "getattr"):
        return given.give(EnumMember(_members_of))
    if name in METADATA_CLASSES.get(module, ()):
        if name == "_get_layout":
            return _LAYOUTS.__getitem__  # a function has attributes that a pickle could set
        if name == "WindowsPath":
            name = "PureWindowsPath"  # the other cannot be made elsewhere, and nobody opens it
        return getattr(importlib.import_module(module), name)
    if module == "torch" and (dtype := dtype_named(name)) is not None:
        return dtype
    raise NotAllowedError(f"{module}.{name}")


def _members_of(owner: Any) -> Mapping[str, Any] | None:
    return owner.__members__ if isinstance(owner, enum.EnumMeta) and owner in _changeable() else None


class _FastUnpickler(pickle.Unpickler):
    """Reads content whose digest has been checked and that ``reserves_no_more_than_it_holds``."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.given = StandIns()

    def find_class(self, module: str, name: str) -> Any:
        return _find_class(module, name, self.given)


class _CarefulUnpickler(pickle._Unpickler):
    """Reads content that nothing vouches for: it never reserves more than the content is long, and is slower."""

    dispatch = without_reserving(pickle._Unpickler.dispatch)

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.given = StandIns()

    def find_class(self, module: str, name: str) -> Any:
        return _find_class(module, name, self.given)


def _load_restricted(unpickler: type[_FastUnpickler] | type[_CarefulUnpickler], content: bytes) -> Any:
    forget_extensions()
    with _classes_kept():
        reader = unpickler(io.BytesIO(content))
        loaded = reader.load()
        given = reader.given
        del reader
        given.require_gone("builtins.getattr")
        return loaded


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
            raise NotAllowedError(f"attributes of {changed[0]!r}")


@functools.cache
def _changeable() -> list[Any]:
    """The classes that a pickle may name, and those of their instances that are there for the whole process."""
    found: list[Any] = []
    for module, names in METADATA_CLASSES.items():
        with suppress(ImportError):
            loaded = importlib.import_module(module)
            found += [one for name in names if isinstance(one := getattr(loaded, name, None), type)]
    return found + [member for one in found if issubclass(one, enum.Enum) for member in one]


def _restored(one: Any, held: dict[str, Any]) -> bool:
    """Give ``one`` its attributes back; return whether it had others. Python may add annotations at any time."""
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


_METADATA_PROTOCOL = 4
"""The default protocol of Python 3.8 to 3.13: what is written does not depend on the Python that writes."""


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` pickled so that every Python and torch reads it, and in the same bytes whatever Python this is."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, _METADATA_PROTOCOL)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        MEM_FORMAT_ENCODING: member_by_value,
        StorageInfo: _place_by_call,
        MetadataIndex: _index_by_call,
        Metadata: _places_first,
    }
    pickler.dump(_without_path(metadata))
    return content.getvalue()


def _place_by_call(place: StorageInfo) -> tuple[Any, ...]:
    """How to pickle a place, as short as can be: there is one for each item."""
    more = (place.transform_descriptors,) if place.transform_descriptors is not None else ()
    return StorageInfo, (place.relative_path, place.offset, place.length, *more)


def _index_by_call(index: MetadataIndex) -> tuple[Any, ...]:
    """How to pickle an index, as short as a place; the class makes a ``torch.Size`` of any offset."""
    offset = tuple(index.offset) if index.offset is not None else None
    return MetadataIndex, (index.fqn, offset) if index.index is None else (index.fqn, offset, index.index)


def _places_first(metadata: Metadata) -> tuple[Any, ...]:
    """Places first: what each of them names, such as a class, takes two bytes while pickle has seen little else."""
    state = dict(vars(metadata))
    return copyreg.__newobj__, (Metadata,), {"storage_data": state.pop("storage_data", None)} | state  # type: ignore[attr-defined]


def _without_path(metadata: Metadata) -> Metadata:
    """``metadata`` with its path as text, which says as much: each Python pickles paths in its own way."""
    stored = metadata.storage_meta
    if not isinstance(getattr(stored, "checkpoint_id", None), PurePath):
        return metadata
    assert stored is not None
    return replace(metadata, storage_meta=replace(stored, checkpoint_id=str(stored.checkpoint_id)))


def decode_metadata(content: bytes, *, file: str, trusted: bool = False, digest_checked: bool = False) -> Metadata:
    """The ``Metadata`` in ``content``; ``file`` is where it came from, for messages.

    Raises ``UnsafeDataError`` when it names anything but metadata classes, ``CorruptCheckpointError`` when it is
    not metadata at all. Nothing it names is run, save with ``trusted``: a user's planner may keep anything in it.
    ``digest_checked`` says that a manifest vouches for the content: it is then read several times as fast.
    """
    try:
        if trusted:
            metadata = _load_trusted(content)
        else:
            quickly = digest_checked and reserves_no_more_than_it_holds(content)
            metadata = _load_restricted(_FastUnpickler if quickly else _CarefulUnpickler, content)
    except NotAllowedError as error:
        raise UnsafeDataError(
            f"asks to load {error}, which is not part of a checkpoint's metadata; it was not loaded",
            file=file,
            ways="Pass trusted=True if you trust whoever wrote this checkpoint",
        ) from None
    except Exception as error:
        raise CorruptCheckpointError(f"is not readable metadata: {type(error).__name__} {error}", file=file) from error
    if not isinstance(metadata, Metadata):
        raise CorruptCheckpointError(f"holds a {type(metadata).__name__} instead of metadata", file=file)
    if isinstance(metadata.storage_meta, StorageMeta):
        _fill_in_defaults(metadata.storage_meta)
    if not digest_checked:
        _require_well_formed(metadata, file)
        _require_places(metadata, file)
    return metadata


class _TrustedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*as_named_now(module, name))


def _load_trusted(content: bytes) -> Any:
    return _TrustedUnpickler(io.BytesIO(content)).load()


def _fill_in_defaults(loaded: StorageMeta) -> None:
    """Give ``loaded`` the fields that damage has left out, or an older torch, which did not have them."""
    for one in dataclasses.fields(loaded):
        if one.default_factory is not dataclasses.MISSING and not hasattr(loaded, one.name):
            setattr(loaded, one.name, one.default_factory())


def _require_well_formed(metadata: Metadata, file: str) -> None:
    """Raise ``CorruptCheckpointError`` where what readers rely on is missing: damage may leave a pickle that loads."""
    try:
        saved = metadata.state_dict_metadata
        odd = [fqn for fqn, value in saved.items() if not isinstance(fqn, str) or not _is_well_formed(value)]
        well_formed = not odd and isinstance(metadata.storage_data, dict | None)
    except (AttributeError, TypeError):
        odd, well_formed = [], False
    if not well_formed:
        fqn = str(odd[0]) if odd else ""
        raise CorruptCheckpointError("is not readable metadata: parts of it are missing", file=file, fqn=fqn)


def _is_well_formed(saved: Any) -> bool:
    if isinstance(saved, BytesStorageMetadata):
        return True
    num_dims = len(saved.size)
    return (
        isinstance(saved.properties.dtype, torch.dtype)
        and are_counts(saved.size)
        and all(
            len(chunk.offsets) == len(chunk.sizes) == num_dims and are_counts(chunk.offsets) and are_counts(chunk.sizes)
            for chunk in saved.chunks
        )
    )


def _require_places(metadata: Metadata, file: str) -> None:
    """Raise ``CorruptCheckpointError`` for an invalid place.

    A name without a place is left to whoever looks for it; a user's own writer may have put anything else.
    """
    for index, info in (metadata.storage_data or {}).items():
        if isinstance(info, StorageInfo) and not (_is_place(info) and _is_index(index)):
            fqn = str(getattr(index, "fqn", ""))
            raise CorruptCheckpointError("is not readable metadata: a place in it is invalid", file=file, fqn=fqn)


def _is_index(index: Any) -> bool:
    """Whether all of an index is there, and of the right types; one of a user's own class is the user's matter."""
    if not isinstance(index, MetadataIndex):
        return True
    offset, hint = index.offset, index.index
    return (
        isinstance(getattr(index, "fqn", None), str)
        and (offset is None or (isinstance(offset, tuple) and are_counts(offset)))
        and (hint is None or are_counts((hint,)))
    )


def _is_place(info: StorageInfo) -> bool:
    """Whether all of a place is there: a pickle may make one without what its class always has."""
    try:
        return isinstance(info.relative_path, str) and are_counts((info.offset, info.length))
    except AttributeError:
        return False


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

    With ``trusted`` anything is loaded, running what it says. Without it only tensors, plain values and containers of
    Python and numpy, and what the user allowed by ``torch.serialization.add_safe_globals``; else ``UnsafeDataError``.
    """
    try:
        return read_scalar(content)
    except NotAScalarError:
        pass
    if not trusted and _is_zip(content):
        # Before torch's own restricted unpickler, which knows less, and tells of what it refuses by its repr: a file of
        # some hundred bytes can hold lists whose repr takes all memory there is.
        return _plain_value(content, file, fqn, map_location)
    try:
        return torch.load(content, map_location=map_location, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise CorruptCheckpointError(f"cannot be unpickled: {error}", file=file, fqn=fqn) from error
        raise _unsafe(error, file, fqn) from error
    except _UNREADABLE as error:
        if trusted and not isinstance(error, RuntimeError | EOFError | ValueError | KeyError):
            raise  # a class of the user's may raise anything
        raise CorruptCheckpointError(f"cannot be read: {_telling_line(error)}", file=file, fqn=fqn) from error


def _is_zip(content: IO[bytes]) -> bool:
    """Whether ``content`` goes on with a zip file: an old pickle has none around it."""
    begin = content.read(len(LOCAL_SIGNATURE))
    content.seek(-len(begin), io.SEEK_CUR)
    return begin == LOCAL_SIGNATURE


def _plain_value(content: IO[bytes], file: str, fqn: str, map_location: str) -> Any:
    """The value in ``content``, made of tensors and plain values of Python and numpy and nothing else."""
    try:
        with open_zipfile_reader(content) as entries:
            return load_entries(entries, map_location, value_unpickler, encoding="utf-8")
    except StateDictError:
        raise  # nothing is wrong with what is stored
    except pickle.UnpicklingError as error:
        raise _unsafe(error, file, fqn) from error
    except _UNREADABLE as error:
        raise CorruptCheckpointError(f"cannot be read: {_telling_line(error)}", file=file, fqn=fqn) from error


def _unsafe(error: Exception, file: str, fqn: str) -> UnsafeDataError:
    return UnsafeDataError(
        f"holds a Python object outside the allow-list, and loading it could run code: {_telling_line(error)}",
        file=file,
        fqn=fqn,
        ways="Allow its class with torch.serialization.add_safe_globals, "
        "or pass trusted=True if you trust whoever wrote this checkpoint",
    )


def _telling_line(error: BaseException) -> str:
    """The line of torch's message that names a class, where there is one; else the first."""
    named = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "global" in line]
    return named[0] if named else first_line_of(error)
