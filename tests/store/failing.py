"""``FailingStore``: any store, and a failure of one's choice at one operation of one's choice.

``failing://NAME/path`` opens a ``LocalStore`` (``failing://NAME/memory/path`` a ``MemoryStore``) whose operations the
``Faults`` of that name count and fail, so that whole saves, loads and prunes go through it::

    faults = Faults(fail_at=3, when="after")
    dcp.save(state, checkpoint_id=f"{faults.url(tmp_path)}/step-1", no_dist=True)
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.open import register_scheme
from ray_dcp.store.store import ObjectWriter, Store, StoredObject
from ray_dcp.store.translate import as_store_error

OPERATIONS = ("put", "open", "write", "close", "get", "list", "list_folders", "delete")
"""What is counted; ``open``, ``write`` and ``close`` are those of ``put_new``."""
_names = itertools.count()
_active: dict[str, Faults] = {}


@dataclass
class Faults:
    """What goes wrong. Shared by all stores that are opened with it, in all threads of this process."""

    fail_at: int | None = None
    """The number, from 1, of the operation that fails; None fails none."""
    when: str = "before"
    """``before`` it takes effect, ``after`` it did, or ``part``: half of the bytes of a write arrive."""
    number: int = errno.EIO
    """The error, as the operating system numbers it: EIO, ENOSPC, EACCES for lost permission."""
    only: tuple[str, ...] = OPERATIONS
    """Operations that count."""
    lasting: bool = False
    """Whether every later operation fails too, as when permission is lost."""
    space_nbytes: int | None = None
    """Bytes that fit; the write that goes beyond is cut short and fails with ENOSPC."""
    lag: int = 0
    """Objects that were new in the last so many operations are not listed yet."""
    count: int = 0
    hit: list[str] = field(default_factory=list)
    """The operations that failed."""

    def __post_init__(self) -> None:
        self.name = f"faults{next(_names)}"
        self._lock = threading.Lock()
        self._written: dict[str, int] = {}
        self._total = 0
        _active[self.name] = self

    def url(self, place: Any) -> str:
        """``place``, a local path or a ``memory://`` URL, through these faults."""
        text = os.fspath(place)
        if text.startswith("memory://"):
            return f"failing://{self.name}/memory/{text.removeprefix('memory://')}"
        return f"failing://{self.name}{text}"

    def next(self, operation: str, place: str) -> BaseException | None:
        """Count an operation; the error that it fails with."""
        with self._lock:
            self._total += 1
            if operation in ("put", "close"):
                self._written.setdefault(place, self._total)
            if operation not in self.only:
                return None
            self.count += 1
            due = self.fail_at is not None and (
                self.count == self.fail_at or (self.lasting and self.count > self.fail_at)
            )
            if due:
                self.hit.append(f"{operation} {place}")
        return OSError(self.number, os.strerror(self.number)) if due else None

    def take_space(self, nbytes: int) -> int:
        """How many of ``nbytes`` fit."""
        with self._lock:
            if self.space_nbytes is None:
                return nbytes
            fits = min(nbytes, self.space_nbytes)
            self.space_nbytes -= fits
            return fits

    def is_listed(self, place: str) -> bool:
        with self._lock:
            return not self.lag or self._total - self._written.get(place, -self.lag - 1) > self.lag


class FailingStore:
    """``inner`` with faults."""

    def __init__(self, inner: Store, faults: Faults, url: str | None = None) -> None:
        self.inner = inner
        self._faults = faults
        self.url = url if url is not None else inner.url

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.inner, self._faults.name, self.url)

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        with self._operation("put", key):
            if self._faults.take_space(len(content)) < len(content):
                raise self._error("put", key, errno.ENOSPC)
            self.inner.put(key, content, last_look=last_look)

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(key, self.inner.put_new(key))

    @contextmanager
    def _put_new(self, key: str, opened: AbstractContextManager[ObjectWriter]) -> Iterator[ObjectWriter]:
        failure = self._faults.next("open", self._place(key))
        if failure is not None and self._faults.when == "before":
            raise self._error("create", key)
        after_close = None
        with opened as writer:
            if failure is not None:
                raise self._error("create", key)
            yield _FailingWriter(writer, self, key)
            after_close = self._faults.next("close", self._place(key))
            if after_close is not None and self._faults.when != "after":
                raise self._error("make durable", key)
        if after_close is not None:
            raise self._error("make durable", key)

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._operation("get", key):
            return self.inner.get(key, offset, nbytes)

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        with self._operation("list", prefix):
            return [one for one in self.inner.list(prefix) if self._faults.is_listed(self._place(one.key))]

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        with self._operation("list_folders", prefix):
            return [name for name in self.inner.list_folders(prefix) if self._is_listed_folder(prefix, name)]

    def delete(self, key: str) -> None:
        with self._operation("delete", key):
            self.inner.delete(key)

    def _is_listed_folder(self, prefix: str, name: str) -> bool:
        if not self._faults.lag:
            return True
        held = self.inner.list(f"{prefix}/{name}" if prefix else name)
        return any(self._faults.is_listed(self._place(one.key)) for one in held)

    def _place(self, key: str) -> str:
        return os.path.normpath(f"{self.inner.url}/{key}")

    def _error(self, doing: str, key: str, number: int | None = None) -> BaseException:
        number = self._faults.number if number is None else number
        return as_store_error(OSError(number, os.strerror(number)), doing, url=self.url, key=key)

    @contextmanager
    def _operation(self, name: str, key: str) -> Iterator[None]:
        failure = self._faults.next(name, self._place(key))
        if failure is not None and self._faults.when != "after":
            raise self._error(name, key)
        yield
        if failure is not None:
            raise self._error(name, key)


class _FailingWriter:
    def __init__(self, writer: ObjectWriter, store: FailingStore, key: str) -> None:
        self._writer = writer
        self._store = store
        self._key = key

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        faults = self._store._faults
        view = memoryview(chunk).cast("B") if len(memoryview(chunk)) else memoryview(b"")
        failure = faults.next("write", self._store._place(self._key))
        if failure is not None and faults.when != "after":
            if faults.when == "part":
                self._writer.write(view[: len(view) // 2])
            raise self._store._error("write", self._key)
        fits = faults.take_space(len(view))
        written = self._writer.write(view[:fits])
        if fits < len(view):
            raise self._store._error("write", self._key, errno.ENOSPC)
        if failure is not None:
            raise self._store._error("write", self._key)
        return written

    def tell(self) -> int:
        return self._writer.tell()


def _rebuild(inner: Store, name: str, url: str) -> FailingStore:
    return FailingStore(inner, _active[name], url)


def _open(url: str) -> FailingStore:
    name, _, path = url.removeprefix("failing://").partition("/")
    inner = MemoryStore(f"memory://{path.removeprefix('memory/')}") if path.startswith("memory/") else None
    return FailingStore(inner or LocalStore(f"/{path}"), _active[name], url)


register_scheme("failing", _open)
