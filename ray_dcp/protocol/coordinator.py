"""``Coordinator``: membership and the rounds of saves and loads of one group, as a plain object.

Ranks pull: each sends its part of a phase and awaits its own answer, a ``concurrent.futures.Future``. The last part to
arrive starts the coordinator's step. The first failure of a call (a rank's own report, a lost rank, a step that
raises) resolves every waiting future, and all later ones of that call, with one ``CheckpointException``.

No Ray and no event loop in here: the actor around it only awaits these futures. Methods may be called from several
threads; steps run through ``execute`` (in place by default, so that tests drive any interleaving in one thread).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ray_dcp.errors import GroupError, RankLostError, StaleGenerationError
from ray_dcp.protocol.call import coordinator_phase
from ray_dcp.protocol.failures import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.membership import JoinRequest, Membership, resolve
from ray_dcp.protocol.sessions import SESSIONS
from ray_dcp.protocol.wire import CallId, decode, encode

Execute = Callable[[Callable[[], None]], object]
_REMEMBERED_CALLS = 64
"""Ended calls that are kept, so that a late part of one is answered with how it ended."""


class Coordinator:
    """The coordinator of group ``name``; see the module."""

    def __init__(self, name: str, execute: Execute = lambda step: step()) -> None:
        self.name = name
        self._execute = execute
        self._lock = threading.RLock()
        self._membership = Membership(name)
        self._calls: OrderedDict[CallId, _OpenCall] = OrderedDict()

    # Membership.

    def join(self, request: JoinRequest) -> Future[int]:
        """The generation, once all ranks of ``request.world_size`` have joined; the older one then ends."""
        with self._lock:
            before = self._membership.generation
            future = self._membership.join(request)
            if self._membership.generation != before:
                self._end_calls_before(self._membership.generation)
        return future

    def withdraw(self, request: JoinRequest) -> list[int]:
        """Take back a join that waited too long; the ranks it waited for."""
        with self._lock:
            return self._membership.withdraw(request)

    def member_lost(self, member: str, why: str) -> None:
        """A process died: every open call of its generation fails, and the generation can start no more."""
        with self._lock:
            rank = self._membership.lose(member, why)
            if rank is not None:
                for call in self._calls_of_generation():
                    call.fail(self._lost_failure(call))

    def ranks_failed(self, failed: Mapping[int, str]) -> None:
        """Somebody who runs the ranks says that these of the current generation have failed, and why."""
        with self._lock:
            for rank, why in sorted(failed.items()):
                if rank < self._membership.world_size:
                    self.member_lost(self._membership.member(rank), why)

    def leave(self, generation: int, rank: int) -> None:
        """Rank ``rank`` has closed its group; calls that it is still needed in fail."""
        with self._lock:
            if generation == self._membership.generation:
                self.member_lost(self._membership.member(rank), "closed its group")

    def knows(self, member: str) -> bool:
        """Whether the process counts for anything: it is in the current generation or waits for the next."""
        with self._lock:
            return self._membership.knows(member)

    @property
    def num_members(self) -> int:
        """Live ranks of the current generation and ranks that wait to join."""
        with self._lock:
            return self._membership.num_live

    @property
    def generation(self) -> int:
        with self._lock:
            return self._membership.generation

    # Calls.

    def contribute(self, call_id: CallId, rank: int, phase: str, message: bytes) -> Future[bytes]:
        """A rank's part of a phase; its answer, encoded, once all parts are there.

        Raises ``StaleGenerationError`` for a call of an older generation; fails with ``CheckpointException``.
        """
        with self._lock:
            call = self._call(call_id, rank)
            future = call.put(rank, phase, message)
            complete = call.begin_step(phase)
        if complete:
            self._execute(lambda: call.run(phase))
        return future

    def fail(self, call_id: CallId, failure: RankFailure) -> None:
        """A rank's own failure: the call fails for all."""
        with self._lock:
            self._call(call_id, failure.rank).fail([failure])

    def expire(self, call_id: CallId, waited_s: float) -> None:
        """Fail the call unless every rank has made it by now: names those that never came."""
        with self._lock:
            call = self._calls.get(call_id)
            absent = call.absent() if call is not None else []
            if call is not None and absent:
                message = f"did not call {call_id.kind} within {waited_s:g} s of the first rank that did"
                call.fail([RankFailure(rank, "collect", "TimeoutError", message, "") for rank in absent])

    def _call(self, call_id: CallId, rank: int) -> _OpenCall:
        if call_id.generation != self._membership.generation:
            raise StaleGenerationError(
                group=self.name, generation=call_id.generation, current=self._membership.generation
            )
        for other, other_call in self._calls.items():
            same_number = (other.generation, other.number) == (call_id.generation, call_id.number)
            if same_number and other.kind != call_id.kind:
                other_call.fail([_kind_mismatch(rank, call_id.kind, other.kind)])
                return other_call
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = _OpenCall(call_id, self._membership.world_size, self._lock)
            if self._membership.lost:
                call.fail(self._lost_failure(call))
            while len(self._calls) > _REMEMBERED_CALLS:
                self._forget_one_ended()
        return call

    def _forget_one_ended(self) -> None:
        ended = next((call_id for call_id, call in self._calls.items() if call.ended), None)
        if ended is None:
            return
        del self._calls[ended]

    def _calls_of_generation(self) -> list[_OpenCall]:
        return [call for call in self._calls.values() if not call.ended]

    def _lost_failure(self, call: _OpenCall) -> list[RankFailure]:
        return [
            RankFailure(
                rank, call.phase_now, "RankLostError", why, "", RankLostError(group=self.name, lost={rank: why})
            )
            for rank, why in sorted(self._membership.lost.items())
        ]

    def _end_calls_before(self, generation: int) -> None:
        for call_id, call in list(self._calls.items()):
            if call_id.generation != generation:
                stale = StaleGenerationError(group=self.name, generation=call_id.generation, current=generation)
                call.fail([RankFailure.from_exception(stale, rank=COORDINATOR, phase=call.phase_now)])
                del self._calls[call_id]


class _OpenCall:
    """One call: the parts of its phases as they arrive, and how it ended."""

    def __init__(self, call_id: CallId, world_size: int, lock: threading.RLock) -> None:
        self._id = call_id
        self._world_size = world_size
        self._lock = lock
        self._session = SESSIONS[call_id.kind]()
        self._parts: dict[str, dict[int, tuple[bytes, Future[bytes]]]] = {}
        self._phase_now = self._session.first_phase
        self._failure: CheckpointException | None = None
        self._stepping = False
        self._failed_while_stepping: list[RankFailure] = []
        self.ended = False

    @property
    def phase_now(self) -> str:
        """The phase that is being waited for or carried out."""
        return self._phase_now

    def put(self, rank: int, phase: str, message: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        parts = self._parts.setdefault(phase, {})
        if rank in parts:
            raise GroupError(f"rank {rank} sent its part of {phase!r} twice", group=str(self._id))
        parts[rank] = (message, future)
        return future

    def begin_step(self, phase: str) -> bool:
        """Whether all parts are there, so that the coordinator's step begins: from now on it alone decides.

        A rank that dies during a commit has sent its results already. Failing the call for it while ``.metadata``
        may be on its way would tell ranks that a checkpoint is absent which then turns out to be there.
        """
        self._stepping = self._failure is None and len(self._parts.get(phase, {})) == self._world_size
        return self._stepping

    def absent(self) -> list[int]:
        """Ranks that have not made this call."""
        if self.ended:
            return []
        return sorted(set(range(self._world_size)) - self._parts.get(self._session.first_phase, {}).keys())

    def run(self, phase: str) -> None:
        """Carry out the coordinator's step of a complete phase and answer every rank, or fail the call."""
        parts = [self._parts[phase][rank] for rank in range(self._world_size)]
        try:
            answers = self._session.step(phase, [decode(message) for message, _ in parts])
            encoded = _encode_each(answers)
        except BaseException as error:  # noqa: BLE001 - whatever a user's planner raises, the ranks wait for it
            self._end_step(
                [RankFailure.from_exception(error, rank=COORDINATOR, phase=coordinator_phase(self._id.kind, phase))]
            )
            return
        with self._lock:
            following = self._session.next_phase(phase)
            self.ended = following is None
            self._phase_now = following or phase
            for (_, future), answer in zip(parts, encoded, strict=True):
                resolve(future, answer)
            self._end_step([])

    def _end_step(self, failures: list[RankFailure]) -> None:
        with self._lock:
            self._stepping = False
            later = failures or self._failed_while_stepping
            if later:
                self.fail(later)

    def fail(self, failures: list[RankFailure]) -> None:
        """The first failure wins; later ones change nothing, and none interrupts a step of the coordinator."""
        with self._lock:
            if self._stepping:
                self._failed_while_stepping = self._failed_while_stepping or failures
            elif self._failure is None and not self.ended:
                self._failure = CheckpointException(self._id.kind, self._session.checkpoint_id, failures)
                self.ended = True
                for parts in self._parts.values():
                    for _, future in parts.values():
                        if not future.done():
                            future.set_exception(self._failure)


def _encode_each(answers: Sequence[Any]) -> list[bytes]:
    """Every answer encoded; one that goes to all ranks is encoded once."""
    encoded: dict[int, bytes] = {}
    for answer in answers:
        if id(answer) not in encoded:
            encoded[id(answer)] = encode(answer)
    return [encoded[id(answer)] for answer in answers]


def _kind_mismatch(rank: int, kind: str, others: str) -> RankFailure:
    message = f"rank {rank} calls {kind} while other ranks call {others}: all ranks must make the same calls in order"
    return RankFailure(rank, "collect", "GroupError", message, "")
