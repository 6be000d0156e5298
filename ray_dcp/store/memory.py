"""``MemoryStore``: objects of this process, the same ones that torch's fsspec writer and reader see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ray_dcp.errors import NotAFolderError, StoreError
from ray_dcp.progress import advance
from ray_dcp.store.location.urls import require_key, require_prefix
from ray_dcp.store.store import ObjectWriter, StoredObject, StoreTraits, chunk_bytes
from ray_dcp.store.translate import require_range, store_errors


class MemoryStore:
    """Objects in fsspec's global ``MemoryFileSystem``; they end with the process.

    It calls fsspec without Arrow's streams between: those open a file by handing every reader the one
    stored object with its one position, and create a file before they fill it.
    """

    traits = StoreTraits(page_cache=True)

    def __init__(self, url: str) -> None:
        # Not on import: the command line can list a local folder without fsspec.
        from fsspec.implementations.memory import MemoryFileSystem

        self.url = url
        self._files = MemoryFileSystem()
        self._root = self._files._strip_protocol(url)

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryStore, (self.url,)

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        require_key(key, url=self.url)
        if last_look is not None:
            last_look()
        with store_errors("put", url=self.url, key=key):
            self._files.pipe_file(self._path(key), bytes(content))

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(require_key(key, url=self.url))

    @contextmanager
    def _put_new(self, key: str) -> Iterator[ObjectWriter]:
        self._require_new(key)
        writer = _BufferWriter()
        yield writer
        self._require_new(key)
        self.put(key, bytes(writer.buffer))

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        require_key(key, url=self.url, sibling=True)
        with store_errors("read", url=self.url, key=key):
            content: bytes = self._files.cat_file(self._path(key))
        advance(len(content))
        wanted = require_range(url=self.url, key=key, held=len(content), offset=offset, nbytes=nbytes)
        return content if wanted == len(content) else content[offset : offset + wanted]

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        folder = self._require_folder(prefix)
        found = self._files.find(folder, detail=True)
        stored = (StoredObject(path[len(self._root) + 1 :], f["size"], f["created"]) for path, f in found.items())
        return sorted(stored, key=lambda one: one.key)

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        folder = self._require_folder(prefix)
        with suppress(FileNotFoundError):
            found = self._files.ls(folder, detail=True)
            return sorted(f["name"].rpartition("/")[2] for f in found if f["type"] == "directory")
        return []

    def delete(self, key: str) -> None:
        require_key(key, url=self.url)
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        if key.startswith("../"):
            return f"{self._root.rpartition('/')[0]}/{key[3:]}"
        return f"{self._root}/{key}" if key else str(self._root)

    def _require_folder(self, prefix: str) -> str:
        prefix = require_prefix(prefix, url=self.url)
        folder = self._path(prefix)
        if self._files.isfile(folder):
            raise NotAFolderError("a file lies where a folder should be", url=self.url, key=prefix)
        return folder

    def _require_new(self, key: str) -> None:
        if self._files.exists(self._path(key)):
            raise StoreError("cannot create: File exists", url=self.url, key=key)


class _BufferWriter:
    def __init__(self) -> None:
        self.buffer = bytearray()

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        view = chunk_bytes(chunk)
        self.buffer += view
        advance(len(view))
        return len(view)

    def tell(self) -> int:
        return len(self.buffer)
