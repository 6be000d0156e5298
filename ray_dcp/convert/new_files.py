"""New files that no reader sees before all of them are whole.

On a file system they are written under temporary names, and renamed at the end. A bucket has no rename: there each
file appears whole, and an index that names all of them comes first, so a reader refuses the folder until they are
there. What is replaced goes before anything new appears: a reader sees the old, the new or an error, never a mixture.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from ray_dcp.errors import RayDcpError
from ray_dcp.store.store import ObjectWriter, RenamingStore, Store, as_renaming

CreateFile = Callable[[str], AbstractContextManager[ObjectWriter]]
"""Key -> a writer for the file that will have it."""


@contextmanager
def new_files(
    store: Store, *, replaced: Sequence[str] = (), index: tuple[str, bytes] | None = None
) -> Iterator[CreateFile]:
    """Yield a function that creates a file. After the block the files are there, and those ``replaced`` are gone.

    ``index`` is the key and content of a small file that names the others. A block that is left by an exception leaves
    nothing new behind, and on a file system everything old.
    """
    renaming = as_renaming(store)
    files = _PutFiles(store, index, replaced) if renaming is None else _RenamedFiles(renaming, index, replaced)
    try:
        files.begin()
        yield files.create
        files.publish()
    except BaseException:
        files.abandon()
        raise


class _RenamedFiles:
    def __init__(self, store: RenamingStore, index: tuple[str, bytes] | None, replaced: Sequence[str]) -> None:
        self._store = store
        self._index = index
        self._replaced = replaced
        self._temporaries: dict[str, str] = {}

    def begin(self) -> None:
        """Nothing to do: all of it comes at the end."""

    def create(self, key: str) -> AbstractContextManager[ObjectWriter]:
        # The name that the store's own temporary files have: listings leave it out, and prune knows it.
        self._temporaries[key] = f".ray_dcp_{uuid.uuid4().hex}.tmp"
        return self._store.put_new(self._temporaries[key])

    def publish(self) -> None:
        if self._index is None:
            # One file: a rename alone takes its place, and what else there was of the old one goes after it.
            self._rename()
            self._delete([key for key in self._replaced if key not in self._temporaries])
        else:
            self._delete(self._replaced)
            self._store.put(*self._index)
            self._rename()
        self._temporaries = {}

    def abandon(self) -> None:
        with suppress(RayDcpError):
            self._delete(list(self._temporaries.values()))

    def _rename(self) -> None:
        for key, temporary in self._temporaries.items():
            self._store.rename(temporary, key)

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete(key)


class _PutFiles:
    def __init__(self, store: Store, index: tuple[str, bytes] | None, replaced: Sequence[str]) -> None:
        self._store = store
        self._index = index
        self._replaced = replaced
        self._put: list[str] = []

    def begin(self) -> None:
        for key in self._replaced:
            self._store.delete(key)
        if self._index is not None:
            self._put.append(self._index[0])
            self._store.put(*self._index)

    def create(self, key: str) -> AbstractContextManager[ObjectWriter]:
        self._put.append(key)
        return self._store.put_new(key)

    def publish(self) -> None:
        """Nothing to do: each file appeared when it was whole."""

    def abandon(self) -> None:
        # The index last: while it is there, nobody takes what is left for a model.
        for key in reversed(self._put):
            with suppress(RayDcpError):
                self._store.delete(key)
