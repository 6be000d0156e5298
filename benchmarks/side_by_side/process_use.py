"""What processes use for a while, as the kernel counts it: memory, CPU time, bytes read."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_RESET_HIGH_WATER = "5"


@dataclass(frozen=True, slots=True)
class Used:
    extra_nbytes: int
    """Highest number of resident bytes less those at the start; shared and mapped pages count."""
    cpu_s: float
    """User and system time of all its threads, ended ones too; without its children's."""
    read_nbytes: int
    """What its read calls returned, from the page cache or past it; without sockets and mapped files."""


def together(used: Iterable[Used]) -> Used:
    """What several processes have used: the memory of the one that took most, and the sum of all else."""
    each = list(used)
    return Used(
        extra_nbytes=max(one.extra_nbytes for one in each),
        cpu_s=sum(one.cpu_s for one in each),
        read_nbytes=sum(one.read_nbytes for one in each),
    )


class FamilyUse:
    """What this process and the children that it has by now use, from the creation of this object on."""

    def __init__(self) -> None:
        self._uses = [ProcessUse()]
        for child in _children():
            with suppress(FileNotFoundError, ProcessLookupError, OSError):  # it has ended
                self._uses.append(ProcessUse(child))

    def so_far(self) -> Used:
        own, *children = self._uses
        used = [own.so_far()]
        for child in children:
            with suppress(FileNotFoundError, ProcessLookupError, OSError):
                used.append(child.so_far())
        return together(used)


def kept_nbytes(pid: int) -> tuple[int, int]:
    """The memory of process ``pid`` that no file backs: its own, and its share of what it shares with others.

    Each page counts once among all processes that have it.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return sizes["Pss_Anon"], sizes["Pss_Shmem"]


class ProcessUse:
    """What process ``pid`` (this one, where none is given) uses from the creation of this object on."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._folder = Path(f"/proc/{self._pid}")
        self._clock = _cpu_clock(self._pid)
        self._folder.joinpath("clear_refs").write_text(_RESET_HIGH_WATER)
        self._memory_nbytes = self._nbytes("status", "VmRSS") * 1024
        self._read_nbytes = self._nbytes("io", "rchar")
        self._cpu_s = time.clock_gettime(self._clock)

    def so_far(self) -> Used:
        cpu_s = time.clock_gettime(self._clock)
        return Used(
            extra_nbytes=max(0, self._nbytes("status", "VmHWM") * 1024 - self._memory_nbytes),
            cpu_s=cpu_s - self._cpu_s,
            read_nbytes=self._nbytes("io", "rchar") - self._read_nbytes,
        )

    def _nbytes(self, file: str, name: str) -> int:
        lines = self._folder.joinpath(file).read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def _cpu_clock(pid: int) -> int:
    clock = ctypes.c_int()
    failed = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if failed:
        raise OSError(failed, os.strerror(failed), str(pid))
    return clock.value


def _children() -> list[int]:
    threads = Path("/proc/self/task").glob("*/children")
    return [int(pid) for of_thread in threads for pid in of_thread.read_text().split()]
