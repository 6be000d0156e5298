"""How much memory this process can still take: of the machine, and of the control groups that it is in.

Memory of a tmpfs that has no size of its own is given until the kernel kills somebody, so whoever takes much of it at
once has to ask before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

_UNLIMITED_NBYTES = 1 << 60


def available_nbytes(root: str = "/") -> int | None:
    """Bytes that can be taken without swapping and without passing a limit; None where nothing says so.

    What only holds files' contents counts as free, as it is dropped where memory is needed. ``root`` is where ``proc``
    and ``sys`` are.
    """
    return min((*_of_machine(root), *_of_groups(root)), default=None)


def _of_machine(root: str) -> Iterator[int]:
    free = _table(os.path.join(root, "proc/meminfo")).get("MemAvailable:")
    if free is not None:
        yield free * 1024


def _of_groups(root: str) -> Iterator[int]:
    """What each group above this process leaves, where it has a limit."""
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", "memory" if controllers else "")
        limit, used, files = _VERSION_1 if controllers else _VERSION_2
        # A container may see its own group as the top of all while the path is that outside.
        for folder in {top, *_with_parents(top, path)}:
            most, taken = _number(os.path.join(folder, limit)), _number(os.path.join(folder, used))
            if most is not None and taken is not None and most < _UNLIMITED_NBYTES:
                table = _table(os.path.join(folder, "memory.stat"))
                yield max(0, most - taken + sum(table.get(name, 0) for name in files))


_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_VERSION_2 = "memory.max", "memory.current", ("inactive_file", "active_file")
"""Names of the limit and of what is taken, and those of the memory that can be dropped."""


def _with_parents(top: str, path: str) -> Iterator[str]:
    parts = path.strip("/").split("/")
    for number in range(len(parts), 0, -1):
        yield os.path.join(top, *parts[:number])


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: str) -> dict[str, int]:
    """The numbers in a file with a name and a number on each line."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError), open(path) as file:
        return file.read()
    return ""
