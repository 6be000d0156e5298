"""Byte ranges cut into pieces, and pieces worked on at the same time."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ray_dcp.progress import Progress, advance, working

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` from ``offset`` of an object, and where they go."""

    offset: int
    nbytes: int
    buffers: tuple[memoryview, ...]

    def scatter(self, content: bytes) -> None:
        """Copy what was read, ``nbytes`` long, to where it goes."""
        start = 0
        for buffer in self.buffers:
            buffer[:] = content[start : start + len(buffer)]
            start += len(buffer)


def split_range(offset: int, buffers: Sequence[memoryview], piece_nbytes: int) -> Iterator[Piece]:
    """Cut what fills ``buffers`` into pieces of at most ``piece_nbytes``, in order.

    A large buffer gets pieces of its own, so that they can be read without a copy; small ones share a piece.
    """
    shared: list[memoryview] = []
    held = 0
    for buffer in buffers:
        if shared and held + len(buffer) > piece_nbytes:
            yield Piece(offset, held, tuple(shared))
            offset, shared, held = offset + held, [], 0
        if len(buffer) <= piece_nbytes:
            if len(buffer):
                shared.append(buffer)
                held += len(buffer)
            continue
        for start in range(0, len(buffer), piece_nbytes):
            part = buffer[start : start + piece_nbytes]
            yield Piece(offset, len(part), (part,))
            offset += len(part)
    if shared:
        yield Piece(offset, held, tuple(shared))


def run_parallel(tasks: Iterable[Callable[[], None]], *, max_parallel: int) -> None:
    """Run ``tasks`` in threads, at most ``max_parallel`` at once, and return when all are done.

    What moves in them is counted by the calling thread, which also notices that its call was interrupted. The first
    error is raised; by then no task runs any more, so nothing writes to memory that the caller has taken back.
    """
    pool = _threads(os.getpid(), max_parallel)
    waiting = iter(tasks)
    running: dict[Future[None], Progress] = {}
    seen: dict[Future[None], tuple[int, int]] = {}
    try:
        while True:
            for task in itertools.islice(waiting, max_parallel - len(running)):
                progress = Progress()
                running[pool.submit(_counted, progress, task)] = progress
            if not running:
                return
            done, _ = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future, progress in running.items():
                mark, nbytes = seen.get(future, (0, 0))
                seen[future] = (progress.mark, progress.nbytes)
                if seen[future] != (mark, nbytes):
                    advance(seen[future][1] - nbytes)
            for future in done:
                del running[future]
                future.result()
    except BaseException as error:
        for future, progress in running.items():
            progress.interrupt(error)
            future.cancel()
        raise
    finally:
        wait(running)


def _counted(progress: Progress, task: Callable[[], None]) -> None:
    with working(progress, "read"):
        task()


@functools.lru_cache
def _threads(process: int, max_parallel: int) -> ThreadPoolExecutor:
    # By process: the threads of one that was forked stayed with its parent.
    return ThreadPoolExecutor(max_parallel, thread_name_prefix="ray_dcp-read")
