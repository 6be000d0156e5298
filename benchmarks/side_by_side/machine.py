"""The machine a benchmark ran on, and whether it had the machine to itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

MAX_OTHERS_CPUS = 0.2
"""CPUs that other programs may have used meanwhile, on average; every system does a little."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures belong to."""

    num_cpus: int
    memory_nbytes: int
    kernel: str
    filesystem: str
    """Type of the one that holds the checkpoints."""
    versions: Mapping[str, str]


def this_machine(folder: str) -> Machine:
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)),
        memory_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        filesystem=_filesystem_of(folder),
        versions={"python": platform.python_version()} | {name: version(name) for name in ("torch", "ray", "ray_dcp")},
    )


class Company:
    """What else the machine does, from the creation of this object on.

    ``own_load`` is the load that the benchmark makes itself: one for each rank.
    """

    def __init__(self, own_load: float) -> None:
        self._own_load = own_load
        self.load_at_start = os.getloadavg()[0]
        self._start_s = time.monotonic()
        self._others_s_at_start = _others_user_s()

    def others_cpus(self) -> float:
        """CPUs' worth of work that programs other than this one and its children have done per second."""
        return max(0.0, _others_user_s() - self._others_s_at_start) / (time.monotonic() - self._start_s)

    def objections_at_start(self) -> list[str]:
        """Why figures taken from now on would say nothing; none where the machine was quiet."""
        if self.load_at_start <= self._own_load:
            return []
        return [
            f"the 1-minute load was {self.load_at_start:.1f} at the start, the benchmark's own is {self._own_load:g}"
        ]

    def objections(self) -> list[str]:
        """Why the figures taken since the start say nothing."""
        others_cpus = self.others_cpus()
        busy = [f"other programs used {others_cpus:.1f} CPUs meanwhile"] if others_cpus > MAX_OTHERS_CPUS else []
        return self.objections_at_start() + busy


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose own parent dies: what they do is not done by strangers."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Take note of what ended children have done; call it when nobody else waits for any."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _others_user_s() -> float:
    """User time of all that is not this process or below it, and time taken by other virtual machines.

    Kernel time is left out: nobody knows for whom its threads write.
    """
    user, nice, _, _, _, _, _, steal = map(int, _PROC.joinpath("stat").read_text().split()[1:9])
    parents, user_ticks = {}, {}
    for process in _PROC.glob("[0-9]*"):
        try:
            fields = process.joinpath("stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since
        parents[int(process.name)] = int(fields[1])
        user_ticks[int(process.name)] = int(fields[11]) + int(fields[13])  # its own and its ended children's
    own = sum(ticks for process, ticks in user_ticks.items() if _descends(process, os.getpid(), parents))
    return (user + nice + steal - own) / _TICKS_PER_S


def _descends(process: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while process != ancestor and process in parents:
        process = parents[process]
    return process == ancestor


def _filesystem_of(folder: str) -> str:
    """Of the innermost mount that holds ``folder``."""
    real = os.path.realpath(folder)
    mounts = [line.split()[1:3] for line in _PROC.joinpath("mounts").read_text().splitlines()]
    holding = [(place, kind) for place, kind in mounts if os.path.commonpath([real, place]) == place]
    return max(holding, key=lambda mount: len(mount[0]))[1]
