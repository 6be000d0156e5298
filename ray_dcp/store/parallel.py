"""``ParallelStore``: large reads as several ranges at the same time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ray_dcp.store.ranges import BufferedRange, split_range
from ray_dcp.store.reading import get_into
from ray_dcp.store.store import ObjectWriter, Store, StoredObject
from ray_dcp.store.threads import in_parallel


class ParallelStore:
    """``inner``, with reads of more than ``part_nbytes`` split into ranges that are requested at the same time.

    One connection to a bucket carries a fraction of what the network does. A ``get`` without ``nbytes`` stays one
    request: its object may be replaced meanwhile, and must be seen as it was before or after.
    """

    def __init__(self, inner: Store, *, part_nbytes: int = 8 << 20, max_parallel: int = 8) -> None:
        self._inner = inner
        self._part_nbytes = part_nbytes
        self._max_parallel = max_parallel
        self.url = inner.url

    def __repr__(self) -> str:
        return f"ParallelStore({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = functools.partial(ParallelStore, part_nbytes=self._part_nbytes, max_parallel=self._max_parallel)
        return rebuild, (self._inner,)

    @property
    def inner(self) -> Store:
        """The store that does each request."""
        return self._inner

    @property
    def num_retries(self) -> int:
        """How many requests were made again, by all threads that use this store; 0 where ``inner`` counts none."""
        return getattr(self._inner, "num_retries", 0)

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if nbytes is None or nbytes <= self._part_nbytes:
            return self._inner.get(key, offset, nbytes)
        self._inner.get(key, offset + nbytes, 0)  # before memory is taken for bytes that are not there
        content = bytearray(nbytes)
        self._get_parts(key, offset, [memoryview(content)])
        return bytes(content)

    def get_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """See ``ReadsInto``."""
        nbytes = sum(map(len, buffers))
        if nbytes <= self._part_nbytes:
            get_into(self._inner, key, offset, buffers)
            return
        self._inner.get(key, offset + nbytes, 0)  # else the error would be about a part of the range
        self._get_parts(key, offset, buffers)

    def _get_parts(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        def get(part: BufferedRange) -> None:
            get_into(self._inner, key, part.offset, part.buffers)

        parts = split_range(offset, buffers, self._part_nbytes)
        most = self._max_parallel
        # None waits for a thread: after a failure none is begun.
        deque(in_parallel(get, parts, max_at_once=most, max_ahead=most - 1), maxlen=0)

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        self._inner.put(key, content, last_look=last_look)

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._inner.put_new(key)

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        return self._inner.list(prefix)

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        return self._inner.list_folders(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)
