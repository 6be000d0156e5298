"""``WriteRate``: a limit to how fast a node's staged files are written, for all its ranks together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class WriteRate:
    """Threads that write share it. It has them wait so that together they write no faster than they are told."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next_s = 0.0
        """When as much time has passed as what was written takes at its rate."""

    def spend(self, nbytes: int, per_s: float | None) -> None:
        """Return when ``nbytes`` that were just written are paid for at ``per_s`` bytes a second; None: at once."""
        if per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._next_s = max(self._next_s, now) + nbytes / per_s
            wait_s = self._next_s - now
        if wait_s > 0:
            self._sleep(wait_s)


__all__ = ["WriteRate"]
