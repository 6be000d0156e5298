"""What a worker does when Ray Train stops it: finish the saves that are under way."""

from __future__ import annotations

import time

from ray_dcp.cluster.current import joined_groups


def finish_saves(timeout_s: float) -> int:
    """Wait until this process's asynchronous saves are committed or have failed; return how many are not by then.

    Whether one has failed is for who asked for it: nothing is raised.
    """
    deadline = time.monotonic() + timeout_s
    return sum(not group.background.wait_for_latest(max(0.0, deadline - time.monotonic())) for group in joined_groups())
