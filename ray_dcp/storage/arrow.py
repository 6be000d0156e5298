"""``ArrowStore``: a bucket prefix, or whatever else Arrow has a filesystem for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from pyarrow import ArrowException
from pyarrow.fs import FileSelector, FileSystem, FileType

from ray_dcp.errors import NotAFolderError, ObjectNotFoundError, StoreError
from ray_dcp.progress import PIECE_NBYTES, advance
from ray_dcp.storage.chunks import chunk_bytes
from ray_dcp.storage.failures import require_range, store_errors
from ray_dcp.storage.keys import require_key, require_prefix
from ray_dcp.storage.store import ObjectWriter, StoredObject
from ray_dcp.storage.urls import shown_url

_OBJECT_STORES = ("s3", "gcs")


class ArrowStore:
    """Objects below ``base`` in an Arrow filesystem.

    An object store publishes an object whole when its stream is closed, which is what ``put`` promises;
    on another filesystem a reader may see a ``put`` half done. Arrow cannot give up a stream, so an
    aborted ``put_new`` publishes what it had and deletes it. Refusing an existing key in ``put_new`` is a
    look before the write: two writers of one key at the same time are not told apart, the last one stays.
    """

    def __init__(self, filesystem: FileSystem, base: str, *, url: str) -> None:
        self.url = url
        self._shown = shown_url(url)
        self._files = filesystem
        self._base = base.rstrip("/")

    def __repr__(self) -> str:
        return f"ArrowStore({self._shown!r})"

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        require_key(key, url=self._shown)
        if last_look is not None:
            last_look()  # a small object is one request, which nothing can be put in front of later
        with self._errors("put", key), self._open_output(key) as stream:
            stream.write(content)

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(require_key(key, url=self._shown))

    @contextmanager
    def _put_new(self, key: str) -> Iterator[ObjectWriter]:
        with self._errors("create", key):
            if self._files.get_file_info(self._path(key)).type != FileType.NotFound:
                raise StoreError("cannot create: File exists", url=self._shown, key=key)
            stream = self._open_output(key)
        try:
            yield _StreamWriter(stream, url=self._shown, key=key)
            with self._errors("finish writing", key):
                stream.close()
        except BaseException:
            with suppress(Exception):
                stream.close()
            with suppress(Exception):
                self.delete(key)
            raise

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        require_key(key, url=self._shown, sibling=True)
        with self._errors("read", key), self._open_input(key) as opened:
            wanted = require_range(url=self._shown, key=key, held=opened.size(), offset=offset, nbytes=nbytes)
            content: bytes = opened.read_at(wanted, offset) if wanted else b""
            advance(len(content))
        require_range(url=self._shown, key=key, held=offset + len(content), offset=offset, nbytes=wanted)
        return content

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        found = self._infos(prefix, recursive=True)
        start = len(self._base) + 1
        stored = [
            StoredObject(info.path[start:], info.size, (info.mtime_ns or 0) / 1e9)
            for info in found
            if info.type == FileType.File
        ]
        return sorted(stored, key=lambda one: one.key)

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        return sorted(i.base_name for i in self._infos(prefix, recursive=False) if i.type == FileType.Directory)

    def delete(self, key: str) -> None:
        require_key(key, url=self._shown)
        with self._errors("delete", key), suppress(FileNotFoundError):
            self._files.delete_file(self._path(key))

    def _path(self, key: str) -> str:
        if key.startswith("../"):
            return f"{self._base.rpartition('/')[0]}/{key[3:]}"
        return f"{self._base}/{key}" if key else self._base

    def _errors(self, doing: str, key: str) -> AbstractContextManager[None]:
        return store_errors(doing, url=self._shown, key=key, also=(ArrowException,))

    def _open_input(self, key: str) -> Any:
        try:
            return self._files.open_input_file(self._path(key))
        except OSError as error:
            in_a_file = isinstance(error, NotADirectoryError)
            if in_a_file or self._files.get_file_info(self._path(key)).type == FileType.Directory:
                raise ObjectNotFoundError("cannot read: not an object", url=self._shown, key=key) from error
            raise

    def _open_output(self, key: str) -> Any:
        path = self._path(key)
        # In an object store a folder would be one more object, and is never needed.
        if self._files.type_name not in _OBJECT_STORES:
            self._files.create_dir(path.rpartition("/")[0], recursive=True)
        return self._files.open_output_stream(path)

    def _infos(self, prefix: str, *, recursive: bool) -> Sequence[Any]:
        prefix = require_prefix(prefix, url=self._shown)
        folder = self._path(prefix)
        with self._errors("list", prefix):
            found: Sequence[Any] = self._files.get_file_info(
                FileSelector(folder, recursive=recursive, allow_not_found=True)
            )
            # An object store finds nothing "below" an object, which is no error to it.
            if not found and self._files.get_file_info(folder).type == FileType.File:
                raise NotAFolderError("a file lies where a folder should be", url=self._shown, key=prefix)
        return found


class _StreamWriter:
    def __init__(self, stream: Any, *, url: str, key: str) -> None:
        self._stream = stream
        self._nbytes = 0
        self._url = url
        self._key = key

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        view = chunk_bytes(chunk)
        with store_errors("write", url=self._url, key=self._key, also=(ArrowException, ValueError)):
            # Arrow's write is whole or raises.
            for start in range(0, len(view), PIECE_NBYTES):
                self._stream.write(view[start : start + PIECE_NBYTES])
                advance(min(PIECE_NBYTES, len(view) - start))
        self._nbytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._nbytes
