"""What happened when: each process appends lines to a file of its own; all of one machine share a clock."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_FIELD = 19
"""Of ``/proc/PID/stat``, counted behind the name of the program: when the process started, in ticks since boot."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line."""

    kind: str
    at: float
    """Of the monotonic clock, which all processes of a Linux machine share."""
    pid: int
    facts: dict[str, Any] = field(default_factory=dict)


def note(folder: str, kind: str, *, at: float | None = None, **facts: Any) -> None:
    """Append an event; it is in the file when this returns, whatever kills the process afterwards."""
    line = json.dumps([kind, time.monotonic() if at is None else at, facts]) + "\n"
    opened = os.open(f"{folder}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(opened, line.encode())
    finally:
        os.close(opened)


def read_events(folder: str) -> list[Event]:
    """Return everything that was noted, in the order in which it happened."""
    found = []
    for path in Path(folder).glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it is being written
                kind, at, facts = json.loads(line)
                found.append(Event(kind, at, int(path.stem), facts))
    return sorted(found, key=lambda event: event.at)


def process_started_at() -> float:
    """Return when this process was started, on the clock of the events."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START_FIELD])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_S
    return time.monotonic() - age_s
