"""``WriterProcess``: a process's way to the child that writes its asynchronous saves, and ``Writing``, one of them.

The child is asked for with the first save and then kept. One that dies, or does not answer, is replaced for the next
save; the one under way is then written by the process itself.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable

from ray_dcp.protocol.child.child_messages import (
    FromChild,
    Hello,
    JobOver,
    Knock,
    KnockHeard,
    TakeJob,
    Taken,
    ToChild,
    WriteFailed,
    Written,
)
from ray_dcp.protocol.node_agent import DeputyJob

logger = logging.getLogger("ray_dcp")

_STARTS_IN_S = 20.0
_TAKES_IN_S = 5.0
"""A child that is up answers within milliseconds."""
_FROZEN_S = 20.0
"""One that does not even answer a knock for this long is ended."""
_LOOK_AT_CHILD_S = 0.2
_DIES_IN_S = 5.0
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ray_dcp.protocol.child.writer_process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Writing:
    """A job in the hands of a child."""

    def __init__(self, number: int, child: _Child) -> None:
        self._number = number
        self._child = child

    def ended(self, look: Callable[[], object]) -> Written | WriteFailed | None:
        """How the writing has ended; None where the child is gone before it has said so, whatever it has written.

        Meanwhile ``look`` is called again and again; what it raises ends the wait and passes unchanged.
        """
        return self._child.wait_for(self._number, look)

    @property
    def may_go_on(self) -> bool:
        """Whether the child may be at work on this although it is given up: it was killed, and not seen to die."""
        return not self._child.is_dead

    def over(self) -> None:
        """Tell the child that the save has ended."""
        self._child.send(JobOver(self._number))


class WriterProcess:
    """See the module. Threads may share one; a fork of the process starts a child of its own."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._warned = self._cannot_start = False

    def ready(self, *, wait: bool) -> bool:
        """Whether there is a child that is up. It starts by this, if need be, and this may ``wait`` for it."""
        return self._found_up(wait=wait) is not None

    def _found_up(self, *, wait: bool) -> _Child | None:
        child = self._started()
        if child is None:
            return None
        if not child.is_up(_STARTS_IN_S if wait and not self._warned else 0):
            if wait and not child.is_lost:
                self._say_once(f"has not started within {_STARTS_IN_S:g} s")
            return None
        return child

    def take(self, job: DeputyJob, *, wait: bool) -> Writing | None:
        """Give ``job`` to the child: from then on it needs this process no more.

        None where there is no child: not yet, unless this is to ``wait`` for it, or it cannot take this job.
        """
        child = self._found_up(wait=wait)
        if child is None:
            return None
        number = next(self._numbers)
        taken = child.ask(TakeJob(number, job), number)
        if taken is None:
            child.end()
            self._say_once("does not answer")
            return None if child.is_dead else Writing(number, child)
        if taken.why_not:
            self._say_once(f"cannot write: {taken.why_not}")
            return None
        return Writing(number, child)

    def _started(self) -> _Child | None:
        """The child, which may just be starting."""
        if self._pid != os.getpid():
            self._begin()  # this is a fork: another thread may have had the lock
        with self._lock:
            if self._child is not None and self._child.is_lost and not self._child.was_up:
                self._cannot_start = True  # nor could the next one, which would say the same on stderr
                self._say_once("has ended as soon as it was started")
            if self._cannot_start:
                return None
            if self._child is None or self._child.is_lost:
                try:
                    self._child = _Child()
                except OSError as error:
                    self._child, self._cannot_start = None, True
                    self._say_once(f"cannot be started: {error}")
            return self._child

    def _say_once(self, what: str) -> None:
        log = logger.debug if self._warned else logger.warning
        self._warned = True
        log("the process that writes asynchronous saves %s; a thread of this one writes, and the end of this process "
            "would lose the save", what)  # fmt: skip


class _Child:
    """One child, from its start to its end. Raises ``OSError`` where it cannot be started."""

    def __init__(self) -> None:
        python = get_executable()  # what the program has set, if it has, for processes of multiprocessing
        if not python or getattr(sys, "frozen", False):
            raise OSError("nobody knows which program is Python's interpreter here")
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes, as Linux has")
        ours, its = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TAKES_IN_S), 0))
        with its:
            started = subprocess.Popen(
                [python, "-c", _MAIN, json.dumps(sys.path), str(its.fileno()), str(os.getpid())],
                pass_fds=[its.fileno()], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self.was_up = self.is_lost = False
        self._alive: int | None = None
        """A descriptor of the process."""
        self._taken: dict[int, Taken] = {}
        self._ended: dict[int, Written | WriteFailed] = {}
        self._heard_s = time.monotonic()
        threading.Thread(target=self._read, args=(started,), name="ray_dcp-child", daemon=True).start()

    def is_up(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.was_up or self.is_lost, timeout_s)
            return self.was_up and not self.is_lost

    @property
    def is_dead(self) -> bool:
        """Whether the process is certainly not there any more."""
        return self.is_lost and self._died_within(0)

    def send(self, message: ToChild) -> None:
        """Send, where it takes what is sent; else it is frozen or dead, and lost."""
        if self.is_lost:
            return
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            self.end()

    def ask(self, message: TakeJob, number: int) -> Taken | None:
        """The answer; None where none comes."""
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: number in self._taken or self.is_lost, _TAKES_IN_S)
            return self._taken.pop(number, None)

    def wait_for(self, number: int, look: Callable[[], object]) -> Written | WriteFailed | None:
        """How the writing has ended; None where the child is lost before it says so. One that is frozen is ended."""
        knocked_s: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: number in self._ended or self.is_lost, _LOOK_AT_CHILD_S)
                if number in self._ended or self.is_lost:
                    return self._ended.pop(number, None)
            look()
            if knocked_s is None or self._heard_s > knocked_s:
                knocked_s = time.monotonic()
                self.send(Knock())
            elif time.monotonic() - knocked_s > _FROZEN_S:
                self.end()

    def end(self) -> None:
        """Kill it. It may live on for a while in a call of the kernel: ``is_dead`` says."""
        with suppress(OSError):
            if self._alive is not None:
                signal.pidfd_send_signal(self._alive, signal.SIGKILL)
        self._died_within(_DIES_IN_S)
        self._lose()

    def _died_within(self, timeout_s: float) -> bool:
        if self._alive is None:
            return True  # it has never taken a job
        ended = select.poll()
        ended.register(self._alive, select.POLLIN)
        return bool(ended.poll(timeout_s * 1000))

    def _read(self, started: subprocess.Popen[bytes]) -> None:
        """Take what the child says until it is gone."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self._hear(self._connection.recv())
                if started.returncode is None:
                    started.wait()  # the process that has forked the child, and has ended since
        self._lose()
        started.wait()

    def _hear(self, message: FromChild) -> None:
        with self._changed:
            self._heard_s = time.monotonic()
            if isinstance(message, Hello):
                self._alive = os.pidfd_open(message.pid)
                weakref.finalize(self, os.close, self._alive)
                self.was_up = True
            elif isinstance(message, Taken):
                self._taken[message.number] = message
            elif not isinstance(message, KnockHeard):
                self._ended[message.number] = message
            self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            self.is_lost = True
            self._changed.notify_all()


__all__ = ["WriterProcess", "Writing"]
