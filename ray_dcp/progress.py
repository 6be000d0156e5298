"""How far a rank has come in a call: counted where bytes move, looked at by whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PROGRESS_NBYTES = 16 << 20
"""Bytes that are written or read between two signs of progress, where a store can choose."""


class Progress:
    """The progress of one rank in one call. One thread works and counts, another one looks and may interrupt."""

    def __init__(self) -> None:
        self.phase: str | None = None
        """What the rank is busy with; None while it waits for the others."""
        self.mark = 0
        """A number that changes whenever something has been done."""
        self.nbytes = 0
        """Bytes that have been moved."""
        self._interruption: BaseException | None = None

    def advance(self, nbytes: int = 0) -> None:
        """Count a piece of work. Raises what the rank was interrupted with: nobody needs its work any more."""
        self.mark += 1
        self.nbytes += nbytes
        if self._interruption is not None:
            raise self._interruption

    def interrupt(self, reason: BaseException) -> None:
        """Have the working thread raise ``reason`` when it next counts a piece."""
        self._interruption = reason


_counted: ContextVar[Progress | None] = ContextVar("ray_dcp_counted_progress", default=None)


_stops: ContextVar[tuple[threading.Event, ...]] = ContextVar("ray_dcp_stops", default=())


class StoppedError(Exception):
    """Raised in a thread whose work nobody waits for any more; whoever set the event knows why."""


def advance(nbytes: int = 0) -> None:
    """Count a piece of work of whatever call this thread is in. Raises when that call has been interrupted."""
    for stop in _stops.get():
        if stop.is_set():
            raise StoppedError
    progress = _counted.get()
    if progress is not None:
        progress.advance(nbytes)


@contextmanager
def stopped_by(stop: threading.Event) -> Iterator[None]:
    """Within the block ``advance`` raises ``StoppedError`` once ``stop`` is set: for a thread among several.

    Whatever stops the blocks around it stops it too.
    """
    token = _stops.set((*_stops.get(), stop))
    try:
        yield
    finally:
        _stops.reset(token)


@contextmanager
def working(progress: Progress, phase: str) -> Iterator[None]:
    """Within the block this thread works on ``phase``, and what moves bytes counts for ``progress``."""
    before, token = progress.phase, _counted.set(progress)
    progress.phase = phase
    progress.mark += 1
    try:
        yield
    finally:
        progress.phase = before
        _counted.reset(token)
