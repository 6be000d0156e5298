"""``gated://NAME/path``: a local folder whose shard files are written when the test lets them through.

A slow store whose speed the test decides. It also notes in which order checkpoints are committed.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ray_dcp.errors import StoreError
from ray_dcp.format.names import METADATA
from ray_dcp.store.local import LocalStore
from ray_dcp.store.open import register_scheme
from ray_dcp.store.store import ObjectWriter, StoredObject
from tests.slack import within

_names = itertools.count()
_gates: dict[str, Gates] = {}


class Gates:
    """The gates of the checkpoints under one root. Closed at first, unless they are all ``open``."""

    def __init__(self, root: Any, *, open: bool = False) -> None:
        self.name = f"gates{next(_names)}"
        self.root = f"gated://{self.name}{os.fspath(root)}"
        self.committed: list[str] = []
        """The names of the folders of what was committed, in that order."""
        self.on_commit: Callable[[], object] = lambda: None
        self._all_open = open
        self._changed = threading.Condition()
        self._open: set[str] = set()
        self._failing: set[tuple[str, int | None]] = set()
        self.waiting: list[str] = []
        """The keys of files, with their folders, that have come to their gate."""
        _gates[self.name] = self

    def url(self, folder: str) -> str:
        return f"{self.root}/{folder}"

    def open(self, *folders: str) -> None:
        """Let the files of these checkpoints through; of all, where none is named."""
        with self._changed:
            self._open |= set(folders)
            self._all_open |= not folders
            self._changed.notify_all()

    def open_for(self, folder: str, rank: int) -> None:
        """Let the file of one rank through."""
        with self._changed:
            self._open.add(f"{folder}/{rank}")
            self._changed.notify_all()

    def fail(self, folder: str, rank: int | None = None) -> None:
        """Have the files of a checkpoint fail at their gate, or that of one rank alone."""
        self._failing.add((folder, rank))

    def pass_through(self, folder: str, key: str) -> None:
        rank = int(key.split("_")[2])
        with self._changed:
            self.waiting.append(f"{folder}/{key}")
            self._changed.notify_all()
            ways = {folder, f"{folder}/{rank}"}
            if not self._changed.wait_for(lambda: self._all_open or ways & self._open, timeout=within(60)):
                raise AssertionError(f"nobody has opened the gate of {folder}")
        if {(folder, None), (folder, rank)} & self._failing:
            raise StoreError("No space left on device", url=folder, key=key)

    def wait_for_waiting(self, how_many: int) -> None:
        """Return when so many files have come to their gates."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.waiting) >= how_many, timeout=within(60)), self.waiting

    def note(self, folder: str, key: str) -> None:
        if key == METADATA:
            self.committed.append(folder)
            self.on_commit()


class GatedStore:
    """See the module."""

    traits = LocalStore.traits

    def __init__(self, name: str, path: str) -> None:
        self._gates, self._folder, self._inner = _gates[name], os.path.basename(path), LocalStore(path)
        self._opened = name, path
        self.url = f"gated://{name}{path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return GatedStore, self._opened

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        self._inner.put(key, content, last_look=last_look)
        self._gates.note(self._folder, key)

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._through_the_gate(key)

    @contextmanager
    def _through_the_gate(self, key: str) -> Iterator[ObjectWriter]:
        self._gates.pass_through(self._folder, key)
        with self._inner.put_new(key) as writer:
            yield writer

    def rename(self, key: str, new_key: str) -> None:
        self._inner.rename(key, new_key)

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._inner.get(key, offset, nbytes)

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        return self._inner.list(prefix)

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        return self._inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)


def _open(url: str) -> GatedStore:
    name, _, path = url.removeprefix("gated://").partition("/")
    return GatedStore(name, f"/{path}")


register_scheme("gated", _open)
