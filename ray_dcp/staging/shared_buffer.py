"""``SharedBuffer``: memory that one process fills and another one of the node writes to storage.

It has no name in any folder: another process opens it through procfs, as the descriptor of the process that made it.
It is gone with the last process that has it open, whatever kills them, and the size of ``/dev/shm`` does not limit it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ray_dcp.errors import ForkedProcessError
from ray_dcp.staging.buffer_errors import StagingLostError, StagingMemoryError
from ray_dcp.staging.host_memory import available_nbytes

_MADV_POPULATE_WRITE = 23
"""Linux 5.14's; Python has no name for it."""
_STEP_NBYTES = 64 << 20
"""What the kernel is asked for at once: a signal undoes what it has done of that, and Python may keep its lock."""


@dataclass(frozen=True, slots=True)
class BufferName:
    """What another process of the node opens a buffer by, and knows it by: a number of a process may come again."""

    path: str
    device: int
    inode: int
    nbytes: int


class SharedBuffer:
    """One process's view of a buffer.

    It is for the process that has made or attached it: a fork of that has the memory, too, and is refused.
    """

    def __init__(self, descriptor: int, nbytes: int, path: str | None) -> None:
        """Take over ``descriptor``, also where this fails. Without ``path`` it is named by its own descriptor."""
        self._pid = os.getpid()
        self._descriptor: int | None = descriptor
        self._before_close: list[Callable[[], None]] = []
        try:
            status = os.fstat(descriptor)
            if path is None:
                path = f"/proc/{self._pid}/fd/{descriptor}"
            self._name = BufferName(path, status.st_dev, status.st_ino, nbytes)
            self._map: mmap.mmap | None = _mapped(descriptor, nbytes)
        except BaseException:
            self._descriptor = None
            os.close(descriptor)
            raise
        self._memory: memoryview | None = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int) -> SharedBuffer:
        """Make a buffer; all of its memory is there when this returns.

        Raises ``StagingMemoryError`` where there is not so much: writing into memory that is not there would kill the
        process. What was found free and then taken by others meanwhile can still make the kernel kill somebody.
        """
        assert nbytes > 0, "there is no buffer without bytes"
        available = available_nbytes()
        if available is not None and available < nbytes:
            raise StagingMemoryError(nbytes=nbytes, available_nbytes=available, reason="it would not fit")
        descriptor = None
        try:
            descriptor = _anonymous_file()
            for start in range(0, nbytes, _STEP_NBYTES):
                os.posix_fallocate(descriptor, start, min(_STEP_NBYTES, nbytes - start))
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise _no_memory(error, nbytes) from error
        try:
            return cls(descriptor, nbytes, None)
        except OSError as error:  # of address space
            raise _no_memory(error, nbytes) from error

    @classmethod
    def attach(cls, name: BufferName) -> SharedBuffer:
        """Open the buffer that another process of this node, or this one, has made, with a descriptor of its own.

        It stays when the other process ends. Raises ``StagingLostError`` where that has ended or closed it before.
        """
        try:
            # Looked at before it is opened: what else has that number now may not like that.
            if _is_other(os.stat(name.path), name):
                raise StagingLostError(path=name.path, reason="it is another file now")
            descriptor = os.open(name.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise StagingLostError(path=name.path, reason=_why_gone(error)) from error
        if _is_other(os.fstat(descriptor), name):
            os.close(descriptor)
            raise StagingLostError(path=name.path, reason="it is another file now")
        try:
            return cls(descriptor, name.nbytes, name.path)
        except OSError as error:
            raise _no_memory(error, name.nbytes) from error

    @property
    def name(self) -> BufferName:
        """What ``attach`` takes. It leads here while the process that made the buffer has it open."""
        return self._name

    @property
    def nbytes(self) -> int:
        return self._name.nbytes

    @property
    def memory(self) -> memoryview:
        """All bytes, writable; ``close`` does not take them from whoever still looks at a part of them."""
        if os.getpid() != self._pid:
            raise ForkedProcessError("its staging buffers are not for a fork of it", pid=self._pid)
        assert self._memory is not None, "the buffer is closed"
        return self._memory

    def fault_in(self) -> None:
        """Have all pages in this process's page table: the first copy is then as fast as any later one.

        The bytes stay what they are, whoever writes to them meanwhile.
        """
        memory = self.memory
        assert self._map is not None
        try:
            for start in range(0, self.nbytes, _STEP_NBYTES):
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_STEP_NBYTES, self.nbytes - start))
        except OSError:  # the kernel is older
            memory[:: mmap.PAGESIZE].tobytes()

    def before_close(self, undo: Callable[[], None]) -> None:
        """Have ``close`` call ``undo`` once, while the memory is still there."""
        self._before_close.append(undo)

    def close(self) -> None:
        """Let go of the memory; other processes that have attached it keep it. Safe to call again.

        Memory that something still looks at stays until that is gone, too.
        """
        while self._before_close:
            undo = self._before_close.pop()
            if os.getpid() == self._pid:
                undo()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        memory, self._memory = self._memory, None
        mapped, self._map = self._map, None
        with suppress(BufferError):
            if memory is not None and mapped is not None:
                memory.release()
                mapped.close()
        os.close(descriptor)

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()


def _anonymous_file() -> int:
    """An open file in memory that has no name, and that no child gets."""
    try:
        return os.memfd_create("ray_dcp_staging")
    except (AttributeError, OSError):  # other systems have no such call, and some containers forbid it
        with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as file:
            return os.dup(file.fileno())


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, trackfd=False)
    return mmap.mmap(descriptor, nbytes)  # which keeps a second descriptor until it is closed


def _is_other(status: os.stat_result, name: BufferName) -> bool:
    same = (status.st_dev, status.st_ino) == (name.device, name.inode) and stat.S_ISREG(status.st_mode)
    return not same or status.st_size < name.nbytes


def _why_gone(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return "the process that made it has ended, or has closed it"
    return f"{error.strerror}"


def _no_memory(error: OSError, nbytes: int) -> StagingMemoryError:
    return StagingMemoryError(nbytes=nbytes, available_nbytes=available_nbytes(), reason=f"{error.strerror}")
