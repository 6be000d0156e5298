"""``LocalStore``: a folder of this machine, or of a filesystem mounted on it."""

from __future__ import annotations

import functools
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ray_dcp.errors import ObjectNotFoundError, RayDcpError, StoreError
from ray_dcp.progress import advance
from ray_dcp.store.durable import Writeback, close_durably, fsync_folder, make_folder, preallocate, write_fully
from ray_dcp.store.location.urls import require_key, require_prefix
from ray_dcp.store.reading import Fill
from ray_dcp.store.store import ObjectWriter, Store, StoredObject, StoreTraits
from ray_dcp.store.translate import as_store_error, require_range, store_errors

_TEMPORARY = re.compile(r"\.ray_dcp_[0-9a-f]{32}\.tmp")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MAX_RETRIES = 8
_MAX_BUFFERS = 1024
"""Most buffers of one read: Linux takes no more."""


class LocalStore:
    """Objects are files. What a method has returned for survives a power cut, unless ``sync_files`` is False.

    A folder exists while it holds something: the last ``delete`` in it removes it too, though never the root.
    """

    traits = StoreTraits(page_cache=True, folders=True, renames=True)

    def __init__(self, root: str | os.PathLike[str], *, sync_files: bool = True) -> None:
        # Absolute, so that it means the same after chdir and, pickled, in another process.
        self.url = os.path.abspath(os.fsdecode(root))
        self._durable_folders: set[str] = set()
        self._sync_files = sync_files

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(LocalStore, sync_files=self._sync_files), (self.url,)

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        path = self._path(require_key(key, url=self.url))
        # A constant length: a longer variant of the key's own name might not fit the filesystem's limit.
        temporary = os.path.join(os.path.dirname(path), f".ray_dcp_{uuid.uuid4().hex}.tmp")
        with store_errors("put", url=self.url, key=key):
            descriptor = self._create(temporary)
            try:
                try:
                    write_fully(descriptor, content)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._close(descriptor)
                if last_look is not None:
                    last_look()
                os.rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync_folder(os.path.dirname(path))

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(require_key(key, url=self.url))

    @contextmanager
    def _put_new(self, key: str) -> Iterator[ObjectWriter]:
        path = self._path(key)
        with store_errors("create", url=self.url, key=key):
            writer = _FileWriter(self._create(path), self._close, syncs=self._sync_files, url=self.url, key=key)
        try:
            yield writer
            with store_errors("make durable", url=self.url, key=key):
                writer.finish()
                self._sync_folder(os.path.dirname(path))
        except BaseException:
            writer.abandon()
            with suppress(OSError):
                if writer.is_file_at(path):
                    os.unlink(path)
            self._remove_empty_folders(os.path.dirname(path))
            raise

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._reading(key) as (descriptor, held):
            wanted = require_range(url=self.url, key=key, held=held, offset=offset, nbytes=nbytes)
            content = _read_fully(descriptor, wanted, offset)
        # It may have been cut short between fstat and now.
        require_range(url=self.url, key=key, held=offset + len(content), offset=offset, nbytes=wanted)
        return content

    def get_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``ReadsInto``."""
        with self._reading(key) as (descriptor, held):
            require_range(url=self.url, key=key, held=held, offset=offset, nbytes=sum(map(len, buffers)))
            self._read_into(key, descriptor, offset, buffers)

    @contextmanager
    def opened(self, key: str) -> Iterator[Fill]:
        """See ``StaysOpen``."""
        with self._reading(key) as (descriptor, _):
            yield functools.partial(self._fill, key, descriptor)

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        prefix = require_prefix(prefix, url=self.url)
        with store_errors("list", url=self.url, key=prefix):
            return sorted(self._objects_below(self._path(prefix), f"{prefix}/" if prefix else ""), key=_by_key)

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        prefix = require_prefix(prefix, url=self.url)
        with store_errors("list", url=self.url, key=prefix):
            return sorted(entry.name for entry in _scan(self._path(prefix)) if entry.is_dir())

    def delete(self, key: str) -> None:
        path = self._path(require_key(key, url=self.url))
        with store_errors("delete", url=self.url, key=key), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
            self._remove_empty_folders(os.path.dirname(path))
            # The name is gone for good only when its folder is durable, or the folder's own name is gone.
            with suppress(FileNotFoundError):
                fsync_folder(os.path.dirname(path))

    def list_temporaries(self, prefix: str = "") -> Sequence[StoredObject]:
        """The temporary files directly in a folder: those of a ``put`` under way, or of a process that died in one."""
        prefix = require_prefix(prefix, url=self.url)
        with store_errors("list", url=self.url, key=prefix):
            found = [entry for entry in _scan(self._path(prefix)) if _TEMPORARY.fullmatch(entry.name)]
            return sorted(_stored(found, f"{prefix}/" if prefix else ""), key=_by_key)

    def delete_empty_folder(self, prefix: str) -> bool:
        """Remove a folder if nothing at all is in it; return whether it is gone."""
        path = self._path(require_prefix(prefix, url=self.url))
        if len(path) > len(self.url):
            self._remove_empty_folders(path)
        return not os.path.lexists(path)

    def is_link(self, prefix: str) -> bool:
        """Whether a folder is a symbolic link."""
        return os.path.islink(self._path(require_prefix(prefix, url=self.url)))

    def link_target(self, prefix: str) -> str:
        """See ``FolderStore``."""
        with store_errors("follow", url=self.url, key=prefix):
            return os.readlink(self._path(require_prefix(prefix, url=self.url)))

    def is_there(self, prefix: str) -> bool:
        """See ``FolderStore``."""
        return os.path.exists(self._path(require_prefix(prefix, url=self.url)))

    def real_url(self) -> str:
        """See ``FolderStore``."""
        return os.path.realpath(self.url)

    def rename(self, key: str, new_key: str) -> None:
        """See ``RenamingStore``."""
        old, new = (self._path(require_key(one, url=self.url)) for one in (key, new_key))
        with store_errors("rename", url=self.url, key=new_key):
            os.rename(old, new)
            self._sync_folder(os.path.dirname(new))

    def without_sync(self) -> LocalStore:
        """A store of the same folder that leaves it to the operating system when files reach the disk."""
        return LocalStore(self.url, sync_files=False)

    def _path(self, key: str) -> str:
        return os.path.join(self.url, key) if key else self.url

    def _close(self, descriptor: int) -> None:
        if self._sync_files:
            close_durably(descriptor)
        else:
            os.close(descriptor)

    def _sync_folder(self, folder: str) -> None:
        if self._sync_files:
            fsync_folder(folder)

    def _fill(self, key: str, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        try:  # not ``store_errors``: this runs for every half block, with nothing in the CPU's caches
            self._read_into(key, descriptor, offset, buffers)
        except RayDcpError:
            raise
        except OSError as error:
            raise as_store_error(error, "read", url=self.url, key=key) from error

    def _read_into(self, key: str, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers``. Raises ``ObjectTooShortError`` where the file ends before."""
        if len(buffers) == 1 and buffers[0]:
            nbytes = os.preadv(descriptor, buffers, offset)  # one read is all that is needed, nearly always
            advance(nbytes)
            if nbytes == len(buffers[0]):
                return
            offset, buffers = offset + nbytes, [buffers[0][nbytes:]]
        wanted = sum(map(len, buffers))
        end = _read_into(descriptor, list(buffers), offset)
        require_range(url=self.url, key=key, held=end, offset=offset, nbytes=wanted)

    @contextmanager
    def _reading(self, key: str) -> Iterator[tuple[int, int]]:
        """An open descriptor and how many bytes the file has."""
        path = self._path(require_key(key, url=self.url, sibling=True))
        with store_errors("read", url=self.url, key=key):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except NotADirectoryError as error:
                raise ObjectNotFoundError(f"cannot read: {error.strerror}", url=self.url, key=key) from error
            try:
                status = os.fstat(descriptor)
                if stat.S_ISDIR(status.st_mode):
                    raise ObjectNotFoundError("a folder, not an object", url=self.url, key=key)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _create(self, path: str) -> int:
        """Open a file that must be new, in a folder whose own name is durable."""
        for _ in range(_MAX_RETRIES):
            self._require_folder(os.path.dirname(path))
            try:
                return os.open(path, _NEW_FILE, 0o666)
            except FileNotFoundError:
                # Another process deleted the folder's last object, and the folder with it.
                self._durable_folders.discard(os.path.dirname(path))
        raise StoreError("cannot create: its folder keeps vanishing", url=self.url, key=os.path.relpath(path, self.url))

    def _require_folder(self, folder: str) -> None:
        """Make ``folder`` exist, with its name and those of its parents up to the root durable."""
        if folder in self._durable_folders:
            return
        if not self._sync_files:
            os.makedirs(folder, exist_ok=True)
            return
        if len(folder) > len(self.url):
            self._require_folder(os.path.dirname(folder))
        if not make_folder(folder):
            # Whoever created it may not have come to this yet. The root's parent may be closed to us.
            with suppress(PermissionError):
                fsync_folder(os.path.dirname(folder))
        self._durable_folders.add(folder)

    def _objects_below(self, folder: str, prefix: str) -> Iterator[StoredObject]:
        for entry in _scan(folder):
            key = prefix + entry.name
            try:
                # Folders behind symbolic links are not entered, they may form a loop; files behind them count.
                if entry.is_dir(follow_symlinks=False):
                    yield from self._objects_below(entry.path, f"{key}/")
                elif entry.is_file() and not _TEMPORARY.fullmatch(entry.name):
                    status = entry.stat()
                    yield StoredObject(key, status.st_size, status.st_mtime)
            except FileNotFoundError:
                continue  # deleted since the scan

    def _remove_empty_folders(self, folder: str) -> None:
        with suppress(OSError):  # not empty, most of the time
            while len(folder) > len(self.url):
                os.rmdir(folder)
                folder = os.path.dirname(folder)
                fsync_folder(folder)


def without_sync(store: Store) -> Store:
    """``store`` in the form that does not wait for disks, where it has one; other stores wait for no disk anyway."""
    own: Callable[[], Store] | None = getattr(store, "without_sync", None)
    return store if own is None else own()


class _FileWriter:
    """Writes to one descriptor, which it closes exactly once."""

    def __init__(self, descriptor: int, close: Callable[[int], None], *, syncs: bool, url: str, key: str) -> None:
        self._descriptor: int | None = descriptor
        self._status = os.fstat(descriptor)
        self._close = close
        self._writeback = Writeback(descriptor) if syncs else None
        self._nbytes = 0
        self._reserved = 0
        self._url = url
        self._key = key

    def is_file_at(self, path: str) -> bool:
        """Whether what is at ``path`` is what this writes.

        Somebody who writes in this one's place, since it was given up, may have put a file of its own there.
        """
        return os.path.samestat(self._status, os.lstat(path))

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        if self._descriptor is None:
            raise StoreError("cannot write: the writer is closed", url=self._url, key=self._key)
        try:  # as in ``LocalStore._fill``
            written = write_fully(self._descriptor, chunk)
        except RayDcpError:
            raise
        except OSError as error:
            error.needed_nbytes = max(self._reserved - self._nbytes, len(chunk))  # type: ignore[attr-defined]  # of room
            raise as_store_error(error, "write", url=self._url, key=self._key) from error
        self._nbytes += written
        if self._writeback is not None:
            self._writeback.written_up_to(self._nbytes)
        return written

    def preallocate(self, nbytes: int) -> None:
        """See ``Preallocates``."""
        if self._descriptor is not None:
            with store_errors("make room for", url=self._url, key=self._key):
                preallocate(self._descriptor, nbytes)
                self._reserved = nbytes

    def tell(self) -> int:
        return self._nbytes

    def finish(self) -> None:
        """Make the content durable and close; errors of either are raised."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if self._reserved > self._nbytes:
                os.ftruncate(descriptor, self._nbytes)  # what is reserved behind its end would stay taken
            self._close(descriptor)

    def abandon(self) -> None:
        """Close, and raise nothing; does nothing when it is closed already."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _by_key(stored: StoredObject) -> str:
    return stored.key


def _stored(entries: Iterable[os.DirEntry[str]], prefix: str) -> Iterator[StoredObject]:
    for entry in entries:
        with suppress(FileNotFoundError):  # renamed or deleted since
            status = entry.stat()
            yield StoredObject(prefix + entry.name, status.st_size, status.st_mtime)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder; an empty list when it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _read_fully(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read ``nbytes`` from ``offset``; fewer only where the file ends."""
    # One read takes at most 2 GiB on Linux, and a signal or a network filesystem may end one early.
    parts = []
    while nbytes > 0 and (part := os.pread(descriptor, nbytes, offset)):
        advance(len(part))
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_into(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """Fill ``buffers``; return the offset behind the last byte read, which is short only where the file ends."""
    buffers = [buffer for buffer in buffers if buffer]
    while buffers and (nbytes := os.preadv(descriptor, buffers[:_MAX_BUFFERS], offset)):
        advance(nbytes)
        offset += nbytes
        while buffers and nbytes >= len(buffers[0]):
            nbytes -= len(buffers.pop(0))
        if nbytes:
            buffers[0] = buffers[0][nbytes:]
    return offset
