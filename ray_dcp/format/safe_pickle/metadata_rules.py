"""What a ``.metadata`` may name, as plain data: a load reads by it, and so does whoever checks one without torch.

Torch reads ``.metadata`` with a plain ``pickle.load``, which runs any code that the file names. Here only DCP's own
metadata classes, ``torch.Size``, dtypes and plain containers are let in.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_PATH_NAMES = frozenset(("PosixPath", "PurePosixPath", "Path", "PurePath", "WindowsPath", "PureWindowsPath"))

METADATA_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # Where torch before 2.3 had them.
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(("TensorProperties", "MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo", "_StoragePrefix")),
    "torch.distributed.checkpoint.hf_storage": frozenset(("_HFStorageInfo",)),
    "torch": frozenset(("Size",)),
    "torch.serialization": frozenset(("_get_layout",)),
    "collections": frozenset(("OrderedDict",)),
    "builtins": frozenset(("set", "frozenset", "complex")),
    # StorageMeta.checkpoint_id is a Path where the caller passed one.
    "pathlib": _PATH_NAMES,
}

MEMORY_FORMATS = frozenset(("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT"))
_ENUMS = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")

DTYPE_NAMES = frozenset((
    "bit", "float16", "half", "bfloat16", "float32", "float", "float64", "double",
    "complex32", "chalf", "complex64", "cfloat", "complex128", "cdouble", "bool",
    "uint8", "int8", "int16", "short", "int32", "int", "int64", "long", "uint16", "uint32", "uint64",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "quint8", "qint8", "qint32", "quint4x2", "quint2x4",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
))  # fmt: skip
"""Dtypes that torch has had under these names; one that this torch lacks fails when it is looked up."""


class NotAllowedError(Exception):
    """A pickle names something that is not part of a checkpoint's metadata."""


def as_named_now(module: str, name: str) -> tuple[str, str]:
    """The module and name of a class here; other Pythons have some elsewhere: 3.13 has paths in ``pathlib._local``."""
    return ("pathlib" if module == "pathlib._local" else module), name


class EnumMember:
    """Stands for ``getattr`` in a pickle: Python 3.11 up to 3.11.3 stores a member of an enum as a call of it.

    ``members_of`` gives the members of an enum that may be named so, and None for whatever else a file passes. A file
    can set no attribute of it, and ``StandIns`` tell whether it is still there in what was loaded.
    """

    __slots__ = ("__weakref__", "_members_of")
    _members_of: Callable[[Any], Mapping[str, Any] | None]

    def __init__(self, members_of: Callable[[Any], Mapping[str, Any] | None]) -> None:
        object.__setattr__(self, "_members_of", members_of)

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) == 2 and type(arguments[1]) is str:
            members = self._members_of(arguments[0])
            if members is not None and arguments[1] in members:
                return members[arguments[1]]
        raise NotAllowedError("builtins.getattr")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise NotAllowedError("builtins.getattr")


class StandIns:
    """The stand-ins that one pickle was given: all are gone with its unpickler, or the file has kept one."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[Any]] = []

    def give(self, stand_in: Any) -> Any:
        self._given.append(weakref.ref(stand_in))
        return stand_in

    def require_gone(self, what: str) -> None:
        if any(one() is not None for one in self._given):
            raise NotAllowedError(what)


def forget_extensions() -> None:
    """Have numbers that stand for classes looked up as names are: what pickle remembers, it does not look up."""
    if copyreg._extension_cache:  # type: ignore[attr-defined]
        copyreg.clear_extension_cache()


@functools.cache
def _plain_opcodes() -> re.Pattern[bytes]:
    """Matches many opcodes with what belongs to each: all but long text that a pickle of protocol 4 needs for metadata.

    The most frequent ones come first. It matches in parts, since a repeat remembers where each one began.
    """
    alone = b"[%s]" % re.escape(b")(us}]aeNtbRld012\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94")
    # A byte and as many more as it says: sixteen times sixteen, since a pattern tries one way after the other.
    exact = [re.escape(bytes([length])) + b".{%d}" % length for length in range(256)]
    by_first = [
        b"(?=[%s-%s])(?:%s)" % (re.escape(bytes([low])), re.escape(bytes([low + 15])), b"|".join(exact[low : low + 16]))
        for low in range(0, 256, 16)
    ]
    one = rb"j....A*|h.A*|K.A*|M..A*|[\x8c\x8aC](?:L)A*|J....|q.|[\x95G]........|\x80.|A+"
    return re.compile(b"(?:%s){1,2000}" % one.replace(b"A", alone).replace(b"L", b"|".join(by_first)), re.DOTALL)


_LONG_TEXT, _STOP = pickle.BINUNICODE[0], pickle.STOP[0]


def reserves_no_more_than_it_holds(content: bytes) -> bool:
    """Whether the unpickler in C needs no more memory for a pickle than a small multiple of its length.

    Where a pickle itself numbers what it may come back to, five bytes can have that make a list of 64 GiB. Ours are
    of a protocol that counts instead; others are for the unpickler in Python. What looks like such an opcode is mostly
    text, so it takes a walk over all of them.
    """
    opcodes, at = _plain_opcodes(), 0
    while at < len(content) and content[at] != _STOP:
        found = opcodes.match(content, at)
        if found is not None:
            at = found.end()
        elif content[at] == _LONG_TEXT:
            at += 5 + int.from_bytes(content[at + 1 : at + 5], "little")
        else:
            return False
    return at < len(content)


def without_reserving(dispatch: Mapping[int, Any]) -> dict[int, Any]:
    """The table of the unpickler in Python, but for the one opcode that reserves what it is told before it reads."""
    return {opcode: load for opcode, load in dispatch.items() if opcode != pickle.BYTEARRAY8[0]}


def require_allowed(content: bytes) -> None:
    """Raise ``NotAllowedError`` where a load would refuse this ``.metadata``, whose digest has been checked.

    Nothing is made of it but stand-ins, so neither torch nor any other class it names is needed.
    """
    forget_extensions()
    quickly = reserves_no_more_than_it_holds(content)
    reader = _Symbols(io.BytesIO(content)) if quickly else _CarefulSymbols(io.BytesIO(content))
    loaded = reader.load()
    given = reader.given
    del reader
    given.require_gone("builtins.getattr")
    del loaded


class _Symbol:
    """An object of a class that is not there."""

    held: list[Any]

    def __new__(cls, *passed: Any) -> Any:
        made = super().__new__(cls)
        made.held = [passed]
        return made

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.held.append(state)


class _SymbolsOnly:
    """Finds what a name stands for, in both unpicklers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # type: ignore[call-arg]  # the unpickler comes next
        self.given = StandIns()

    def find_class(self, module: str, name: str) -> Any:
        module, name = as_named_now(module, name)
        if (module, name) == ("builtins", "getattr"):
            return self.given.give(EnumMember(_symbol_members))
        if (module, name) in _BUILTIN_CLASSES:
            return _BUILTIN_CLASSES[module, name]
        if name in METADATA_CLASSES.get(module, ()) or (module == "torch" and name in DTYPE_NAMES):
            return _symbol(module, name)
        raise NotAllowedError(f"{module}.{name}")


class _Symbols(_SymbolsOnly, pickle.Unpickler): ...


class _CarefulSymbols(_SymbolsOnly, pickle._Unpickler):
    """Reads content that would have C's unpickler reserve more than it holds."""

    dispatch = without_reserving(pickle._Unpickler.dispatch)


_BUILTIN_CLASSES: Mapping[tuple[str, str], Any] = {("builtins", one.__name__): one for one in (set, frozenset, complex)}


@functools.cache
def _symbol(module: str, name: str) -> type:
    return type(name, (_Symbol,), {"__module__": module})


def _symbol_members(owner: Any) -> Mapping[str, Any] | None:
    if not isinstance(owner, type) or not issubclass(owner, _Symbol) or owner.__name__ not in _ENUMS:
        return None
    return dict.fromkeys(MEMORY_FORMATS)
