"""The plain values and containers of Python and numpy: what a stored pickle may name, and how each is made again.

Nothing here runs what a file says. A class or function stands here only with a check of what a file may pass to it, so
that the worst a file can do is to be refused. A save looks at the same names, and tells of what is not among them.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import fractions
import io
import ipaddress
import os
import pathlib
import random
import re
import time
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ray_dcp.errors import StateDictError
from ray_dcp.format.safe_pickle import plain_arrays
from ray_dcp.format.safe_pickle.plain_arrays import RefusedValueError, require


def _texts(cls: Callable[..., Any]) -> Callable[..., Any]:
    """``cls`` called with texts only."""

    def make(*arguments: Any) -> Any:
        require(all(type(argument) is str for argument in arguments))
        return cls(*arguments)

    return make


def _numbers(cls: Callable[..., Any], at_least: int, at_most: int) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        require(at_least <= len(arguments) <= at_most and all(type(number) is int for number in arguments))
        return cls(*arguments)

    return make


def _bytes(*content: Any) -> bytes:
    require(not content)
    return b""


def _bytearray(*content: Any) -> bytearray:
    if len(content) == 2:
        require(type(content[0]) is str and content[1] in ("latin-1", "latin1"))
        return bytearray(content[0], "latin-1")
    require(not content or (len(content) == 1 and type(content[0]) is bytes))
    return bytearray(*content)


def _encode(text: Any, encoding: Any) -> bytes:
    require(type(text) is str and encoding in ("latin1", "latin-1"))
    return text.encode("latin-1")


def _set(cls: type) -> Callable[..., Any]:
    def make(*items: Any) -> Any:
        require(not items or (len(items) == 1 and type(items[0]) in (list, tuple)))
        return cls(*items)

    return make


def _complex(*parts: Any) -> complex:
    require(len(parts) <= 2 and all(type(part) in (float, int) for part in parts))
    return complex(*parts)


def _slice(*parts: Any) -> slice:
    require(1 <= len(parts) <= 3)
    return slice(*parts)


def _deque(items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    require(type(items) in (list, tuple) and (maxlen is None or type(maxlen) is int))
    return collections.deque(items, maxlen)


def _ordered(*items: Any) -> Any:
    require(not items or (len(items) == 1 and type(items[0]) is list))
    return collections.OrderedDict(*items)


def _counter(*counts: Any) -> Any:
    require(not counts or (len(counts) == 1 and type(counts[0]) is dict))
    return collections.Counter(*counts)


def _defaultdict(factory: Any = None, *items: Any) -> collections.defaultdict[Any, Any]:
    """A ``defaultdict``; its factory, which it calls for what it lacks, may only be one that makes a plain value."""
    require(factory is None or any(factory is one for one in FACTORIES))
    require(not items or (len(items) == 1 and type(items[0]) is dict))
    return collections.defaultdict(factory, *items)


FACTORIES = (
    int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset,
    collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict,
)  # fmt: skip


def _moment(cls: type) -> Callable[..., Any]:
    """Makes a date or time of ``datetime`` from its bytes and a time zone."""

    def make(state: Any, zone: Any = None) -> Any:
        require(type(state) is bytes and (zone is None or isinstance(zone, datetime.tzinfo)))
        return cls(state) if zone is None else cls(state, zone)

    return make


def _timezone(offset: Any, *name: Any) -> datetime.timezone:
    require(type(offset) is datetime.timedelta and len(name) <= 1 and all(type(one) is str for one in name))
    return datetime.timezone(offset, *name)


def zone_by_key(key: Any, from_cache: Any = 1) -> zoneinfo.ZoneInfo:
    """The time zone of a name such as ``Europe/Berlin``, as this machine knows it."""
    require(type(key) is str and re.fullmatch(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", key) is not None)
    return zoneinfo.ZoneInfo(key)


def _fraction(*parts: Any) -> fractions.Fraction:
    if len(parts) == 1:
        # Other texts may be a number such as 1e999999999, which takes all memory.
        require(type(parts[0]) is str and re.fullmatch(r"-?\d+(/\d+)?", parts[0]) is not None)
    else:
        require(len(parts) == 2 and all(type(part) is int for part in parts))
    return fractions.Fraction(*parts)


def _address(cls: type) -> Callable[..., Any]:
    def make(address: Any) -> Any:
        require(type(address) in (str, int))
        return cls(address)

    return make


def _array(kind: Any, items: Any) -> array.array[Any]:
    require(type(kind) is str and len(kind) == 1 and type(items) in (list, str, bytes))
    return array.array(kind, items)


def _struct_time(parts: Any, more: Any = None) -> time.struct_time:
    require(type(parts) is tuple and type(more) in (dict, type(None)))
    return time.struct_time(parts, more or {})


def _generator(device: Any) -> torch.Generator:
    require(type(device) is torch.device)
    return torch.Generator(device)


def _nothing(cls: type) -> Callable[..., Any]:
    """A new object of ``cls``; what is in it follows."""

    def make(*arguments: Any) -> Any:
        require(not arguments)
        return object.__new__(cls) if cls is uuid.UUID else cls()

    return make


_PATH_CLASSES = {name: getattr(pathlib, name) for name in ("PurePath", "PurePosixPath", "PureWindowsPath", "Path")}
_PATH_CLASSES["PosixPath"] = pathlib.PosixPath if os.name != "nt" else pathlib.PurePosixPath
_PATH_CLASSES["WindowsPath"] = pathlib.WindowsPath if os.name == "nt" else pathlib.PureWindowsPath
_ADDRESSES = ("IPv4Address", "IPv6Address", "IPv4Network", "IPv6Network", "IPv4Interface", "IPv6Interface")

CLASSES: Mapping[str, type] = {
    **{f"builtins.{one.__name__}": one for one in (
        int, float, bool, str, list, tuple, dict, bytes, bytearray, set, frozenset, complex, range, slice, object)},
    **{f"collections.{one.__name__}": one for one in (
        collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict)},
    **{f"datetime.{one.__name__}": one for one in (
        datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone)},
    "zoneinfo.ZoneInfo": zoneinfo.ZoneInfo,
    "decimal.Decimal": decimal.Decimal,
    "fractions.Fraction": fractions.Fraction,
    "uuid.UUID": uuid.UUID,
    **{f"pathlib.{name}": one for name, one in _PATH_CLASSES.items()},
    **{f"ipaddress.{name}": getattr(ipaddress, name) for name in _ADDRESSES},
    "types.SimpleNamespace": types.SimpleNamespace,
    "_io.BytesIO": io.BytesIO,
    "_io.StringIO": io.StringIO,
    "array.array": array.array,
    "time.struct_time": time.struct_time,
    "random.Random": random.Random,
    "torch._C.Generator": torch.Generator,
    **plain_arrays.ARRAY_CLASSES,
}  # fmt: skip
"""The plain classes by their names in a pickle; a class may itself be a value."""

CALLS: Mapping[type, Callable[..., Any]] = {
    bytes: _bytes,
    bytearray: _bytearray,
    set: _set(set),
    frozenset: _set(frozenset),
    complex: _complex,
    range: _numbers(range, 1, 3),
    slice: _slice,
    collections.deque: _deque,
    collections.OrderedDict: _ordered,
    collections.Counter: _counter,
    collections.defaultdict: _defaultdict,
    datetime.date: _moment(datetime.date),
    datetime.datetime: _moment(datetime.datetime),
    datetime.time: _moment(datetime.time),
    datetime.timedelta: _numbers(datetime.timedelta, 0, 3),
    datetime.timezone: _timezone,
    zoneinfo.ZoneInfo: zone_by_key,
    decimal.Decimal: _texts(decimal.Decimal),
    fractions.Fraction: _fraction,
    uuid.UUID: _nothing(uuid.UUID),
    **{one: _texts(one) for one in _PATH_CLASSES.values()},
    **{one: _address(one) for one in (getattr(ipaddress, name) for name in _ADDRESSES)},
    types.SimpleNamespace: _nothing(types.SimpleNamespace),
    io.BytesIO: _nothing(io.BytesIO),
    io.StringIO: _nothing(io.StringIO),
    array.array: _array,
    time.struct_time: _struct_time,
    random.Random: _nothing(random.Random),
    torch.Generator: _generator,
    **plain_arrays.ARRAY_CALLS,
}
"""What is called in place of a class, with what a file passes to it."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {"_codecs.encode": _encode, **plain_arrays.ARRAY_FUNCTIONS}
"""What is called in place of a function."""

METHODS: Mapping[tuple[type, str], Callable[..., Any]] = {(zoneinfo.ZoneInfo, "_unpickle"): zone_by_key}
"""What is called in place of a method of a class, which a pickle gets by ``getattr``."""

CONSTANTS: Mapping[str, Any] = {"builtins.Ellipsis": ..., "builtins.NotImplemented": NotImplemented}


def _set_uuid(made: uuid.UUID, state: Any) -> None:
    require(type(state) is dict and state.keys() <= {"int", "is_safe"} and type(state.get("int")) is int)
    safe = {"is_safe": state["is_safe"]} if type(state.get("is_safe")) is int else {}
    require(0 <= state["int"] < 1 << 128)
    made.__setstate__({"int": state["int"], **safe})  # type: ignore[attr-defined]  # not in the stubs


def _set_namespace(made: types.SimpleNamespace, state: Any) -> None:
    require(type(state) is dict and all(type(name) is str and not name.startswith("__") for name in state))
    vars(made).update(state)


def _set_ordered(made: Any, state: Any) -> None:
    """Give it the attributes in ``state``: torch's state dicts carry one."""
    require(type(state) is dict and all(type(name) is str and not name.startswith("__") for name in state))
    vars(made).update(state)


def _set_bytes_io(made: io.BytesIO, state: Any) -> None:
    require(type(state) is tuple and len(state) == 3 and (state[2] is None or state[2] == {}))
    require(type(state[0]) is bytes and type(state[1]) is int)
    made.__setstate__((*state[:2], None))  # type: ignore[attr-defined]  # not in the stubs


def _set_string_io(made: io.StringIO, state: Any) -> None:
    require(type(state) is tuple and len(state) == 4 and (state[3] is None or state[3] == {}))
    require(type(state[0]) is str and state[1] in (None, "", "\n", "\r", "\r\n") and type(state[2]) is int)
    made.__setstate__((*state[:3], None))  # type: ignore[attr-defined]  # not in the stubs


def _set_random(made: random.Random, state: Any) -> None:
    require(type(state) is tuple and len(state) == 3 and state[0] in (2, 3) and type(state[1]) is tuple)
    require(all(type(number) is int and 0 <= number < 1 << 32 for number in state[1]))
    require(type(state[2]) in (float, type(None)))
    made.setstate(state)


def _set_generator(made: torch.Generator, state: Any) -> None:
    require(type(state) is tuple and len(state) == 3)
    require(type(state[0]) is int and type(state[1]) in (int, type(None)) and type(state[2]) is torch.Tensor)
    if state[2].is_meta:
        raise StateDictError("it holds a torch.Generator, which is not made without its values; save its get_state()")
    require(state[2].dtype == torch.uint8 and state[2].device.type == "cpu")
    made.__setstate__(state)


STATES: Mapping[type, Callable[[Any, Any], None]] = {
    uuid.UUID: _set_uuid,
    types.SimpleNamespace: _set_namespace,
    collections.OrderedDict: _set_ordered,
    io.BytesIO: _set_bytes_io,
    io.StringIO: _set_string_io,
    random.Random: _set_random,
    torch.Generator: _set_generator,
    **plain_arrays.ARRAY_STATES,
}
"""How a state that follows an object is put into it."""

PLAIN_NAMES = frozenset((*CLASSES, *FUNCTIONS, *CONSTANTS))
"""All that a pickle may name, apart from what torch lets in by itself and what the user has allowed."""

__all__ = [
    "CALLS",
    "CLASSES",
    "CONSTANTS",
    "FACTORIES",
    "FUNCTIONS",
    "METHODS",
    "PLAIN_NAMES",
    "STATES",
    "RefusedValueError",
    "zone_by_key",
]
