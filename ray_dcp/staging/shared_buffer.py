"""``SharedBuffer``: memory that one process fills and another one of the node writes to storage.

It has no name in any folder: another process opens it through procfs, as the descriptor of the process that made it.
It is gone with the last process that has it open, whatever kills them, and the size of ``/dev/shm`` does not limit it.

Behind its bytes lies its *version*: whoever overwrites them changes it first, and whoever reads them looks at it before
and after, so that nobody takes bytes for what was there before (``docs/async_saves.md``).
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
_MADV_POPULATE_READ = 22
_STEP_NBYTES = 64 << 20
"""What the kernel is asked for at once: a signal undoes what it has done of that, and Python may keep its lock."""
_WORD_NBYTES = 8


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

    def __init__(self, descriptor: int, nbytes: int, path: str | None, *, writable: bool = True) -> None:
        """Take over ``descriptor``, also where this fails. Without ``path`` it is named by its own descriptor."""
        self._pid = os.getpid()
        self._descriptor: int | None = descriptor
        self._before_close: list[Callable[[], None]] = []
        try:
            status = os.fstat(descriptor)
            if path is None:
                path = f"/proc/{self._pid}/fd/{descriptor}"
            self._name = BufferName(path, status.st_dev, status.st_ino, nbytes)
            self._map: mmap.mmap | None = _mapped(descriptor, _word_at(nbytes) + _WORD_NBYTES, writable=writable)
        except BaseException:
            self._descriptor = None
            os.close(descriptor)
            raise
        everything = memoryview(self._map)
        self._memory: memoryview | None = everything[:nbytes]
        self._word: memoryview | None = everything[_word_at(nbytes) :].cast("Q")

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
            end = _word_at(nbytes) + _WORD_NBYTES
            for start in range(0, end, _STEP_NBYTES):
                os.posix_fallocate(descriptor, start, min(_STEP_NBYTES, end - start))
            # Unlike that of any other buffer, should one be taken for another.
            os.pwrite(descriptor, os.urandom(_WORD_NBYTES - 1), _word_at(nbytes))
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise _no_memory(error, nbytes) from error
        try:
            return cls(descriptor, nbytes, None)
        except OSError as error:  # of address space
            raise _no_memory(error, nbytes) from error

    @classmethod
    def attach(cls, name: BufferName, *, writable: bool = True) -> SharedBuffer:
        """Open the buffer that another process of this node, or this one, has open, with a descriptor of its own.

        It stays when the other process ends. Raises ``StagingLostError`` where that has ended or closed it before.
        """
        try:
            # Looked at before it is opened: what else has that number now may not like that.
            if _is_other(os.stat(name.path), name):
                raise StagingLostError(path=name.path, reason="it is another file now")
            access = os.O_RDWR if writable else os.O_RDONLY
            descriptor = os.open(name.path, access | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise StagingLostError(path=name.path, reason=_why_gone(error)) from error
        if _is_other(os.fstat(descriptor), name):
            os.close(descriptor)
            raise StagingLostError(path=name.path, reason="it is another file now")
        try:
            return cls(descriptor, name.nbytes, name.path, writable=writable)
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

    @property
    def version(self) -> int:
        """The number that says which bytes these are: the same before and after a read, they were not overwritten."""
        assert self._word is not None, "the buffer is closed"
        return self._word[0]

    def renew(self) -> None:
        """Change the version, in all processes at once: from now on the bytes may be overwritten."""
        assert self._word is not None, "the buffer is closed"
        self._word[0] += 1

    def kept_open(self) -> KeptBuffer:
        """The buffer for whoever keeps it from being gone without looking at it; stays open when this is closed."""
        assert self._descriptor is not None, "the buffer is closed"
        return KeptBuffer(os.dup(self._descriptor), self.nbytes)

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

    def read_ahead(self, start: int, nbytes: int) -> None:
        """Have the pages of these bytes in this process's page table: one by one takes three times as long."""
        assert self._map is not None, "the buffer is closed"
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # the kernel is older
            self._map.madvise(_MADV_POPULATE_READ, first, start + nbytes - first)

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
        word, self._word = self._word, None
        mapped, self._map = self._map, None
        with suppress(BufferError):
            if memory is not None and word is not None and mapped is not None:
                word.release()
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


class KeptBuffer:
    """A descriptor of a buffer: its memory stays while this is open, and is in no page table for it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.name = BufferName(f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino, nbytes)
        """What ``attach`` takes while this is open."""

    @property
    def version(self) -> int:
        """See ``SharedBuffer.version``."""
        return int.from_bytes(os.pread(self._descriptor, _WORD_NBYTES, _word_at(self.name.nbytes)), sys.byteorder)

    def again(self) -> KeptBuffer:
        """The same buffer, kept open by a descriptor of its own."""
        return KeptBuffer(os.dup(self._descriptor), self.name.nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy so many of its bytes, all of which it has."""
        parts = []
        while nbytes > 0:
            parts.append(os.pread(self._descriptor, nbytes, offset))
            assert parts[-1], "a range lies in the buffer"
            offset, nbytes = offset + len(parts[-1]), nbytes - len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Let go of the buffer; called once."""
        os.close(self._descriptor)


def _word_at(nbytes: int) -> int:
    """Where the version lies, in bytes from the beginning: behind the ``nbytes`` of a buffer."""
    return -(-nbytes // _WORD_NBYTES) * _WORD_NBYTES


def _anonymous_file() -> int:
    """An open file in memory that has no name, and that no child gets."""
    try:
        return os.memfd_create("ray_dcp_staging")
    except (AttributeError, OSError):  # other systems have no such call, and some containers forbid it
        with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as file:
            return os.dup(file.fileno())


def _mapped(descriptor: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, prot=access, trackfd=False)
    return mmap.mmap(descriptor, nbytes, prot=access)  # which keeps a second descriptor until it is closed


def _is_other(status: os.stat_result, name: BufferName) -> bool:
    same = (status.st_dev, status.st_ino) == (name.device, name.inode) and stat.S_ISREG(status.st_mode)
    return not same or status.st_size < _word_at(name.nbytes) + _WORD_NBYTES


def _why_gone(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return "the process that made it has ended, or has closed it"
    return f"{error.strerror}"


def _no_memory(error: OSError, nbytes: int) -> StagingMemoryError:
    return StagingMemoryError(nbytes=nbytes, available_nbytes=available_nbytes(), reason=f"{error.strerror}")
