"""Pickling values in the form that every Python reads, and in the same bytes whichever Python writes.

Pythons pickle some of their own objects each in its own way: 3.11 up to 3.11.3 a member of an enum as a call of
``getattr``, 3.13 a path as one of ``pathlib._local``. Neither can be read everywhere.
"""

from __future__ import annotations

import enum
import fractions
import io
import pickle
import zoneinfo
from pathlib import PurePath
from typing import Any

from ray_dcp.format.safe_pickle.metadata_rules import as_named_now


def member_by_value(member: enum.Enum) -> tuple[Any, ...]:
    """A member of an enum as the call that gives it, as all Pythons but the first of 3.11 have it."""
    return type(member), (member.value,)


def portable_reduce(obj: Any) -> Any:
    """How to pickle ``obj``, or ``NotImplemented`` where it pickles alike everywhere."""
    if isinstance(obj, enum.Enum):
        # A class of the user's may have its own way, and Python's named constants go by their names.
        own = type(obj).__reduce_ex__ not in (enum.Enum.__reduce_ex__, enum.Flag.__reduce_ex__)
        return NotImplemented if own else member_by_value(obj)
    if type(obj) is zoneinfo.ZoneInfo and obj.key is not None:
        return zoneinfo.ZoneInfo, (obj.key,)
    if type(obj) is fractions.Fraction:
        return fractions.Fraction, (str(obj),)
    if isinstance(obj, PurePath) and type(obj).__module__.partition(".")[0] == "pathlib":
        return type(obj), (str(obj),)
    return NotImplemented


def is_renamed(named: Any) -> bool:
    """Whether other Pythons have a class or function elsewhere."""
    module = named.__module__
    return type(module) is str and as_named_now(module, "")[0] != module


_Base: Any = pickle._Pickler
"""Pickle's Python half, whose stubs leave out most of it."""


class RenamingPickler(_Base):
    """Names classes as all Pythons know them. Many times slower than pickle's own."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not is_renamed(obj):
            super().save_global(obj, name)
            return
        module, named = as_named_now(obj.__module__, name or obj.__qualname__)
        self.write(pickle.GLOBAL + f"{module}\n{named}\n".encode())
        self.memoize(obj)

    def reducer_override(self, obj: Any) -> Any:
        return portable_reduce(obj)


def renaming_dumps(value: Any, protocol: int) -> bytes:
    content = io.BytesIO()
    RenamingPickler(content, protocol).dump(value)
    return content.getvalue()


__all__ = ["RenamingPickler", "is_renamed", "member_by_value", "portable_reduce", "renaming_dumps"]
