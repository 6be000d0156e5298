"""``NodeAgent``: writes what ranks of its node have staged, and takes their part of the save from then on.

A plain object without torch and Ray; ``cluster.agent.agent_actor`` is the shell around it. The jobs of a rank are
carried out one after the other, those of several ranks side by side: each rank has a thread here.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ray_dcp.errors import ConfigError, CoordinatorLostError
from ray_dcp.protocol.deputy import DeputyCall, DeputyLink, HandedOver, SealedPart, Told
from ray_dcp.settings import DEFAULT_MEMORY_KEEP_S, agent_write_rate_from, memory_keep_from, memory_tier_from
from ray_dcp.staging.buffer_errors import StepNotKeptError
from ray_dcp.staging.memory_tier import HeldFile, KeptSave, MemoryTier
from ray_dcp.staging.peers.peer import Peer
from ray_dcp.staging.peers.peer_copies import CopyOffer, PeerCopies
from ray_dcp.staging.peers.peer_offers import CopyKeeper, PeerOffers
from ray_dcp.staging.sealing import OpenEnds, seal, write_sealed
from ray_dcp.staging.shared_buffer import BufferName, SharedBuffer
from ray_dcp.staging.write_rate import WriteRate
from ray_dcp.store.local import without_sync
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store
from ray_dcp.system_error import behind
from ray_dcp.trace_points import Point, reached

logger = logging.getLogger(__name__)

KEPT_PATIENCE_S = 4.0
"""How long a look at what is kept waits for saves in memory that go on: a rank that died may have begun one."""
_REMEMBERED_JOBS = 8
"""How many ended jobs of a rank it is remembered how they ended: the rank may ask late."""


@dataclass(frozen=True, slots=True)
class FileJob:
    """A staged file, and where it is to be written."""

    buffer: BufferName
    version: int
    """The buffer's version while this file is in it."""
    nbytes: int
    open_ends: OpenEnds
    place: str
    """The checkpoint's path or URL."""
    key: str
    sync_files: bool
    stays_in_memory: bool = False
    """Whether it is sealed and kept in memory, and not written."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A rank's write part of which all is in shared memory."""

    prepared: bytes
    """The encoded part, in which checksums are blank; what is sent as it is where there is no file."""
    file: FileJob | None


@dataclass(frozen=True, slots=True)
class DeputyJob:
    """A rank's part of a save, from its write on."""

    handed_over: HandedOver
    part: StagedPart
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables by which the rank opens stores."""
    save: str = ""
    """The save, by a name that all ranks of the group have for it."""
    replicas: int = 0
    """On how many other nodes a copy of the file is to be kept in memory."""


class SavePulse(threading.Thread):
    """Tells the coordinator again and again how far a job is, and the job when its save has failed elsewhere."""

    def __init__(self, tell: Callable[[int, int], Told], interval_s: float) -> None:
        super().__init__(name="agent-pulse", daemon=True)
        self._tell = tell
        self._interval_s = interval_s
        self._over = threading.Event()
        self._mark = self._nbytes = 0
        self.failed: Told | None = None

    def advance(self, nbytes: int) -> None:
        """Count a piece. Raises ``SaveOverError`` once the save has failed elsewhere: nobody needs the file."""
        self._mark += 1
        self._nbytes += nbytes
        if self.failed is not None:
            raise SaveOverError(self.failed.text)

    def end(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.wait(self._interval_s):
            try:
                told = self._tell(self._mark, self._nbytes)
            except CoordinatorLostError:
                continue  # whoever delivers deals with that
            except Exception as error:  # noqa: BLE001 - a sign of progress may get lost, the save must not
                logger.warning("cannot tell the coordinator of a save's progress: %r", error)
                continue
            if told.failed and not told.coordinator_lost:
                self.failed = told
                return


class SaveOverError(Exception):
    """Raised in a job whose save has failed elsewhere."""


class OtherNodes(Protocol):
    """An agent's way to the agents of its group on other nodes."""

    node: str
    """The node that this agent is on."""

    def keepers(self) -> Iterable[CopyKeeper]:
        """All of them, the one first that is to keep copies for this node."""
        ...

    def find(self, node: str) -> Peer:
        """The one on ``node``. Raises ``PeerLostError`` where there is none."""
        ...


class NodeAgent:
    """See the module. ``link`` is the way to the coordinator; ``pulse_s`` how often it hears of a job."""

    def __init__(self, link: DeputyLink, *, pulse_s: float = 0.5, others: OtherNodes | None = None) -> None:
        self._link = link
        self._pulse_s = pulse_s
        self._lock = threading.Lock()
        self._ranks: dict[int, _RankJobs] = {}
        self._num_open = 0
        self._in_memory: list[threading.Event] = []
        """What ends with the jobs that write nothing."""
        self._rate = WriteRate()
        self.memory = MemoryTier()
        """The files that were written here and are still in memory."""
        self._node = others.node if others is not None else ""
        self.copies = PeerCopies(self.memory, others.find) if others is not None else None
        """What it keeps of other nodes."""
        self.offers = PeerOffers(others.keepers) if others is not None else None
        """What it has other nodes keep."""
        self.keeps_for_s = DEFAULT_MEMORY_KEEP_S
        """How long they are to stay there for a group that is gone, in seconds, as its ranks said last."""

    @property
    def num_open(self) -> int:
        """Number of the jobs that are not over."""
        with self._lock:
            return self._num_open

    def take(self, job: DeputyJob) -> Told:
        """Take a rank's part: whatever becomes of the rank, it is written and sent when this has returned.

        Not so where what is returned says that it failed. Raises ``StagingLostError`` where the buffer cannot be
        opened, and what ``open_store`` raises: then nobody has been told, and the part is the rank's own.
        """
        store = store_of(job)
        if self.copies is not None and memory_tier_from(job.variables):
            self.copies.took_part(job.save)
        agent_write_rate_from(job.variables)  # so that a wrong one is told of before anything is taken
        file = job.part.file
        buffer = SharedBuffer.attach(file.buffer) if file is not None else None
        with self._lock:
            jobs = self._ranks.setdefault(job.handed_over.rank, _RankJobs())
        call = DeputyCall(job.handed_over, self._link, after=jobs.latest)
        try:
            told = call.hand_over()
        except BaseException:
            _close(buffer)
            raise
        if told.failed:
            _close(buffer)
            return told
        with self._lock:
            self._num_open += 1
            ended = jobs.begin(job.handed_over.call_id, call)
            self._in_memory = [event for event in self._in_memory if not event.is_set()]
            if file is not None and file.stays_in_memory:
                self._in_memory.append(ended)
        jobs.put(lambda: self._carry_out(job, call, store, buffer))
        return told

    def kept_under(self, root: str) -> tuple[KeptSave, ...]:
        """What is in memory of the saves below ``root``; waits a few seconds for those in memory that go on."""
        deadline = time.monotonic() + KEPT_PATIENCE_S
        with self._lock:
            going_on = tuple(self._in_memory)
        for ended in going_on:
            ended.wait(max(0.0, deadline - time.monotonic()))
        return self.memory.kept_under(root)

    def told(self, call_id: bytes, rank: int) -> Told | None:
        """How a job has ended, once it has; None where it is not known here."""
        with self._lock:
            jobs = self._ranks.get(rank)
            ended = jobs.ended.get(call_id) if jobs is not None else None
            call = jobs.calls.get(call_id) if jobs is not None else None
        if ended is None or call is None:
            return None
        ended.wait()
        return call.told

    def _carry_out(self, job: DeputyJob, call: DeputyCall, store: Store | None, buffer: SharedBuffer | None) -> None:
        try:
            call.told = self._written_and_delivered(job, call, store, buffer)
        except Exception as error:
            logger.exception("a node agent cannot end a save of rank %d, which goes on by itself", job.handed_over.rank)
            call.hand_back(error)
        finally:
            _close(buffer)
            with self._lock:
                self._num_open -= 1
                self._ranks[job.handed_over.rank].end(job.handed_over.call_id)

    def _written_and_delivered(
        self, job: DeputyJob, call: DeputyCall, store: Store | None, buffer: SharedBuffer | None
    ) -> Told:
        handed, file = job.handed_over, job.part.file
        if file is None or buffer is None:
            return call.deliver(job.part.prepared)
        pulse = SavePulse(
            lambda mark, nbytes: self._link.progress(handed.call_id, handed.rank, mark, nbytes), self._pulse_s
        )
        rate_per_s = agent_write_rate_from(job.variables)

        def advance(nbytes: int) -> None:
            pulse.advance(nbytes)
            if store is not None:
                self._rate.spend(nbytes, rate_per_s)

        pulse.start()
        try:
            if store is None:
                crcs = seal(buffer.memory, file.nbytes, file.open_ends, advance)
            else:
                crcs = write_sealed(store, file.key, buffer.memory, file.nbytes, file.open_ends, advance)
        except SaveOverError:
            assert pulse.failed is not None
            return pulse.failed
        except Exception as error:
            if isinstance(behind(error), FileExistsError):
                raise  # the rank has written the file: it has given this agent up, and is not to be failed for it
            return call.fail(error)
        finally:
            pulse.end()
        held = self._keep(job, file, buffer)
        if file.stays_in_memory and held is None:
            return call.fail(StepNotKeptError(reason="its node's agent cannot keep the memory"))
        reached(Point.BEFORE_RESULT)
        told = call.deliver(SealedPart(job.part.prepared, crcs.tobytes()).encoded())
        if not told.failed:
            if file.stays_in_memory:
                self.memory.commit(file.place, file.key, told.answer)
            else:
                self.memory.committed(file.key)
            if self.copies is not None:
                self.copies.committed(file.key)
            if held is not None and self.offers is not None and job.replicas:
                self.offers.offer(
                    CopyOffer(job.save, self._node, handed.rank, held, file.open_ends, crcs.tobytes(), rate_per_s)
                )
        return told

    def left(self, rank: int) -> None:
        """Note that a rank of this node has left its group in order."""
        self.memory.left(rank)
        if self.offers is not None:
            self.offers.left(rank)

    def make_room(self) -> None:
        """Let go of all that is in memory, the copies of other nodes' files among it."""
        self.memory.close()
        if self.copies is not None:
            self.copies.let_go()

    def _keep(self, job: DeputyJob, file: FileJob, buffer: SharedBuffer) -> HeldFile | None:
        """Keep a sealed file in memory. Where that fails it can only be had from the store, if it is there."""
        try:
            if memory_tier_from(job.variables):
                self.keeps_for_s = memory_keep_from(job.variables)
                return self.memory.keep(job.handed_over.rank, file.place, file.key, file.nbytes, buffer, file.version)
        except (OSError, ConfigError) as error:
            logger.warning("%s is not kept in memory: %s", file.key, error)
        return None


class _RankJobs:
    """The jobs of one rank, and the thread that carries them out in order."""

    def __init__(self) -> None:
        self.latest: DeputyCall | None = None
        self.calls: dict[bytes, DeputyCall] = {}
        self.ended: dict[bytes, threading.Event] = {}
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, call_id: bytes, call: DeputyCall) -> threading.Event:
        """Take one more; what is returned is set when it is over."""
        self.latest = call
        self.calls[call_id], self.ended[call_id] = call, threading.Event()
        over = [one for one, event in self.ended.items() if event.is_set()]
        for old in over[:-_REMEMBERED_JOBS]:
            del self.calls[old], self.ended[old]
        return self.ended[call_id]

    def put(self, job: Callable[[], None]) -> None:
        self._waiting.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agent-writer", daemon=True)
            self._thread.start()

    def end(self, call_id: bytes) -> None:
        self.ended[call_id].set()

    def _run(self) -> None:
        while True:
            job = self._waiting.get()
            try:
                job()
            except Exception:
                logger.exception("a node agent's job ended with an error that nobody was told of")


def store_of(job: DeputyJob) -> Store | None:
    """The store into which the job writes, opened as the rank would; None where it writes nothing."""
    os.environ.update(job.variables)
    file = job.part.file
    if file is None or file.stays_in_memory:
        return None
    store = open_store(file.place)
    return store if file.sync_files else without_sync(store)


def _close(buffer: SharedBuffer | None) -> None:
    if buffer is not None:
        buffer.close()


__all__ = [
    "KEPT_PATIENCE_S",
    "DeputyJob",
    "FileJob",
    "NodeAgent",
    "OtherNodes",
    "SaveOverError",
    "SavePulse",
    "StagedPart",
    "store_of",
]
