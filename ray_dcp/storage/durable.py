"""Bytes that survive a power cut: the steps a file needs before it may be relied on."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ray_dcp.progress import PIECE_NBYTES, advance
from ray_dcp.storage.chunks import chunk_bytes

# Some network and FUSE filesystems have no fsync for folders: there, names are as durable as the server makes them.
_NO_FOLDER_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_fully(descriptor: int, chunk: bytes | bytearray | memoryview) -> int:
    """Write all of ``chunk``, going on after short writes; return its length in bytes."""
    rest = chunk_bytes(chunk)
    nbytes = len(rest)
    while rest:
        # In pieces, so that whoever waits sees them move, and a save that has failed elsewhere stops here.
        written = os.write(descriptor, rest[:PIECE_NBYTES])
        if written == 0:
            raise OSError(errno.EIO, "the filesystem takes no more bytes and gives no reason")
        rest = rest[written:]
        advance(written)
    return nbytes


def close_durably(descriptor: int) -> None:
    """Close after fsync. An error of either is raised, and the descriptor is closed in any case."""
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


def make_folder(folder: str) -> bool:
    """Create ``folder`` and what is missing above it, all names durable; False when it was there already."""
    try:
        os.mkdir(folder)
    except FileNotFoundError:
        make_folder(os.path.dirname(folder))
        return make_folder(folder)
    except FileExistsError:
        if os.path.isdir(folder):
            return False
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
    fsync_folder(os.path.dirname(folder))
    return True
