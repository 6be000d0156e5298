"""Python's cyclic garbage collector, kept from running where many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_paused = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within it no cycle is looked for, in any thread of this process.

    A plan of many items makes the collector walk all of them again and again: it took more than half of the time of
    planning 20,000 scalars.
    """
    global _num_paused, _was_enabled
    with _lock:
        if _num_paused == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_paused += 1
    try:
        yield
    finally:
        with _lock:
            _num_paused -= 1
            if _num_paused == 0 and _was_enabled:
                gc.enable()
