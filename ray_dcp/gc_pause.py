"""Python's cyclic garbage collector, kept from running where many objects are made that all stay."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_paused = 0
_num_resumed = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block the collector looks for no cycles, in any thread of this process.

    A plan of many items makes it walk all of them again and again: that took more than half of the time of planning
    20,000 scalars.
    """
    global _num_paused, _was_enabled
    with _lock:
        if _num_paused == 0:
            _was_enabled = gc.isenabled()
            if not _num_resumed:
                gc.disable()
        _num_paused += 1
    try:
        yield
    finally:
        with _lock:
            _num_paused = max(0, _num_paused - 1)  # in a fork that was made within the block it is 0 already
            if _num_paused == 0 and _was_enabled:
                gc.enable()


@contextmanager
def collector_resumed() -> Iterator[None]:
    """Within the block the collector works in spite of pauses: for a user's code, whose cycles may hold much memory."""
    global _num_resumed
    with _lock:
        _num_resumed += 1
        if _num_paused and _was_enabled:
            gc.enable()
    try:
        yield
    finally:
        with _lock:
            _num_resumed = max(0, _num_resumed - 1)
            if _num_paused and not _num_resumed:
                gc.disable()


def _end_pauses_of_parent() -> None:
    """End the pauses of the parent in a fork, which has none of the threads that would end them."""
    global _num_paused, _num_resumed
    if _num_paused and _was_enabled:
        gc.enable()
    _num_paused = _num_resumed = 0
    _lock.release()


# The lock is held during the fork: no other thread has it then, and what it guards is whole.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_end_pauses_of_parent)
