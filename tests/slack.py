"""Limits in seconds that hold on a machine with nothing else to do, and as many more as the machine is busier.

``RAY_DCP_TEST_SLACK`` is a factor on all of them, 1 where it is not set.
"""

from __future__ import annotations

import os

SLACK = float(os.environ.get("RAY_DCP_TEST_SLACK") or 1)


def within(seconds: float) -> float:
    """How long what takes ``seconds`` at most on an idle machine may take on this one, now."""
    return seconds * SLACK * max(1.0, waiting_for_a_cpu())


def waiting_for_a_cpu() -> float:
    """How many programs have wanted each CPU in the last minute."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return os.getloadavg()[0] / (os.cpu_count() or 1)
