"""The files of one opened checkpoint, for whoever reads values out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError, ObjectTooShortError
from ray_dcp.storage.reading import Fill, get_into, opened
from ray_dcp.storage.store import Store


class CheckpointFiles:
    """Reads byte ranges. A file that is missing or ends too early is damage, and told as such with the value's name."""

    def __init__(self, store: Store, location: str) -> None:
        self._store = store
        self._location = location.rstrip("/")

    def shown(self, key: str) -> str:
        """A file for messages."""
        return f"{self._location}/{key}"

    def get(self, key: str, fqn: str, offset: int, nbytes: int) -> bytes:
        try:
            return self._store.get(key, offset, nbytes)
        except (ObjectNotFoundError, ObjectTooShortError) as error:
            raise self._damaged(error, key, fqn, offset, nbytes) from error

    def fill(self, key: str, fqn: str, offset: int, buffers: Sequence[memoryview]) -> None:
        try:
            get_into(self._store, key, offset, buffers)
        except (ObjectNotFoundError, ObjectTooShortError) as error:
            raise self._damaged(error, key, fqn, offset, sum(map(len, buffers))) from error

    @contextmanager
    def opened(self, key: str, fqn: str, offset: int, nbytes: int) -> Iterator[Fill]:
        """``fill`` for several reads of one value, which lies at ``offset``."""
        with ExitStack() as until_done:
            try:
                fill = until_done.enter_context(opened(self._store, key))
            except ObjectNotFoundError as error:
                raise self._damaged(error, key, fqn, offset, nbytes) from error

            def told(at: int, buffers: Sequence[memoryview]) -> None:
                try:
                    fill(at, buffers)
                except (ObjectNotFoundError, ObjectTooShortError) as error:
                    raise self._damaged(error, key, fqn, at, sum(map(len, buffers))) from error

            yield told

    def _damaged(self, error: Exception, key: str, fqn: str, offset: int, nbytes: int) -> CorruptCheckpointError:
        what = "its file ends too early" if isinstance(error, ObjectTooShortError) else "its file is missing"
        return CorruptCheckpointError(what, file=self.shown(key), fqn=fqn, offset=offset, nbytes=nbytes)
