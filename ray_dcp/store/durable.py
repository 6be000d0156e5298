"""Bytes that survive a power cut: the steps a file needs before it may be relied on, and what makes them quick."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from contextlib import suppress

from ray_dcp.progress import PROGRESS_NBYTES, advance
from ray_dcp.store.store import chunk_bytes

# Some network and FUSE filesystems have no fsync for folders: there, names are as durable as the server makes them.
_NO_FOLDER_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_fully(descriptor: int, chunk: bytes | bytearray | memoryview) -> int:
    """Write all of ``chunk``, going on after short writes; return its length in bytes."""
    rest = chunk_bytes(chunk)
    nbytes = len(rest)
    while rest:
        # In pieces, so that whoever waits sees them move, and a save that has failed elsewhere stops here.
        written = os.write(descriptor, rest[:PROGRESS_NBYTES])
        if written == 0:
            raise OSError(errno.EIO, "the filesystem takes no more bytes and gives no reason")
        rest = rest[written:]
        advance(written)
    return nbytes


class Writeback:
    """Has the kernel send a file to the disk while it is still being written, so that fsync has little left to do.

    Measured against writes past the page cache (O_DIRECT), which take turns where a file grows, and against several
    files a rank: neither was quicker.
    """

    _STEP_NBYTES = 8 << 20

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begun = 0

    def written_up_to(self, position: int) -> None:
        """Take note that all before ``position`` is written. May be called as often as one likes."""
        start_writeback = _libc_call("sync_file_range", ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        if start_writeback is not None and position - self._begun >= self._STEP_NBYTES:
            # A hint: what went wrong with the bytes is told by fsync.
            start_writeback(self._descriptor, self._begun, position - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = position


def preallocate(descriptor: int, nbytes: int) -> None:
    """Reserve room for a file of ``nbytes``, in one piece where possible, so that a full disk is found at once.

    Its size stays as it is. Raises ``OSError`` where there is no room; does nothing where the filesystem cannot.
    """
    reserve = _libc_call("fallocate", ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if reserve is None or nbytes <= 0:
        return
    while reserve(descriptor, _FALLOC_FL_KEEP_SIZE, 0, nbytes):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            full = OSError(code, os.strerror(code))
            full.needed_nbytes = nbytes  # type: ignore[attr-defined]  # for the message
            raise full
        if code != errno.EINTR:
            return


_SYNC_FILE_RANGE_WRITE = 2
_FALLOC_FL_KEEP_SIZE = 1


@functools.cache
def _libc_call(name: str, *argument_types: type) -> Callable[..., int] | None:
    """A function of the C library that takes a descriptor and that Python lacks; None where the C library lacks it too.

    Python's own ``posix_fallocate`` writes zeros where the filesystem cannot reserve.
    """
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, *argument_types)  # type: ignore[attr-defined]
    return function


def close_durably(descriptor: int) -> None:
    """Close after fsync. An error of either is raised; the descriptor is closed in any case."""
    try:
        os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    # Quota and network filesystems report some failed writes only here.
    os.close(descriptor)


def fsync_folder(folder: str) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
    finally:
        os.close(descriptor)


_MAX_FOLDERS_SWEPT = 16


def make_folder(folder: str) -> bool:
    """Create ``folder`` and what is missing above it, all names durable; return False when it was there already."""
    try:
        _mkdir(folder)
    except FileExistsError:
        if os.path.isdir(folder):
            return False
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
    fsync_folder(os.path.dirname(folder))
    return True


def _mkdir(folder: str) -> None:
    """Create ``folder`` and what is missing above it.

    Raises ``FileNotFoundError`` where the system says so although the folder above is there: procfs does of any folder.
    """
    above = os.path.dirname(folder)
    was_there = False
    for _ in range(_MAX_FOLDERS_SWEPT):  # a sweep may remove the folder above once more
        try:
            os.mkdir(folder)
        except FileNotFoundError:
            if was_there or above == folder:
                raise
            was_there = not make_folder(above)
        else:
            return
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
