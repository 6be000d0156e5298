"""``BufferPool``: a rank's staging buffers, used in turns from save to save."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

from ray_dcp.errors import ForkedProcessError
from ray_dcp.staging.buffer_errors import StagingBusyError, StagingMemoryError
from ray_dcp.staging.shared_buffer import SharedBuffer

_LOOK_AGAIN_S = 0.05
_ROOM_TO_GROW = 20
"""What has grown once gets a twentieth more than it needs: Python values grow by some bytes again and again."""


class BufferPool:
    """At most ``num_buffers`` buffers, made when they are first needed and kept. Threads may share a pool.

    A buffer is as large as what is staged in it, in whole pages. A larger one that is there already does for less, so
    that a state of changing size takes memory once; one that has grown has a little room to grow on.
    """

    def __init__(
        self,
        num_buffers: int = 2,
        *,
        on_new: Callable[[SharedBuffer], object] | None = None,
        spares_newest: bool = False,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        """``on_new`` is called with each buffer that is made, before it is used: it may pin its memory.

        ``spares_newest``: the buffer that was given back last, with something of use in it, is taken only where all
        others are in use, since a node's agent may offer what is in it. ``make_room`` is called where there is no
        memory for another buffer, before it is tried once more.
        """
        assert num_buffers > 0
        self.num_buffers = num_buffers
        self._on_new = on_new
        self._spares_newest = spares_newest
        self._make_room = make_room
        self._newest: SharedBuffer | None = None
        """The buffer that was given back last with something of use in it."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._free: list[SharedBuffer] = []
        self._taken: set[SharedBuffer] = set()
        self._making: list[int] = []
        """Bytes of each buffer that is being made."""
        self._closed = False

    def allow(self, num_buffers: int) -> None:
        """Let there be at least ``num_buffers``; those that are there stay."""
        with self._changed:
            self.num_buffers = max(self.num_buffers, num_buffers)
            self._changed.notify_all()

    def take(
        self,
        nbytes: int,
        *,
        timeout_s: float | None = None,
        look: Callable[[], None] | None = None,
        max_nbytes: int | None = None,
    ) -> SharedBuffer:
        """A buffer of at least ``nbytes``, for nobody else until it is given back; its version is a new one.

        Waits while all are taken, ``timeout_s`` at most: then raises ``StagingBusyError``. Meanwhile ``look`` is
        called again and again; what it raises ends the wait and passes unchanged. Raises ``StagingMemoryError`` where
        a larger buffer is needed and there is no memory for it.

        With another one all buffers together would take more than ``max_nbytes``: then those that are free make room,
        else it waits for one that is taken. Raises ``StagingMemoryError`` where one alone would take more.
        """
        buffer = self._taken_as_it_is(nbytes, timeout_s, look, max_nbytes)
        buffer.renew()  # before anything is written: who reads it meanwhile sees that
        return buffer

    def _taken_as_it_is(
        self,
        nbytes: int,
        timeout_s: float | None = None,
        look: Callable[[], None] | None = None,
        max_nbytes: int | None = None,
    ) -> SharedBuffer:
        self._require_own_process()
        _require_within(nbytes, max_nbytes)
        began_s, replaced = time.monotonic(), False
        while True:
            with self._changed:
                assert not self._closed, "the pool is closed"
                fits = self._fits(nbytes, max_nbytes)
                found, closed = self._find(nbytes, even_newest=not fits)
                if found is not None:
                    return found
                replaced = (replaced or closed) and max_nbytes is None
                if closed and not fits:
                    continue
                if fits and self._num_there < self.num_buffers:
                    self._making.append(_whole_pages(nbytes))
                    break
                self._wait(began_s, timeout_s, None if look is None else _LOOK_AGAIN_S)
            if look is not None:
                look()
        try:
            return self._made(nbytes, replaced)
        except StagingMemoryError:
            if not self._spares_newest or self._newest not in self._free:
                raise
            return self._newest_of_all(nbytes)

    def give_back(self, buffer: SharedBuffer, *, is_newest: bool = True) -> None:
        """Let ``buffer`` be taken again: nobody writes to it any more but whoever takes it next.

        ``is_newest``: whether it holds something of use, so that it is the one to be spared.
        """
        if is_newest:
            self._newest = buffer
        self._put_back(buffer)

    def _put_back(self, buffer: SharedBuffer) -> None:
        with self._changed:
            assert buffer in self._taken, "a buffer is given back once, to the pool that it is from"
            self._taken.discard(buffer)
            if self._closed:
                buffer.close()
            else:
                self._free.append(buffer)
            self._changed.notify_all()

    def leave(self, buffer: SharedBuffer) -> None:
        """Let go of ``buffer`` for good: another process may still write to it, and keeps it."""
        with self._changed:
            assert buffer in self._taken, "a buffer is left once, by the pool that it is from"
            self._taken.discard(buffer)
            buffer.close()
            self._changed.notify_all()

    def prepare(self, nbytes: int, *, max_nbytes: int | None = None) -> None:
        """Make all buffers that are not in use ready for ``nbytes``: the next saves then take no memory.

        With ``max_nbytes``, as ``take`` has it, as many as may be. Raises ``StagingMemoryError`` where there is not
        enough for all of them; those for which there is stay.
        """
        taken: list[SharedBuffer] = []
        try:
            while len(taken) < self.num_buffers:
                taken.append(self._taken_as_it_is(nbytes, timeout_s=0, max_nbytes=max_nbytes))
        except StagingBusyError:
            pass  # whoever has the others has made them as large as they need to be, or there may be no more
        finally:
            for buffer in taken:
                self._put_back(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that there are."""
        with self._changed:
            return sum(buffer.nbytes for buffer in (*self._free, *self._taken))

    def close(self) -> None:
        """Let go of all buffers, of those in use once they are given back. Safe to call again."""
        if os.getpid() == self._pid:
            with self._changed:
                self._closed = True
                while self._free:
                    self._free.pop().close()

    # With the lock held.

    @property
    def _num_there(self) -> int:
        return len(self._free) + len(self._taken) + len(self._making)

    def _fits(self, nbytes: int, max_nbytes: int | None) -> bool:
        """Whether one buffer more takes no more than all together may."""
        there = sum(buffer.nbytes for buffer in (*self._free, *self._taken)) + sum(self._making)
        return max_nbytes is None or there + _whole_pages(nbytes) <= max_nbytes

    def _find(self, nbytes: int, *, even_newest: bool = False) -> tuple[SharedBuffer | None, bool]:
        """A free buffer that is large enough, now taken; or None, and whether a smaller one was closed for it."""
        free = [buffer for buffer in self._free if even_newest or not self._is_spared(buffer)]
        if not free:
            return None, False
        large_enough = [buffer for buffer in free if buffer.nbytes >= nbytes]
        if large_enough:
            found = min(large_enough, key=lambda buffer: buffer.nbytes)
            self._free.remove(found)
            self._taken.add(found)
            return found, False
        smaller = min(free, key=lambda buffer: buffer.nbytes)
        self._free.remove(smaller)
        smaller.close()
        return None, True

    def _is_spared(self, buffer: SharedBuffer) -> bool:
        """Whether another one is to be taken in its place: one that is free, or may yet be made."""
        has_choice = len(self._free) > 1 or self._num_there < self.num_buffers
        return self._spares_newest and buffer is self._newest and has_choice

    def _wait(self, began_s: float, timeout_s: float | None, look_every_s: float | None) -> None:
        if timeout_s is None:
            self._changed.wait(look_every_s)
            return
        left_s = began_s + timeout_s - time.monotonic()
        if left_s <= 0:
            raise StagingBusyError(num_buffers=self.num_buffers, waited_s=timeout_s)
        self._changed.wait(left_s if look_every_s is None else min(left_s, look_every_s))

    # Without the lock: it takes a while.

    def _newest_of_all(self, nbytes: int) -> SharedBuffer:
        """What ``take`` spares, where there is no memory for another one; or one in place of that."""
        with self._changed:
            found, replaced = self._find(nbytes, even_newest=True)
            if found is not None:
                return found
            self._making.append(_whole_pages(nbytes))
        return self._made(nbytes, replaced)

    def _made(self, nbytes: int, replaces: bool) -> SharedBuffer:
        """A new buffer in the place that is reserved for it, which is free again if this fails."""
        buffer = None
        try:
            buffer = self._new_buffer(nbytes, replaces)
            buffer.fault_in()
            if self._on_new is not None:
                self._on_new(buffer)
        except BaseException:
            with self._changed:
                self._making.remove(_whole_pages(nbytes))
                self._changed.notify_all()
            if buffer is not None:
                buffer.close()
            raise
        with self._changed:
            self._making.remove(_whole_pages(nbytes))
            self._taken.add(buffer)
        return buffer

    def _new_buffer(self, nbytes: int, replaces: bool) -> SharedBuffer:
        try:
            return _new_buffer(nbytes, replaces)
        except StagingMemoryError:
            if self._make_room is None:
                raise
        self._make_room()
        return _new_buffer(nbytes, replaces)

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError("its staging buffers are not for a fork of it", pid=self._pid)


def _require_within(nbytes: int, max_nbytes: int | None) -> None:
    if max_nbytes is not None and _whole_pages(nbytes) > max_nbytes:
        raise StagingMemoryError(
            nbytes=nbytes, available_nbytes=max_nbytes, reason="it is more than RAY_DCP_STAGING_NBYTES allows"
        )


def _new_buffer(nbytes: int, has_grown: bool) -> SharedBuffer:
    if has_grown:
        try:
            return SharedBuffer.create(_whole_pages(nbytes + nbytes // _ROOM_TO_GROW))
        except StagingMemoryError:
            pass  # there may be as much as is needed
    return SharedBuffer.create(_whole_pages(nbytes))


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


__all__ = ["BufferPool"]
