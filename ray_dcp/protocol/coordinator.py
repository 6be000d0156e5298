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
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

from ray_dcp.config import Limits
from ray_dcp.errors import GroupError, RankLostError, StaleGenerationError
from ray_dcp.protocol.failures import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.membership import JoinRequest, Membership, MembershipRecord
from ray_dcp.protocol.open_call import OpenCall
from ray_dcp.protocol.wire import CallId

Execute = Callable[[Callable[[], None]], object]

CHECK_INTERVAL_S = 0.25
"""How often ``check_limits`` is to be called."""
_REMEMBERED_CALLS = 64
"""Ended calls of which is kept how they ended, so that a late part of one is answered with it."""
_REMEMBERED_ATTEMPTS = 1024
"""Failed ones, of which ranks that were killed may have left files."""
_REMEMBERED_ANSWERS = 2
"""Ended calls of which all answers are kept: a rank may ask again for one that got lost on its way."""


class SaveEnded(Protocol):
    """Is told of every save of ours that is over. Called under the coordinator's lock: it must only take note."""

    def __call__(self, checkpoint_id: str, *, committed: bool) -> None: ...


class Coordinator:
    """The coordinator of group ``name``; see the module."""

    def __init__(
        self,
        name: str,
        execute: Execute = lambda step: step(),
        clock: Callable[[], float] = time.monotonic,
        on_save_ended: SaveEnded | None = None,
    ) -> None:
        self.name = name
        self._execute = execute
        self._on_save_ended = on_save_ended
        self._clock = clock
        self._checked_s = clock()
        self._awake_s = 0.0
        self._lock = threading.RLock()
        self._membership = Membership(name)
        self._calls: OrderedDict[CallId, OpenCall] = OrderedDict()
        self._first_remembered = 0
        """Calls of lower numbers have ended and are forgotten."""
        self._dead: deque[str] = deque(maxlen=_REMEMBERED_ATTEMPTS)
        self._heard_s: dict[str, float] = {}
        """When each member that is no actor was last heard of."""

    # Membership.

    def join(self, request: JoinRequest) -> Future[int]:
        """The generation, once all ranks of ``request.world_size`` have joined; the older one then ends."""
        with self._lock:
            before = self._membership.generation
            future = self._membership.join(request)
            self.heartbeat(request.member)
            if self._membership.generation != before:
                self._end_calls_before(self._membership.generation)
        return future

    def withdraw(self, request: JoinRequest) -> list[int]:
        """Take back a join that waited too long; the ranks it waited for."""
        with self._lock:
            return self._membership.withdraw(request)

    def member_lost(self, member: str, why: str) -> None:
        """A process died: every open call fails, and its generation can start no more."""
        with self._lock:
            rank = self._membership.lose(member, why)
            if rank is not None:
                for call in self._open_calls():
                    call.fail(self._lost_failure(call))

    def ranks_failed(self, failed: Mapping[int, str]) -> None:
        """Somebody who runs the ranks says that these of the current generation have failed, and why."""
        with self._lock:
            for rank, why in sorted(failed.items()):
                if rank < self._membership.world_size:
                    self.member_lost(self._membership.member(rank), why)

    def heartbeat(self, member: str) -> None:
        """A member that is no actor lives."""
        with self._lock:
            self._heard_s[member] = self._awake_s

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

    @property
    def limits(self) -> Limits:
        with self._lock:
            return self._membership.limits

    @property
    def record(self) -> MembershipRecord:
        """What another ``Coordinator`` needs to go on with this group; see ``restore``."""
        with self._lock:
            return self._membership.record

    def restore(self, record: MembershipRecord) -> None:
        """Go on with the group of a coordinator that died: its ranks send again what they had sent to that one."""
        with self._lock:
            self._membership.restore(record)
            for member in self._membership.beating:
                self.heartbeat(member)

    # Calls.

    def contribute(
        self, call_id: CallId, rank: int, phase: str, message: bytes, *, again: bool = False
    ) -> Future[bytes]:
        """A rank's part of a phase; its answer, encoded, once all parts are there.

        ``again``: the rank has lost its coordinator during this call, so another one may have had all parts before.
        Raises ``StaleGenerationError`` for a call of an older generation; fails with ``CheckpointException``.
        """
        with self._lock:
            call = self._call(call_id, rank)
            self._fail_calls_left_by(rank, call_id)
            if again:
                call.started_over = True
            future = call.put(rank, phase, message)
            complete = call.begin_step(phase)
        if complete:
            self._execute(lambda: call.run(phase))
        return future

    def fail(self, call_id: CallId, failure: RankFailure) -> None:
        """A rank's own failure: the call fails for all."""
        with self._lock:
            self._call(call_id, failure.rank).fail([failure])

    def report_progress(
        self, call_id: CallId, rank: int, phase: str, mark: int, nbytes: int
    ) -> CheckpointException | None:
        """A rank is at work on a call. Returns how that has failed, if it has: the rank may stop working."""
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
            for call in self._open_calls():
                call.fail_overdue(limits)

    @property
    def attempts(self) -> tuple[frozenset[str], frozenset[str]]:
        """Those that still go on, and the latest of those that have failed and can never commit."""
        with self._lock:
            calls = list(self._calls.values())
            return frozenset(call.attempt for call in calls if call.attempt and not call.ended), frozenset(self._dead)

    def _call(self, call_id: CallId, rank: int) -> OpenCall:
        if call_id.generation != self._membership.generation:
            raise StaleGenerationError(
                group=self.name, generation=call_id.generation, current=self._membership.generation
            )
        for other, other_call in self._calls.items():
            same_number = (other.generation, other.number) == (call_id.generation, call_id.number)
            if same_number and other.kind != call_id.kind:
                other_call.fail([_kind_mismatch(rank, call_id.kind, other.kind)])
                return other_call
        if call_id not in self._calls and call_id.number < self._first_remembered:
            raise GroupError(f"{call_id.kind} #{call_id.number} has ended long ago", group=self.name)
        return self._calls[call_id] if call_id in self._calls else self._open(call_id)

    def _fail_calls_left_by(self, rank: int, call_id: CallId) -> None:
        """A rank that sends its part of a later save or load is done with the earlier ones.

        Such a call has failed on that rank, and a coordinator that has died since took the news along.
        """
        if call_id.kind == "barrier":  # which may be passed while a save goes on in the background
            return
        for earlier, call in self._calls.items():
            is_before = earlier.generation == call_id.generation and earlier.number < call_id.number
            if is_before and earlier.kind != "barrier" and call.waits_for(rank):
                message = f"rank {rank} has left this {earlier.kind} and gone on to a later {call_id.kind}"
                call.fail([RankFailure(rank, call.phase_now, "GroupError", message, "")])

    def _open(self, call_id: CallId) -> OpenCall:
        call = self._calls[call_id] = OpenCall(
            call_id,
            group=self.name,
            world_size=self._membership.world_size,
            lock=self._lock,
            clock=lambda: self._awake_s,
            on_end=self._call_ended,
        )
        if self._membership.lost:
            call.fail(self._lost_failure(call))
        ended = [one for one, known in self._calls.items() if known.ended]
        for old in ended[:-_REMEMBERED_ANSWERS]:
            self._calls[old].forget_parts()
        for old in ended[:-_REMEMBERED_CALLS]:
            del self._calls[old]
            if old.generation == call_id.generation:
                self._first_remembered = max(self._first_remembered, old.number + 1)
        return call

    def _call_ended(self, call: OpenCall) -> None:
        if call.attempt is not None and call.failed_for_good:
            self._dead.append(call.attempt)
        if call.attempt is not None and self._on_save_ended is not None:
            self._on_save_ended(call.checkpoint_id, committed=call.failure is None)

    def _open_calls(self) -> list[OpenCall]:
        return [call for call in self._calls.values() if not call.ended]

    def _lost_failure(self, call: OpenCall) -> list[RankFailure]:
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
                if call.ended:  # a step that is under way ends it, or the stall limit does
                    del self._calls[call_id]
        self._first_remembered = 0


def _kind_mismatch(rank: int, kind: str, others: str) -> RankFailure:
    message = f"rank {rank} calls {kind} while other ranks call {others}: all ranks must make the same calls in order"
    return RankFailure(rank, "collect", "GroupError", message, "")
