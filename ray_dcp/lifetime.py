"""What has to be over before a process ends."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_finishing: list[tuple[int, Callable[[], None]]] = []
_ends = threading.Event()


def before_exit(finish: Callable[[], None], *, turn: int = 0) -> None:
    """Have ``finish`` called when the main thread has ended, while thread pools still take work; lower turns first.

    When ``atexit`` has its turn every pool of ``concurrent.futures`` refuses work already, also those that a save which
    still goes on in a thread may need.
    """
    _have_end_called()
    _finishing.append((turn, finish))


def process_ends() -> bool:
    """Whether all that ``before_exit`` was given is over: what fails from then on fails because the process ends."""
    return _ends.is_set()


@functools.cache
def _have_end_called() -> None:
    # Pools stop in a hook of this kind, put there by their module's import, and the hook put last is called first.
    import concurrent.futures.thread  # noqa: F401 - see above

    register: Any = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # the main thread has ended already
        register(_end)


def _end() -> None:
    for _, finish in sorted(_finishing, key=lambda one: one[0]):
        finish()
    _ends.set()
