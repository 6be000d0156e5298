"""Work on a store in several threads at once: the one place where reads, checks and looks run beside each other.

Loads, requests for parts of one object, verify, copy and listings all pass through ``in_parallel``.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ray_dcp.progress import stopped_by

THREAD_NAME = "ray_dcp_read"
_T = TypeVar("_T")
_R = TypeVar("_R")


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
    """Wait for the first that was taken, or for some; raises what one of them raised."""
    awaited = [next(iter(under_way))] if in_order else list(under_way)
    for future in wait(awaited, return_when=FIRST_COMPLETED).done:
        yield under_way.pop(future), future.result()
