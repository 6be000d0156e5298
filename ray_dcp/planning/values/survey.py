"""Finds what lies in a Python value that is stored whole, by pickling it: a pickler is shown every object.

Ranks share a Python value: one of them stores it for all. So nothing of which each rank has a part may be in it, nor an
object that has a state: that would be stored as it is, and loading would leave the live one as it was.
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.serialization import DEFAULT_PROTOCOL

from ray_dcp.format.safe_pickle.portable_pickle import is_renamed, portable_reduce
from ray_dcp.planning.layouts import is_freed
from ray_dcp.planning.local_shards import LocalShards
from ray_dcp.planning.per_rank import OneRanksValue, PerRank
from ray_dcp.torch_private import ShardedTensor

IN_ONE_RANK = "would be stored by one rank for all: only dicts and lists may be around it"
_MAX_SEARCHED = 100_000


class HiddenPartError(Exception):
    """``part`` lies in a Python value and would be lost there; ``fate`` says how, as the end of a sentence."""

    def __init__(self, part: Any, fate: str) -> None:
        super().__init__(fate)
        self.part = part
        self.fate = fate

    def within(self, value: Any) -> str:
        """The whole sentence; ``value`` is the value that was searched."""
        found = "PerRank" if isinstance(self.part, OneRanksValue) else type(self.part).__name__
        path = path_to(value, self.part)
        return (
            f"a {type(value).__name__} is stored as one value; the {found} in it{path and f' (at {path})'} {self.fate}"
        )


class Survey(pickle.Pickler):
    """Pickles one value and notes the tensors in it, in place of which nothing is pickled.

    Raises ``HiddenPartError`` for what would be lost in the value, and whatever pickling it raises.
    """

    def __init__(self, value: Any) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, DEFAULT_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.holds_storages = False
        self.named: set[str] = set()
        """The classes and functions that the pickle of the value, or of a tensor in it, names."""
        self.is_portable = True
        """Whether other versions of Python have all those classes where this one has them."""
        self._harmless: set[type] = set()
        self.dump(value)

    @property
    def pickled(self) -> bytes | None:
        """The value's pickle; None where there are tensors or storages in it."""
        return None if self.tensors or self.holds_storages else self._buffer.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        """Called for each object but plain numbers, strings, lists, tuples, dicts and sets."""
        kind = type(obj)
        if kind in self._harmless:
            return NotImplemented
        if isinstance(obj, type | FunctionType | BuiltinFunctionType):
            self._note(obj)
            return NotImplemented
        if isinstance(obj, torch.Tensor):
            fate = _fate(obj)
            if fate:
                raise HiddenPartError(obj, fate)
            self._note(kind)
            self.tensors.append(obj)
            return _nothing, (vars(obj) or None,)
        if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            self.holds_storages = True
            return _nothing, (None,)
        if isinstance(obj, PerRank | OneRanksValue):
            raise HiddenPartError(obj, IN_ONE_RANK)
        if _has_state(kind):
            raise HiddenPartError(obj, "would not be asked for its state_dict(): only dicts and lists may be around it")
        if isinstance(obj, enum.Enum):
            self._note(kind)  # Python's own are pickled by their names
        reduced = portable_reduce(obj)
        if reduced is NotImplemented:
            self._harmless.add(kind)
        return reduced

    def _note(self, named: Any) -> None:
        if named is not _nothing:
            self.named.add(f"{named.__module__}.{named.__qualname__}")
            self.is_portable = self.is_portable and not is_renamed(named)


def _nothing(attributes: Any) -> None:
    """Stands for a tensor in a pickle that is thrown away; the tensor's attributes are pickled as its argument."""


def _has_state(kind: type) -> bool:
    """Whether objects of a class are ``Stateful``."""
    return not issubclass(kind, type) and all(
        callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _fate(tensor: torch.Tensor) -> str | None:
    """The fate of a tensor that cannot be in a Python value, as the end of a sentence; None for all others."""
    if isinstance(tensor, DTensor | ShardedTensor | LocalShards):
        return "would not be stored as a part of its whole: only dicts and lists may be around it"
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "has no values before its module's first forward pass"
    if tensor.device.type == "meta":
        return "has no values: it is on the meta device"
    if is_freed(tensor):
        return "has no values: its memory has been freed (FSDP does so between uses)"
    return None


def path_to(value: Any, part: Any) -> str:
    """The Python code that leads from ``value`` to ``part``, such as ``[1].weights['x']``; empty if not found."""
    waiting: deque[tuple[Any, str]] = deque([(value, "")])
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_SEARCHED:
        found, path = waiting.popleft()
        if found is part:
            return path
        if id(found) in seen:
            continue
        seen.add(id(found))
        waiting.extend((inner, path + step) for inner, step in _inside(found))
    return ""


def _inside(value: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(value, str | bytes | int | float | torch.Tensor | type):
        return
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield entry, f"[{key!r}]"
            yield key, f" key {key!r}"
    elif isinstance(value, list | tuple | deque):
        names = getattr(value, "_fields", ())
        for number, entry in enumerate(value):
            yield entry, f".{names[number]}" if number < len(names) else f"[{number}]"
    elif isinstance(value, set | frozenset):
        for entry in value:
            yield entry, f"{{{type(entry).__name__}}}"
    elif isinstance(value, functools.partial):
        yield value.func, ".func"
        yield value.args, ".args"
        yield value.keywords, ".keywords"
    for name, entry in getattr(value, "__dict__", {}).items():
        yield entry, f".{name}"
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            yield getattr(value, name), f".{name}"
    if hasattr(value, "__self__"):
        yield value.__self__, ".__self__"


__all__ = ["IN_ONE_RANK", "HiddenPartError", "Survey", "path_to"]
