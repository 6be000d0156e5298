"""The files of one opened checkpoint, for whoever reads values out of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from ray_dcp.reads.nearby import MEMORY_TRAITS, NearbyFiles
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.reading import Fill, get_into, opened
from ray_dcp.store.store import Store, StoreTraits

MISSING = (ObjectNotFoundError, ObjectTooShortError)
"""The errors that a store raises where bytes are missing that the checkpoint says it has."""


_MISSING_FILE = "its file is missing (if the checkpoint was saved again twice while it was read, load it again)"
_T = TypeVar("_T")


class CheckpointFiles:
    """Reads byte ranges of the files. A missing file, or one that ends too early, is told as damage of the value.

    ``near`` are those of them that are nearer than the store.
    """

    def __init__(self, store: Store, location: str, near: NearbyFiles | None = None) -> None:
        self._store = store
        self._location = location.rstrip("/")
        self._near = near

    def shown(self, key: str) -> str:
        """The whole place of the file ``key``, for messages."""
        return join_url(self._location, key)

    def get(self, key: str, fqn: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes of a file from ``offset`` on. Raises ``CorruptCheckpointError`` where they are missing."""
        try:
            return self._store.get(key, offset, nbytes)
        except MISSING as error:
            raise self.damaged(error, key, fqn, offset, nbytes) from error

    def fill(self, key: str, fqn: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``, one after the other, from byte ``offset`` on; raises as ``get`` does."""
        from_store = functools.partial(get_into, self._store, key)
        try:
            if self._near is None:
                from_store(offset, buffers)
            else:
                self._near.fill(key, offset, buffers, from_store)
        except MISSING as error:
            raise self.damaged(error, key, fqn, offset, sum(map(len, buffers))) from error

    def opened(self, key: str) -> AbstractContextManager[Fill]:
        """Open a file for several reads in the block. They raise the store's errors; see ``MISSING``, ``damaged``."""
        return opened(self._store, key) if self._near is None else self._opened_near(key, self._near)

    @contextmanager
    def _opened_near(self, key: str, near: NearbyFiles) -> Iterator[Fill]:
        """As ``opened``; the store is not asked for the file before some range has to come from there."""
        with ExitStack() as until_closed:
            in_store: list[Fill] = []

            def from_store(offset: int, buffers: Sequence[memoryview]) -> None:
                if not in_store:
                    in_store.append(until_closed.enter_context(opened(self._store, key)))
                in_store[0](offset, buffers)

            yield lambda offset, buffers: near.fill(key, offset, buffers, from_store)

    def is_near(self, key: str) -> bool:
        """Whether the file can be had from a nearer place than the store."""
        return self._near is not None and self._near.has(key)

    def traits(self, keys: Iterable[str], of_store: StoreTraits) -> StoreTraits:
        """How these files are best read together: as the farthest of the places in which they are."""
        near = self._near
        if near is None:
            return of_store
        found = [near.traits(key) or of_store for key in keys]
        return next((traits for traits in found if not traits.page_cache), MEMORY_TRAITS)

    def checked(self, key: str, read: Callable[[], _T]) -> _T:
        """What ``read`` returns, which reads and checks bytes of one file: of another place where they are wrong."""
        return read() if self._near is None else self._near.again_from_next(key, read)

    def damaged(self, error: Exception, key: str, fqn: str, offset: int, nbytes: int) -> CorruptCheckpointError:
        """The error to raise in place of ``error``, which is one of ``MISSING``."""
        what = "its file ends too early" if isinstance(error, ObjectTooShortError) else _MISSING_FILE
        return CorruptCheckpointError(what, file=self.shown(key), fqn=fqn, offset=offset, nbytes=nbytes)
