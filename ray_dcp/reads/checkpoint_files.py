"""The files of one opened checkpoint, for whoever reads values out of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.reading import Fill, get_into, opened
from ray_dcp.store.store import Store

MISSING = (ObjectNotFoundError, ObjectTooShortError)
"""The errors that a store raises where bytes are missing that the checkpoint says it has."""


_MISSING_FILE = "its file is missing (if the checkpoint was saved again twice while it was read, load it again)"


class CheckpointFiles:
    """Reads byte ranges of the files. A missing file, or one that ends too early, is told as damage of the value."""

    def __init__(self, store: Store, location: str) -> None:
        self._store = store
        self._location = location.rstrip("/")

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
        try:
            get_into(self._store, key, offset, buffers)
        except MISSING as error:
            raise self.damaged(error, key, fqn, offset, sum(map(len, buffers))) from error

    def opened(self, key: str) -> AbstractContextManager[Fill]:
        """Open a file for several reads in the block. They raise the store's errors; see ``MISSING``, ``damaged``."""
        return opened(self._store, key)

    def damaged(self, error: Exception, key: str, fqn: str, offset: int, nbytes: int) -> CorruptCheckpointError:
        """The error to raise in place of ``error``, which is one of ``MISSING``."""
        what = "its file ends too early" if isinstance(error, ObjectTooShortError) else _MISSING_FILE
        return CorruptCheckpointError(what, file=self.shown(key), fqn=fqn, offset=offset, nbytes=nbytes)
