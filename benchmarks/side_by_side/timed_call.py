"""One timed call of a rank: from when to when, and what its process and that one's children used meanwhile."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from side_by_side.process_use import FamilyUse, Used


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Times are of the machine's monotonic clock, so those of several processes compare."""

    start_s: float
    end_s: float
    used: Used

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def start_together(*, trim: bool) -> FamilyUse:
    """Returns on all ranks at once, with what the process and its children use counted from then on.

    With ``trim``, memory that was freed before goes back to the kernel first: else a call that takes it again would
    seem to need none. It makes the call slower, so it is for rounds that are not timed.
    """
    gc.collect()
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    use = FamilyUse()
    dist.barrier()
    return use


def timed(call: Callable[[], Any], *, trim: bool = False) -> TimedCall:
    """Time ``call`` on all ranks at once."""
    use = start_together(trim=trim)
    start_s = time.monotonic()
    call()
    return TimedCall(start_s, time.monotonic(), use.so_far())


def wall_s(calls: Sequence[TimedCall]) -> float:
    """From when the first rank began until the last one was done."""
    return max(call.end_s for call in calls) - min(call.start_s for call in calls)
