"""Work on a store in several threads at once, in one way: ``in_parallel``; and ``ParallelStore``, which reads so.

Loads, requests for parts of one object, verify, copy and listings all pass through ``in_parallel``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ray_dcp.progress import stopped_by
from ray_dcp.store.ranges import BufferedRange, split_range
from ray_dcp.store.reading import get_into
from ray_dcp.store.store import ObjectWriter, Store, StoredObject, traits_of

THREAD_NAME = "ray_dcp_read"
_T = TypeVar("_T")
_R = TypeVar("_R")
_MAX_FOLDERS_AT_ONCE = 16


def in_parallel(
    work: Callable[[_T], _R],
    tasks: Iterable[_T],
    *,
    max_at_once: int,
    in_order: bool = False,
    max_ahead: int | None = None,
) -> Generator[tuple[_T, _R], None, None]:
    """Yield each task with what ``work`` makes of it: as they end, or in the order of ``tasks``.

    Tasks are taken as late as possible: at most ``max_ahead`` (``max_at_once`` unless it is given) are taken and not
    yielded when the next one is taken. What moves in the threads counts for the call of the thread that iterates, and
    an interruption of that call reaches all of them. The first that fails ends all and is raised. Whoever stops before
    the end closes the generator: once it has ended, in whatever way, no task runs any more, so nothing writes to
    memory that the caller has taken back. With ``max_at_once`` 1 no thread is started.
    """
    if max_at_once == 1:
        for task in tasks:
            yield task, work(task)
        return
    stop = threading.Event()

    def do(task: _T) -> _R:
        with stopped_by(stop):
            return work(task)

    under_way: dict[Future[_R], _T] = {}
    with ThreadPoolExecutor(max_at_once, thread_name_prefix=THREAD_NAME) as pool:
        try:
            for task in tasks:
                under_way[pool.submit(contextvars.copy_context().run, do, task)] = task
                if len(under_way) > (max_at_once if max_ahead is None else max_ahead):
                    yield from _ended(under_way, in_order=in_order)
            while under_way:
                yield from _ended(under_way, in_order=in_order)
        finally:
            stop.set()
            for future in under_way:
                future.cancel()


def _ended(under_way: dict[Future[_R], _T], *, in_order: bool) -> Iterator[tuple[_T, _R]]:
    """Yield the task that was taken first, or those that have ended; waits for one. Raises what one of them raised."""
    awaited = [next(iter(under_way))] if in_order else list(under_way)
    for future in wait(awaited, return_when=FIRST_COMPLETED).done:
        yield under_way.pop(future), future.result()


def for_each_folder(folders: Sequence[_T], look: Callable[[_T], _R]) -> list[_R]:
    """What ``look`` says of every folder, in order; a few at a time, since in a bucket each look is a wait."""
    return [seen for _, seen in in_parallel(look, folders, max_at_once=_MAX_FOLDERS_AT_ONCE, in_order=True)]


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
        # The methods of these two are not passed on.
        self.traits = dataclasses.replace(traits_of(inner), folders=False, renames=False)

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
        """How many requests were made again, by all threads that use this store; 0 where ``inner`` does not count."""
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
        # No part waits for a thread: after a failure no other is begun.
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
