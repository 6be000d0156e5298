"""``SharedSegment``: memory that some processes of a node share for a while, and how they keep step in it.

It is a file in /dev/shm, made by whoever comes first. It begins with a few counters for each member; the members fill
the rest. Each counter is written by its member alone, and only grows.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

from ray_dcp.progress import advance

logger = logging.getLogger(__name__)

SEGMENT_PREFIX = "ray_dcp_share_"
STALE_S = 60.0
"""Age in seconds from which a file that nobody has locked counts as left behind; a younger one may yet be locked."""
_SLOT_NBYTES = 128
"""Bytes for a member's counters: two lines of the CPU's cache, so that members do not slow each other down."""
_PAGE_NBYTES = 4096
_MAX_NAP_S = 0.002


class Counter(IntEnum):
    """The counters by which a member tells of itself."""

    SIGNS = 0
    """Number of signs of work; above 0 once the member has the segment open."""
    READ = 1
    """Number of windows of which the member has read and checked its part."""
    TAKEN = 2
    """Number of windows from which the member needs nothing any more."""
    LEFT = 3
    """1 when the member neither reads nor writes here any more."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The place where the ranks of a node share what they read, and how they do it."""

    folder: str = "/dev/shm"
    patience_s: float = 30.0
    """Seconds that a rank waits for another one that gives no sign of work; then it goes on by itself."""
    node: str | None = None
    """A name in place of the one that says which ranks have one memory; for tests."""

    def memory(self) -> str | None:
        """A name that is the same for all processes that see the same ``folder`` and may open each other's files there.

        None where there is no such folder.
        """
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            device = os.stat(self.folder).st_dev
        except OSError:
            return None
        return self.node if self.node is not None else f"{boot}:{device}:{os.getuid()}"

    def free_nbytes(self) -> int:
        """Free bytes in ``folder`` now; 0 where it cannot be told."""
        try:
            status = os.statvfs(self.folder)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize


class SharedSegment:
    """One member's view of the segment.

    Raises ``OSError`` where there is no room, or where the file is not what it should be.

    The file loses its name once all members have it open. Before that the name stays with the file, although a member
    may have left: those who come later must find that out instead of making a file of their own.
    """

    def __init__(self, sharing: NodeMemory, token: str, *, num_members: int, slot: int, nbytes: int) -> None:
        self._sharing = sharing
        self._slot = slot
        self._members = range(num_members)
        self._fence = threading.Lock()
        self._path = os.path.join(sharing.folder, f"{SEGMENT_PREFIX}{token}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        try:
            # The lock tells that the file is in use: it is held as long as the file is open and the process lives.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            header_nbytes = -(-num_members * _SLOT_NBYTES // _PAGE_NBYTES) * _PAGE_NBYTES
            self._header = self._mapped(header_nbytes)
        except BaseException:
            self.unlink()
            os.close(self._descriptor)
            raise
        self._counters = memoryview(self._header).cast("Q")
        self.sign()
        try:
            self._file = self._mapped(header_nbytes + nbytes)
            if os.fstat(self._descriptor).st_size != header_nbytes + nbytes:
                raise OSError(errno.EINVAL, "is of another size than planned", self._path)
        except BaseException:
            self._leave()
            raise
        self.memory = memoryview(self._file)[header_nbytes:]
        """Bytes that all members see."""

    def __enter__(self) -> SharedSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: the others no longer wait for this member."""
        del self.memory
        self._leave()
        # What an error's traceback still refers to lives as long as that.
        with suppress(BufferError):
            self._file.close()

    def _mapped(self, nbytes: int) -> mmap.mmap:
        """Map the begin of the file. Its memory is taken now: a write where there is none would kill the process."""
        os.posix_fallocate(self._descriptor, 0, nbytes)
        return mmap.mmap(self._descriptor, nbytes)

    def _leave(self) -> None:
        self.tell(Counter.LEFT, 1)
        if all(self.told(member, Counter.SIGNS) for member in self._members):
            self.unlink()
        self._counters.release()
        self._header.close()
        os.close(self._descriptor)

    def part(self, at: int, nbytes: int) -> memoryview:
        """The part of ``memory`` that begins at ``at``, as bytes to fill or read."""
        return self.memory[at : at + nbytes]

    def unlink(self) -> None:
        """Remove the file's name; whoever has it open keeps it."""
        with suppress(OSError):
            os.unlink(self._path)

    def tell(self, counter: Counter, value: int) -> None:
        """Set one of this member's counters; whoever sees that sees all that it has written before."""
        self._order()
        self._counters[self._slot * _SLOT_NBYTES // 8 + counter] = value
        self._order()

    def told(self, member: int, counter: Counter) -> int:
        """The value that ``member`` has set ``counter`` to."""
        return self._counters[member * _SLOT_NBYTES // 8 + counter]

    def sign(self) -> None:
        """Show that this member is at work."""
        self.tell(Counter.SIGNS, self.told(self._slot, Counter.SIGNS) + 1)

    def everyone_reaches(self, counter: Counter, value: int, members: Iterable[int] | None = None) -> bool:
        """Wait until ``counter`` is ``value`` or more for each of ``members``, or of all members.

        False when one of them has left before that, or when none of those behind has given a sign for ``patience_s``.
        Raises when the call of this thread has been interrupted.
        """
        asked = [*(self._members if members is None else members)]
        if all(self.told(member, counter) >= value for member in asked):  # nearly always
            self._order()
            return True
        try:
            reached = self._wait(counter, value, asked)
        except BaseException:
            self.unlink()  # the call is over, and who has not come may be dead
            raise
        if reached is None:
            self.unlink()
        return bool(reached)

    def _wait(self, counter: Counter, value: int, behind: list[int]) -> bool | None:
        """Wait for the members ``behind``: False where one has left, None where patience is over."""
        signs: tuple[int, ...] = ()
        quiet_since_s, nap_s = time.monotonic(), 0.0001
        while True:
            left = {member for member in behind if self.told(member, Counter.LEFT)}
            self._order()
            behind = [member for member in behind if self.told(member, counter) < value]
            if not behind:
                self._order()
                return True
            if left.intersection(behind):
                return False
            before, signs = signs, tuple(self.told(member, Counter.SIGNS) for member in behind)
            if before != signs:
                quiet_since_s = time.monotonic()
                self.sign()  # for those who wait for this member meanwhile
            elif time.monotonic() - quiet_since_s > self._sharing.patience_s:
                return None
            advance()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _MAX_NAP_S)

    def _order(self) -> None:
        """Keep the CPU from doing what comes after this call before what comes ahead of it.

        x86 does not do so; on ARM a lock that is released and taken again is what Python has against it.
        """
        with self._fence:
            pass
        with self._fence:
            pass


def remove_stale(folder: str) -> None:
    """Remove the files of processes that were all killed before any of them could remove its file."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(SEGMENT_PREFIX)]
        for path in (os.path.join(folder, name) for name in names):
            with suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: str) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or time.time() - status.st_mtime < STALE_S:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody has it open
        os.unlink(path)
        logger.info("removed %s, which killed processes had left behind", path)
    finally:
        os.close(descriptor)
