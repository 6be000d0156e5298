"""What ray_dcp has in /dev/shm, which tests in other processes use meanwhile."""

from __future__ import annotations

import os
import time

from ray_dcp.reads.sharing.segment import SEGMENT_PREFIX
from tests.slack import within


def segments() -> set[str]:
    """Names of what loads share now."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(SEGMENT_PREFIX)}


def require_none_left() -> None:
    """Whatever is there now goes away: it belongs to a load that goes on in another process."""
    there = segments()
    deadline = time.monotonic() + within(20)
    while left := there & segments():
        assert time.monotonic() < deadline, f"left in shared memory: {left}"
        time.sleep(0.02)
