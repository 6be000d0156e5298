"""What this machine can do at most: as many bytes, moved without any format, by the same processes.

Each probe is the work of one rank, and all ranks run it at once: as many writers and readers as the sides have.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os

_PIECE_NBYTES = 1 << 20
"""Some kernels make one piece of the page cache of each write, and look long for room for a large one."""
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Limit(enum.Enum):
    """What a figure is divided by; the value names it."""

    WRITE = "write + fsync"
    """Of fresh files: the better of through the page cache and past it."""
    CACHE_WRITE = "page-cache write"
    """Of fresh files, without fsync."""
    READ = "page-cache read"
    COPY = "memory copy"
    """No limit of a save that copies behind the caller's back: shown, never flagged."""


PROBES_OF = {
    Limit.WRITE: ("write", "write_pieces", "write_direct"),
    Limit.CACHE_WRITE: ("write_unsynced", "write_unsynced_pieces"),
    Limit.READ: ("read",),
    Limit.COPY: ("copy",),
}
"""Methods of ``Probes``; the best of them is the limit. READ reads the file that WRITE has left."""


class Probes:
    """The buffers of one rank's share of the bytes: mapped from the start, used again each time.

    Each probe returns whether it can be done here at all.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer = _mapped(nbytes)
        self._other = _mapped(nbytes)

    def write(self, path: str) -> bool:
        self._write(path, 0, self._nbytes)
        return True

    def write_pieces(self, path: str) -> bool:
        self._write(f"{path}.pieces", 0, self._nbytes, piece_nbytes=_PIECE_NBYTES)
        return True

    def write_direct(self, path: str) -> bool:
        """Whole pages only: the last one is written to its end."""
        try:
            self._write(f"{path}.direct", os.O_DIRECT, len(self._buffer))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False  # not every filesystem does this
            raise
        return True

    def write_unsynced(self, path: str) -> bool:
        self._write(f"{path}.unsynced", 0, self._nbytes, sync=False)
        return True

    def write_unsynced_pieces(self, path: str) -> bool:
        self._write(f"{path}.unsynced_pieces", 0, self._nbytes, sync=False, piece_nbytes=_PIECE_NBYTES)
        return True

    def read(self, path: str) -> bool:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            rest = self._buffer[: self._nbytes]
            while rest:
                rest = rest[_at_least_one(os.readv(descriptor, [rest])) :]
        finally:
            os.close(descriptor)
        return True

    def copy(self, path: str) -> bool:
        self._other[:] = self._buffer
        return True

    def _write(
        self, path: str, extra_flags: int, nbytes: int, *, sync: bool = True, piece_nbytes: int | None = None
    ) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | extra_flags, 0o666)
        try:
            rest = self._buffer[:nbytes]
            while rest:
                rest = rest[_at_least_one(os.write(descriptor, rest[:piece_nbytes])) :]
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mapped(nbytes: int) -> memoryview:
    """Whole pages of memory, each of them there: direct writes need them aligned."""
    num_pages = -(-max(1, nbytes) // mmap.PAGESIZE)
    buffer = memoryview(mmap.mmap(-1, num_pages * mmap.PAGESIZE, flags=_PRIVATE))
    buffer[:] = bytes(len(buffer))
    return buffer


def _at_least_one(nbytes: int) -> int:
    if not nbytes:
        raise OSError(errno.EIO, "the file ends before the probe does")
    return nbytes
