"""A checksum of a Python value that equal values have in every process, however they were put together.

Pickles will not do: two equal strings are pickled once or twice depending on whether they are one object, a set comes
in the order of this process's hash seed, a dict in the order of insertion.
"""

from __future__ import annotations

import copyreg
import marshal
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ray_dcp.format.checksums import crc32
from ray_dcp.format.scalar_record import PYTHON_SCALARS
from ray_dcp.staging.host_pieces import host_pieces

_MARSHAL_VERSION = 2
"""Version of ``marshal``'s format: in later ones the bytes depend on which objects are one and the same."""


class NoDigestError(Exception):
    """A value cannot be taken apart, so it has no digest."""


def scalar_digest(value: Any) -> int:
    """The digest of a number, string, boolean or None."""
    return crc32(marshal.dumps(value, _MARSHAL_VERSION))


def value_digest(value: Any) -> int:
    """The digest of any value that can be pickled: CRC-32 over its parts.

    Dicts and sets count without their order, tensors and arrays by dtype, shape and bytes, other objects by what they
    tell ``pickle`` of themselves. Raises ``NoDigestError`` where that cannot be had.
    """
    walk = _Walk()
    try:
        walk.feed(value)
    except NoDigestError:
        raise
    except Exception as error:
        raise NoDigestError(f"a {type(value).__name__}: {error}") from error
    return walk.crc


class _Walk:
    def __init__(self, inside: tuple[Any, ...] = ()) -> None:
        self.crc = 0
        self._inside = list(inside)
        """The values that hold the one at hand: one that holds itself is named by its place among them."""

    def feed(self, value: Any) -> None:
        kind = type(value)
        if kind in PYTHON_SCALARS or (kind in (list, tuple) and PYTHON_SCALARS.issuperset(map(type, value))):
            self._add(marshal.dumps(value, _MARSHAL_VERSION))
        elif any(value is outer for outer in self._inside):
            self._name("cycle", next(n for n, outer in enumerate(self._inside) if outer is value))
        else:
            self._inside.append(value)
            self._feed_parts(kind, value)
            self._inside.pop()

    def _feed_parts(self, kind: type, value: Any) -> None:
        if kind in (list, tuple):
            self._feed_all(kind.__name__, value)
        elif kind is dict:
            self._feed_unordered("dict", value.items())
        elif kind in (set, frozenset):
            self._feed_unordered(kind.__name__, value)
        elif isinstance(value, torch.Tensor):
            self._name("tensor", str(value.dtype), tuple(value.shape))
            for piece in host_pieces(value.detach()):
                self._add(piece)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._name("array", value.dtype.descr, value.shape)
            # An index of a data set may be as large as the model: no copy of what is in order.
            content: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            self._add(memoryview(content))
        elif isinstance(value, bytearray | complex | type) or (callable(value) and hasattr(value, "__qualname__")):
            self._add(pickle.dumps(value, 2))
        else:
            self._feed_reduced(kind, value)

    def _feed_reduced(self, kind: type, value: Any) -> None:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            self._name("global", getattr(value, "__module__", ""), reduced)
            return
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self._feed_all("object", (maker, arguments, state))
        self._feed_all("items", () if items is None else items)
        self._feed_all("pairs", () if pairs is None else pairs)

    def _feed_all(self, kind: str, parts: Iterable[Any]) -> None:
        number = -1
        for number, part in enumerate(parts):  # noqa: B007 - the length of an iterator
            self.feed(part)
        self._name(kind, number + 1)

    def _feed_unordered(self, kind: str, parts: Iterable[Any]) -> None:
        digests: list[int] = []
        for part in parts:
            if type(part) in PYTHON_SCALARS or (type(part) is tuple and PYTHON_SCALARS.issuperset(map(type, part))):
                digests.append(crc32(marshal.dumps(part, _MARSHAL_VERSION)))  # most are
                continue
            walk = _Walk(tuple(self._inside))
            walk.feed(part)
            digests.append(walk.crc)
        self._name(kind, sorted(digests))

    def _name(self, *facts: Any) -> None:
        self._add(repr(facts).encode())

    def _add(self, content: bytes | memoryview) -> None:
        self.crc = crc32(content, self.crc)
