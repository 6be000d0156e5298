"""Reading from a store straight into memory that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ray_dcp.storage.store import Store


@runtime_checkable
class ReadsInto(Protocol):
    """A store that can fill given memory without making bytes of its own first."""

    def get_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with what follows ``offset`` in an object.

        Buffers are flat, writable bytes, as many as one likes, of any length. Raises as ``Store.get`` does; what the
        buffers hold is then not said.
        """
        ...


def get_into(store: Store, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
    """``ReadsInto.get_into`` of a store that has it, and the same with one copy of any other."""
    if isinstance(store, ReadsInto):
        store.get_into(key, offset, buffers)
        return
    content = memoryview(store.get(key, offset, sum(map(len, buffers))))
    for buffer in buffers:
        buffer[:] = content[: len(buffer)]
        content = content[len(buffer) :]
