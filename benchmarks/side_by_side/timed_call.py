"""One timed call of a rank: from when to when, and how much memory it took on top of what the process held."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = "5"


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Times are of the machine's monotonic clock, so those of several processes compare."""

    start_s: float
    end_s: float
    extra_nbytes: int
    """Highest number of resident bytes during the call less those before; shared and mapped pages count."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class PeakMemory:
    """The kernel's high-water mark of this process, from the creation of this object on."""

    def __init__(self) -> None:
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER)
        self._nbytes_before = _status_nbytes("VmRSS")

    def extra_nbytes(self) -> int:
        return max(0, _status_nbytes("VmHWM") - self._nbytes_before)


def start_together(*, trim: bool) -> PeakMemory:
    """Returns on all ranks at once, with memory counted from then on.

    With ``trim``, memory that was freed before goes back to the kernel first: else a call that takes it again would
    seem to need none. It makes the call slower, so it is for rounds that are not timed.
    """
    gc.collect()
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    peak = PeakMemory()
    dist.barrier()
    return peak


def timed(call: Callable[[], Any], *, trim: bool = False) -> TimedCall:
    """Time ``call`` on all ranks at once."""
    peak = start_together(trim=trim)
    start_s = time.monotonic()
    call()
    return TimedCall(start_s, time.monotonic(), peak.extra_nbytes())


def wall_s(calls: Sequence[TimedCall]) -> float:
    """From when the first rank began until the last one was done."""
    return max(call.end_s for call in calls) - min(call.start_s for call in calls)


def _status_nbytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
