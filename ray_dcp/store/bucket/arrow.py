"""``ArrowStore``: a bucket prefix, or whatever else Arrow has a filesystem for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from pyarrow import ArrowException
from pyarrow.fs import FileSelector, FileSystem, FileType

from ray_dcp.errors import BucketNotFoundError, NotAFolderError, ObjectNotFoundError, StoreError
from ray_dcp.format.names import parse_shard_file
from ray_dcp.progress import PROGRESS_NBYTES, advance
from ray_dcp.store.bucket.upload_stream import StreamWriter
from ray_dcp.store.location.urls import require_key, require_prefix, shown_url
from ray_dcp.store.ranges import BufferedRange, split_range
from ray_dcp.store.store import ObjectWriter, StoredObject, StoreTraits
from ray_dcp.store.translate import is_transient, require_range, store_errors

_OBJECT_STORES = ("s3", "gcs")
_ONE_REQUEST_NBYTES = 5 << 20
"""Smaller objects are never uploaded in parts: no object store takes smaller parts."""
_MAX_OPENED = 256
_MAX_REPLACED = 8
_Read = TypeVar("_Read")


class ArrowStore:
    """Objects below ``base`` in an Arrow filesystem.

    An object store publishes an object whole when its stream is closed, which is what ``put`` promises;
    on another filesystem a reader may see a ``put`` half done. Arrow cannot give up a stream, so an
    aborted ``put_new`` publishes what it had and deletes it. Refusing an existing key in ``put_new`` is a
    look before the write: two writers of one key at the same time are not told apart, the last one stays. Behind a
    ``delete`` Arrow puts an empty object ``folder/``, which is listed as a folder.

    ``uploads`` is the filesystem for objects that go up in parts; ``filesystem`` by default.
    """

    traits = StoreTraits()

    def __init__(
        self, filesystem: FileSystem, base: str, *, url: str, uploads: FileSystem | None = None, max_parallel: int = 8
    ) -> None:
        self.url = url
        self._shown = shown_url(url)
        self._files = filesystem
        self._uploads = uploads or filesystem
        self._base = base.rstrip("/")
        self._max_parallel = max_parallel
        self._is_bucket = filesystem.type_name in _OBJECT_STORES
        self._opened: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        require_key(key, url=self._shown)
        if last_look is not None:
            last_look()  # a small object is one request, which nothing can be put in front of later
        # A stream that begins its upload in parts only when it has to, and then fails to, publishes what it has when it
        # is closed: nothing, in place of what was there. ``uploads`` begins when it is opened.
        files = self._files if len(content) < _ONE_REQUEST_NBYTES else self._uploads
        self._forget(key)
        with self._errors("put", key), self._open_output(files, key) as stream:
            stream.write(content)

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(require_key(key, url=self._shown))

    @contextmanager
    def _put_new(self, key: str) -> Iterator[ObjectWriter]:
        with self._errors("create", key):
            if self._is_there(key):
                raise StoreError("cannot create: File exists", url=self._shown, key=key)
            self._forget(key)
            stream = self._open_output(self._uploads, key)
        try:
            yield StreamWriter(stream, url=self._shown, key=key, max_parallel=self._max_parallel)
            with self._errors("finish writing", key):
                stream.close()
        except BaseException as error:
            if is_transient(error):
                # The service is down, and would only be waited for again. The key is this stream's alone.
                threading.Thread(target=self._give_up, args=(stream, key), daemon=True).start()
            else:
                self._give_up(stream, key)
            raise

    def _give_up(self, stream: Any, key: str) -> None:
        with suppress(Exception):
            stream.close()
        with suppress(Exception):
            self.delete(key)

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        require_key(key, url=self._shown, sibling=True)
        if offset == 0 and nbytes is None:
            return self._get_whole(key)

        def read(opened: Any) -> bytes:
            wanted = require_range(url=self._shown, key=key, held=opened.size(), offset=offset, nbytes=nbytes)
            content: bytes = opened.read_at(wanted, offset) if wanted else b""
            advance(len(content))
            return self._require_whole(content, key, offset, wanted)

        return self._read(key, read)

    def get_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``ReadsInto``: whole pieces of a buffer come straight from the connection."""
        require_key(key, url=self._shown, sibling=True)

        def read(opened: Any) -> None:
            nbytes = sum(map(len, buffers))
            require_range(url=self._shown, key=key, held=opened.size(), offset=offset, nbytes=nbytes)
            for piece in split_range(offset, buffers, PROGRESS_NBYTES):
                self._fill(opened, key, piece)
                advance(piece.nbytes)

        self._read(key, read)

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
        self._forget(key)
        with self._errors("delete", key), suppress(FileNotFoundError):
            self._files.delete_file(self._path(key))

    def _path(self, key: str) -> str:
        if key.startswith("../"):
            return f"{self._base.rpartition('/')[0]}/{key[3:]}"
        return f"{self._base}/{key}" if key else self._base

    def _errors(self, doing: str, key: str) -> AbstractContextManager[None]:
        return store_errors(doing, url=self._shown, key=key, also=(ArrowException,))

    def _is_there(self, key: str) -> bool:
        if not self._is_bucket:
            return bool(self._files.get_file_info(self._path(key)).type != FileType.NotFound)
        try:  # one request; asking for its type would also list what is below
            self._files.open_input_file(self._path(key)).close()
        except FileNotFoundError:
            return False
        return True

    def _get_whole(self, key: str) -> bytes:
        # Arrow asks for the size first and then reads so much, garbage included where a put has made the object shorter
        # in between. So the size must be the same afterwards.
        for _ in range(_MAX_REPLACED):
            content = self._read(key, lambda opened: bytes(opened.read_at(opened.size(), 0)) if opened.size() else b"")
            if parse_shard_file(key.rpartition("/")[2]) or not self._is_bucket:
                break
            with self._errors("read", key):
                info = self._files.get_file_info(self._path(key))
            if info.size == len(content):
                break
        else:
            raise StoreError("cannot read: it is replaced all the time", url=self._shown, key=key)
        advance(len(content))
        return content

    def _read(self, key: str, read: Callable[[Any], _Read]) -> _Read:
        """What ``read`` makes of the opened object; one that was opened earlier may be out of date."""
        with self._errors("read", key):
            opened, is_kept = self._open_input(key)
            try:
                return read(opened)
            except (OSError, ArrowException):
                self._forget(key)
                # An answer that says no does not fit where the bytes should go, and Arrow calls that an internal
                # failure. Opening it again says what is the matter.
                if is_kept and self._files.get_file_info(self._path(key)).type != FileType.File:
                    raise ObjectNotFoundError("cannot read: it is gone", url=self._shown, key=key) from None
                raise
            finally:
                if not is_kept:
                    opened.close()

    def _fill(self, opened: Any, key: str, piece: BufferedRange) -> None:
        if len(piece.buffers) == 1:
            segment = opened.get_stream(piece.offset, piece.nbytes)
            nbytes = segment.readinto(piece.buffers[0])
            if nbytes == piece.nbytes:
                return
        content = self._require_whole(opened.read_at(piece.nbytes, piece.offset), key, piece.offset, piece.nbytes)
        piece.scatter(content)

    def _require_whole(self, content: bytes, key: str, offset: int, nbytes: int) -> bytes:
        require_range(url=self._shown, key=key, held=offset + len(content), offset=offset, nbytes=nbytes)
        return content

    def _open_input(self, key: str) -> tuple[Any, bool]:
        """The opened object, and whether it is kept open: in a bucket opening is one more request, for the size."""
        keeps = self._is_bucket and parse_shard_file(key.rpartition("/")[2]) is not None
        with self._lock:
            if key in self._opened:
                self._opened.move_to_end(key)
                return self._opened[key], True
        try:
            opened = self._files.open_input_file(self._path(key))
        except OSError as error:
            if self._is_bucket and isinstance(error, FileNotFoundError):
                raise  # a folder is nothing of its own there
            in_a_file = isinstance(error, NotADirectoryError)
            if in_a_file or self._files.get_file_info(self._path(key)).type == FileType.Directory:
                raise ObjectNotFoundError("cannot read: not an object", url=self._shown, key=key) from error
            raise
        if keeps:
            with self._lock:
                self._opened[key] = opened
                while len(self._opened) > _MAX_OPENED:
                    self._opened.popitem(last=False)
        return opened, keeps

    def _forget(self, key: str) -> None:
        with self._lock:
            self._opened.pop(key, None)

    def _open_output(self, files: FileSystem, key: str) -> Any:
        path = self._path(key)
        # In an object store a folder would be one more object, and is never needed.
        if not self._is_bucket:
            files.create_dir(path.rpartition("/")[0], recursive=True)
        return files.open_output_stream(path)

    def _infos(self, prefix: str, *, recursive: bool) -> Sequence[Any]:
        prefix = require_prefix(prefix, url=self._shown)
        folder = self._path(prefix)
        with self._errors("list", prefix):
            found: Sequence[Any] = self._files.get_file_info(
                FileSelector(folder, recursive=recursive, allow_not_found=True)
            )
            # An object store finds nothing "below" an object, which is not an error to it.
            if not found and self._files.get_file_info(folder).type == FileType.File:
                raise NotAFolderError("a file lies where a folder should be", url=self._shown, key=prefix)
        if not found:
            self._require_bucket()
        return found

    def _require_bucket(self) -> None:
        """Raise ``BucketNotFoundError`` for a missing bucket: Arrow lists nothing in it, as in an empty root."""
        bucket = self._base.partition("/")[0]
        try:
            is_there = not self._is_bucket or self._files.get_file_info(bucket).type != FileType.NotFound
        except (OSError, ArrowException):
            return  # who may list may not be allowed to ask that
        if not is_there:
            raise BucketNotFoundError(
                f"there is no bucket {bucket!r}; make it, or look for the right name, endpoint and region",
                url=self._shown,
            )
