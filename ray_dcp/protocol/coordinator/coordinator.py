"""``Coordinator``: membership and the rounds of saves and loads of one group, as a plain object.

Ranks pull: each sends its part of a phase and awaits its own answer, a ``concurrent.futures.Future``. The last part to
arrive starts the coordinator's step. The first failure of a call (a rank's own report, a lost rank, a step that
raises, a limit that is over) resolves every waiting future, and all later ones of that call, with one
``CheckpointException``.

No Ray and no event loop in here: the actor around it only awaits these futures and calls ``check_limits`` now and then.
Methods may be called from several threads; steps run through ``execute`` (in place by default, so that tests drive any
interleaving in one thread).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from ray_dcp.errors import RankLostError, StaleGenerationError
from ray_dcp.protocol.coordinator.calls import Calls, CallsRecord
from ray_dcp.protocol.coordinator.membership import JoinRequest, Membership, MembershipRecord
from ray_dcp.protocol.coordinator.open_call import OpenCall
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import CallId
from ray_dcp.settings import Limits, Phase

Execute = Callable[[Callable[[], None]], object]

CHECK_INTERVAL_S = 0.25
"""How often ``check_limits`` is to be called."""
_REMEMBERED_ATTEMPTS = 1024
"""How many failed attempts are remembered: ranks that were killed may have left files of them."""


class SaveEnded(Protocol):
    """A function that is told of every save that has an attempt and is over.

    It is called under the coordinator's lock: it must only take note.
    """

    def __call__(self, checkpoint_id: str, *, committed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class CoordinatorRecord:
    """All that a coordinator which starts over must know to go on with a group."""

    membership: MembershipRecord = field(default_factory=MembershipRecord)
    calls: CallsRecord = field(default_factory=CallsRecord)

    def of_ended_group(self) -> CoordinatorRecord:
        """The record for a later group of the same name: no rank of this one can ever take part in that."""
        membership = MembershipRecord(self.membership.generation, incarnations=self.membership.incarnations)
        return CoordinatorRecord(membership)


class Coordinator:
    """The coordinator of group ``name``; see the module.

    ``keep`` is given the ``record`` of what has changed before anybody hears of it, and keeps it for a coordinator that
    starts over: a call that some rank was told has failed never works for another one, and no rank comes back to life.
    """

    def __init__(
        self,
        name: str,
        execute: Execute = lambda step: step(),
        clock: Callable[[], float] = time.monotonic,
        on_save_ended: SaveEnded | None = None,
        keep: Callable[[CoordinatorRecord], None] = lambda record: None,
    ) -> None:
        self.name = name
        self._keep = keep
        self._execute = execute
        self._on_save_ended = on_save_ended
        self._clock = clock
        self._checked_s = clock()
        self._awake_s = 0.0
        self._lock = threading.RLock()
        self._membership = Membership(name)
        self._calls = self._no_calls()
        self._ending: list[OpenCall] = []
        """Calls of older generations, with a step that is under way."""
        self._dead: deque[str] = deque(maxlen=_REMEMBERED_ATTEMPTS)
        self._heard_s: dict[str, float] = {}
        """When each member that is not an actor was last heard of, by ``_awake_s``."""

    # Membership.

    def join(self, request: JoinRequest) -> Future[int]:
        """A future of the generation that begins when all ``request.world_size`` ranks are in; the older one ends."""
        with self._lock:
            before = self._membership.generation
            future = self._membership.join(request)
            self.heartbeat(request.member)
            if self._membership.generation != before:
                self._end_calls(before)
        return future

    def withdraw(self, request: JoinRequest) -> list[int]:
        """Take back a join that waited too long; returns the ranks it waited for."""
        with self._lock:
            return self._membership.withdraw(request)

    def member_lost(self, member: str, why: str) -> None:
        """Note that a process died: every open call fails, and its generation can start no more calls."""
        with self._lock:
            rank = self._membership.lose(member, why)
            if rank is not None:
                self.keep_record()
                for call in self._open_calls():
                    call.fail(self._lost_failure(call))

    def ranks_failed(self, failed: Mapping[int, str]) -> None:
        """Note that these ranks of the current generation have failed, and why, as whoever runs them says."""
        with self._lock:
            for rank, why in sorted(failed.items()):
                if rank < self._membership.world_size:
                    self.member_lost(self._membership.member(rank), why)

    def heartbeat(self, member: str) -> None:
        """Note that ``member`` lives; an actor need not say so."""
        with self._lock:
            self._heard_s[member] = self._awake_s

    def leave(self, generation: int, rank: int) -> None:
        """Note that rank ``rank`` has closed its group; calls that still need it fail."""
        with self._lock:
            if generation == self._membership.generation:
                self.member_lost(self._membership.member(rank), "closed its group")

    def knows(self, member: str) -> bool:
        """Whether the process counts for anything: it is in the current generation or waits for the next."""
        with self._lock:
            return self._membership.knows(member)

    @property
    def num_members(self) -> int:
        """The number of live ranks of the current generation and of ranks that wait to join."""
        with self._lock:
            return self._membership.num_live

    @property
    def generation(self) -> int:
        with self._lock:
            return self._membership.generation

    @property
    def limits(self) -> Limits:
        with self._lock:
            return self._membership.limits

    @property
    def record(self) -> CoordinatorRecord:
        """What another ``Coordinator`` needs to go on with this group; see ``restore``."""
        with self._lock:
            return CoordinatorRecord(self._membership.record, self._calls.record)

    def keep_record(self) -> None:
        """Have the record kept as it is now."""
        with self._lock:
            self._keep(self.record)

    def restore(self, record: CoordinatorRecord) -> None:
        """Go on with the group of a coordinator that died: its ranks send again what they had sent to that one."""
        with self._lock:
            self._membership.restore(record.membership)
            self._calls = self._no_calls()
            self._calls.restore(record.calls)
            for member in self._membership.beating:
                self.heartbeat(member)

    # Calls.

    def contribute(
        self, call_id: CallId, rank: int, phase: Phase, message: bytes, *, again: bool = False
    ) -> Future[bytes]:
        """Take a rank's part of a phase; returns a future of its answer, encoded, for which all parts must be there.

        ``again``: the rank has lost its coordinator during this call, so another one may have had all parts before.
        Raises ``StaleGenerationError`` for a call of an older generation; the future fails with
        ``CheckpointException``.
        """
        with self._lock:
            call = self._call(call_id, rank)
            self._calls.part_sent(call_id, rank)
            if again:
                call.started_over = True
            future = call.put(rank, phase, message)
            complete = call.begin_step(phase)
        if complete:
            self._execute(lambda: call.run(phase))
        return future

    def fail(self, call_id: CallId, rank: int, failure: RankFailure) -> None:
        """Fail a call for all ranks, with what this rank has failed with or has seen fail."""
        with self._lock:
            self._call(call_id, rank, own=failure).fail([failure])

    def report_progress(
        self, call_id: CallId, rank: int, phase: Phase, mark: int, nbytes: int
    ) -> CheckpointException | None:
        """Note how far a rank is in a call. Returns how that has failed, if it has: the rank may stop working."""
        with self._lock:
            call = self._call(call_id, rank)
            call.see(rank, phase, mark=mark, nbytes=nbytes)
            return call.failure

    def check_limits(self) -> None:
        """Fail the calls, and lose the members, whose time is over.

        Time in which this was not called does not count: then the coordinator itself stood still, and nobody could
        have been heard.
        """
        with self._lock:
            now = self._clock()
            self._awake_s += min(now - self._checked_s, 4 * CHECK_INTERVAL_S)
            self._checked_s = now
            limits = self._membership.limits
            self._heard_s = {member: self._heard_s.get(member, 0.0) for member in self._membership.beating}
            for member, heard_s in list(self._heard_s.items()):
                silent_s = self._awake_s - heard_s
                if silent_s > limits.heartbeat_timeout_s:
                    self.member_lost(member, f"{member} was not heard of for {silent_s:.1f} s (heartbeat_timeout_s)")
            self._calls.give_up_waiting(limits)
            for call in self._open_calls():
                call.fail_overdue(limits)

    @property
    def attempts(self) -> tuple[frozenset[str], frozenset[str]]:
        """The attempts that still go on, and the latest of those that have failed and can never commit."""
        with self._lock:
            calls = [*self._calls, *self._ending]
            return frozenset(call.attempt for call in calls if call.attempt and not call.ended), frozenset(self._dead)

    def _call(self, call_id: CallId, rank: int, own: RankFailure | None = None) -> OpenCall:
        if call_id.generation != self._membership.generation or not self._membership.world_size:
            raise StaleGenerationError(
                group=self.name, generation=call_id.generation, current=self._membership.generation
            )
        call = self._calls.of(call_id, rank, own)
        if self._membership.lost:
            call.fail(self._lost_failure(call))
        return call

    def _no_calls(self) -> Calls:
        """An empty ``Calls``, for a generation that begins or that an earlier coordinator had."""
        return Calls(
            group=self.name,
            world_size=self._membership.world_size,
            open_call=self._open,
            on_change=self.keep_record,
        )

    def _open(self, call_id: CallId) -> OpenCall:
        return OpenCall(
            call_id,
            group=self.name,
            world_size=self._membership.world_size,
            lock=self._lock,
            clock=lambda: self._awake_s,
            on_end=self._call_ended,
        )

    def _call_ended(self, call: OpenCall) -> None:
        self._calls.ended(call)
        if call.failure is not None:
            self.keep_record()
        if call.attempt is not None and call.failed_for_good:
            self._dead.append(call.attempt)
        if call.attempt is not None and self._on_save_ended is not None:
            self._on_save_ended(call.checkpoint_id, committed=call.failure is None)

    def _open_calls(self) -> list[OpenCall]:
        return [call for call in (*self._calls, *self._ending) if not call.ended]

    def _lost_failure(self, call: OpenCall) -> list[RankFailure]:
        return [
            RankFailure(
                rank, str(call.phase_now), "RankLostError", why, "", RankLostError(group=self.name, lost={rank: why})
            )
            for rank, why in sorted(self._membership.lost.items())
        ]

    def _end_calls(self, generation: int) -> None:
        """End the calls of ``generation``, which is over; a step under way ends its own, or the stall limit does."""
        calls, self._calls = self._calls, self._no_calls()
        self._ending = [call for call in (*self._ending, *calls) if not call.ended]
        stale = StaleGenerationError(group=self.name, generation=generation, current=self._membership.generation)
        for call in self._ending:
            call.fail([RankFailure.from_exception(stale, rank=COORDINATOR, phase=call.phase_now)])
