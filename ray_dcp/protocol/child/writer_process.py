"""The child that writes what a process alone has staged: ``main``, and ``ChildWriter``, what it does.

It is no child of the process by the time that anybody could wait for it, nor of its session: neither Ctrl-C nor the end
of the process ends it before all that it has taken is written and committed.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from ray_dcp.errors import RayDcpError
from ray_dcp.protocol.child.child_messages import (
    FromChild,
    Hello,
    JobOver,
    KnockHeard,
    TakeJob,
    Taken,
    ToChild,
    WriteFailed,
    Written,
)
from ray_dcp.protocol.deputy import SealedPart
from ray_dcp.protocol.node_agent import DeputyJob, SaveOverError, store_of
from ray_dcp.settings import agent_write_rate_from
from ray_dcp.staging.sealing import write_sealed
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.staging.write_rate import WriteRate
from ray_dcp.store.store import Store
from ray_dcp.trace_points import Point, reached

logger = logging.getLogger("ray_dcp")

_LOWEST_PRIORITY = 19


@dataclass(slots=True)
class _Job:
    """A job that is not over."""

    job: DeputyJob
    store: Store | None
    buffer: SharedBuffer | None
    written: threading.Event = field(default_factory=threading.Event)
    """Set when the writing has ended, well or not."""
    message: bytes = b""
    """What is sent to the commit; empty while it is not written, or could not be."""
    is_over: bool = False
    """Whether the save has ended: a file that is still being written is of no use then."""
    rate: WriteRate = field(default_factory=WriteRate)
    """Of this job alone: jobs are written one after the other."""

    def advance(self, nbytes: int) -> None:
        """Called for each piece of the file."""
        if self.is_over:
            raise SaveOverError
        self.rate.spend(nbytes, agent_write_rate_from(self.job.variables))

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()


class ChildWriter:
    """Writes jobs in their order, in a thread; ``tell`` tells the process of it."""

    def __init__(self, tell: Callable[[FromChild], None]) -> None:
        self._tell = tell
        self._jobs: dict[int, _Job] = {}
        self._waiting: queue.SimpleQueue[tuple[int, _Job]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hear(self, message: ToChild) -> None:
        """Do what the process asks; what takes long is done in the thread."""
        if isinstance(message, TakeJob):
            self._tell(Taken(message.number, self._take(message)))
        elif isinstance(message, JobOver):
            job = self._jobs.pop(message.number, None)
            if job is not None:
                job.is_over = True
                if job.written.is_set():
                    job.close()
        else:
            self._tell(KnockHeard())

    def finish(self) -> None:
        """Commit all that is not over: the process is dead. Failures are logged, there is nobody else to tell."""
        for job in self._jobs.values():
            job.written.wait()
            if not job.message:
                continue
            place = job.job.part.file.place if job.job.part.file is not None else "a checkpoint without tensors"
            try:
                from ray_dcp.protocol.child.commit_alone import commit_alone  # imports torch

                commit_alone(job.job.handed_over, job.message)
            except BaseException as error:  # noqa: BLE001 - torch's own error is a BaseException; the next may succeed
                logger.error("the process that saved %s is gone, and its save cannot be committed: %r", place, error)
            else:
                logger.warning("the process that saved %s is gone; its save is committed", place)

    def _take(self, asked: TakeJob) -> str:
        """Why the job cannot be taken; empty where it is."""
        try:
            agent_write_rate_from(asked.job.variables)
            store = store_of(asked.job)
            file = asked.job.part.file
            job = _Job(asked.job, store, SharedBuffer.attach(file.buffer) if file is not None else None)
        except (RayDcpError, OSError) as error:
            return str(error) or type(error).__name__
        self._jobs[asked.number] = job
        self._waiting.put((asked.number, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="child-writer", daemon=True)
            self._thread.start()
        return ""

    def _write_all(self) -> None:
        while True:
            number, job = self._waiting.get()
            try:
                told = self._written(number, job)
            except BaseException as error:  # noqa: BLE001 - whatever a store raises, the process waits for this
                told = WriteFailed(number, _pickled(error), "".join(traceback.format_exception(error)))
            job.written.set()
            if job.is_over:
                job.close()
            self._tell(told)

    def _written(self, number: int, job: _Job) -> FromChild:
        part = job.job.part
        if part.file is None or job.store is None or job.buffer is None:
            job.message = part.prepared
            return Written(number, b"")
        file = part.file
        crcs = write_sealed(job.store, file.key, job.buffer.memory, file.nbytes, file.open_ends, job.advance).tobytes()
        reached(Point.BEFORE_RESULT)
        job.message = SealedPart(part.prepared, crcs).encoded()
        return Written(number, crcs)


def _pickled(error: BaseException) -> bytes:
    """``error``, or where that cannot be pickled and read again what it says."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - anybody's class may raise anything here
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled


def main(descriptor: int, parent: int) -> None:
    """Serve process ``parent`` over the socket ``descriptor`` until it is gone and nothing is left to do."""
    if os.fork():
        os._exit(0)  # so that whoever waits for all children of the process does not wait for this one
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process, when it has done its work
    os.nice(_LOWEST_PRIORITY)
    os.chdir("/")  # the folder can be removed or unmounted meanwhile; places are whole paths
    logging.basicConfig(format="ray_dcp: %(message)s", stream=sys.stderr)
    connection = Connection(descriptor)
    lock = threading.Lock()

    def tell(message: FromChild) -> None:
        with lock, suppress(OSError):  # the process is gone: whoever waits for messages finds out
            connection.send(message)

    writer = ChildWriter(tell)
    tell(Hello(os.getpid()))
    for message in _heard(connection, parent):
        writer.hear(message)
    writer.finish()


def _heard(connection: Connection, parent: int) -> Iterator[ToChild]:
    """The messages of the process, until it has ended or has closed its end: a fork of it may keep that open."""
    watched = select.poll()
    watched.register(connection.fileno(), select.POLLIN)
    with suppress(OSError):  # it has ended already, or the kernel is older: then the socket says so
        watched.register(os.pidfd_open(parent), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in watched.poll()}
        if connection.fileno() in ready:
            try:
                yield connection.recv()
            except (EOFError, OSError):
                return
        elif ready:
            return
