"""Reading from a store straight into memory that is there already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from ray_dcp.store.store import Store


@runtime_checkable
class ReadsInto(Protocol):
    """A store that can fill given memory without making bytes of its own first."""

    def get_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, with what follows ``offset`` in an object.

        Buffers are flat, writable bytes, as many as one likes, of any length. Raises what ``Store.get`` raises; the
        buffers may then hold anything.
        """
        ...


Fill = Callable[[int, Sequence[memoryview]], None]
"""(offset in an object, buffers): fill them with what follows there."""


class StaysOpen(Protocol):
    """A store that opens an object once for several reads, where opening it takes as long as a small read."""

    def opened(self, key: str) -> AbstractContextManager[Fill]:
        """Within the block, a function that fills buffers from one object, as ``get_into`` does."""
        ...


@contextmanager
def opened(store: Store, key: str) -> Iterator[Fill]:
    """What ``StaysOpen.opened`` gives, from any store; one without that method opens the object for each read."""
    own = getattr(store, "opened", None)
    if own is None:
        yield functools.partial(get_into, store, key)
    else:
        with own(key) as fill:
            yield fill


def get_into(store: Store, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill ``buffers`` as ``ReadsInto.get_into`` does, from any store; one without that method takes one more copy."""
    own = getattr(store, "get_into", None)  # asking for the whole protocol takes longer than a small read
    if own is not None:
        own(key, offset, buffers)
        return
    content = memoryview(store.get(key, offset, sum(map(len, buffers))))
    for buffer in buffers:
        buffer[:] = content[: len(buffer)]
        content = content[len(buffer) :]
