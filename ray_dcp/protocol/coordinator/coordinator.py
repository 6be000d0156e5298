"""``Coordinator``: membership and the rounds of saves and loads of one group, as a plain object.

Ranks pull: each sends its part of a phase and awaits its own answer, a ``concurrent.futures.Future``. The last part to
arrive starts the coordinator's step. The first failure of a call (a rank's own report, a lost rank, a step that
raises, a limit that is over) resolves every waiting future, and all later ones of that call, with one
``CheckpointException``.

A rank may hand over its part of a save to a deputy, a process that lives longer: the rank's death then fails the save
only if the deputy is gone, too. Saves are committed in their order.

No Ray and no event loop in here: the actor around it only awaits these futures and calls ``check_limits`` now and then.
Methods may be called from several threads; steps run through ``execute`` (in place by default, so that tests drive any
interleaving in one thread).
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ray_dcp.errors import GroupError, RankLostError, StaleGenerationError
from ray_dcp.protocol.coordinator.calls import Calls, CallsRecord
from ray_dcp.protocol.coordinator.membership import JoinRequest, Membership, MembershipRecord
from ray_dcp.protocol.coordinator.older_generation import OlderGeneration
from ray_dcp.protocol.coordinator.open_call import OpenCall
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import CallId
from ray_dcp.settings import Limits, Phase

Execute = Callable[[Callable[[], None]], object]

CHECK_INTERVAL_S = 0.25
"""How often ``check_limits`` is to be called."""
_REMEMBERED_ATTEMPTS = 1024
"""How many failed attempts are remembered: ranks that were killed may have left files of them."""
_REMEMBERED_GENERATIONS = 2
"""Of how many older generations it is remembered how their last saves ended."""


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
        self._older: list[OlderGeneration] = []
        """Older generations of which saves go on, or the last ones did."""
        self._ending: list[OpenCall] = []
        """Other calls of older generations, with a step that is under way."""
        self._ready: list[tuple[OpenCall, Phase]] = []
        """Steps that have begun and are to be carried out once the lock is free."""
        self._gone_deputies: dict[str, str] = {}
        """Deputies that are gone, and why."""
        self._dead: deque[str] = deque(maxlen=_REMEMBERED_ATTEMPTS)
        self._heard_s: dict[str, float] = {}
        """When each member that is not an actor was last heard of, by ``_awake_s``."""

    # Membership.

    def join(self, request: JoinRequest) -> Future[int]:
        """A future of the generation that begins when all ``request.world_size`` ranks are in; the older one ends."""
        with self._locked():
            before = self._membership.record
            future = self._membership.join(request)
            self.heartbeat(request.member)
            if self._membership.generation != before.generation:
                self._end_calls(before)
        return future

    def withdraw(self, request: JoinRequest) -> list[int]:
        """Take back a join that waited too long; returns the ranks it waited for."""
        with self._lock:
            return self._membership.withdraw(request)

    def member_lost(self, member: str, why: str) -> None:
        """Note that a process died: its generation can start no more calls, and open ones fail.

        Those of which it has handed over its part go on as long as its deputy lives.
        """
        with self._locked():
            if self._membership.lose(member, why) is not None:
                self.keep_record()
                for call in [one for one in self._calls if not one.ended]:
                    self._fail_if_lost(call)
            for older in self._older:
                if older.lose(member, why):
                    for call in older.open_saves:
                        self._fail_if_lost(call)

    def deputy_lost(self, deputy: str, why: str) -> None:
        """Note that a deputy is gone: ranks that live take their parts again, calls fail where a rank is gone, too."""
        with self._locked():
            self._gone_deputies[deputy] = why
            for forgotten in list(self._gone_deputies)[:-_REMEMBERED_ATTEMPTS]:
                del self._gone_deputies[forgotten]
            for call in self._open_calls():
                call.take_back(deputy, why)
                self._fail_if_lost(call)

    def has_part_with(self, deputy: str) -> bool:
        """Whether it matters if this deputy lives."""
        with self._lock:
            return any(deputy in call.deputies for call in self._open_calls())

    def ranks_failed(self, failed: Mapping[int, str]) -> None:
        """Note that these ranks of the current generation have failed, and why, as whoever runs them says."""
        with self._locked():
            for rank, why in sorted(failed.items()):
                if rank < self._membership.world_size:
                    self.member_lost(self._membership.member(rank), why)

    def heartbeat(self, member: str) -> None:
        """Note that ``member`` lives; an actor need not say so."""
        with self._lock:
            self._heard_s[member] = self._awake_s

    def leave(self, generation: int, rank: int) -> None:
        """Note that rank ``rank`` has closed its group; calls that still need it fail."""
        with self._locked():
            if generation == self._membership.generation:
                self.member_lost(self._membership.member(rank), "closed its group")
            for older in self._older:
                for member in [one for one, its in older.members.items() if (older.number, its) == (generation, rank)]:
                    self.member_lost(member, "closed its group")

    def knows(self, member: str) -> bool:
        """Whether the process counts for anything: it is in the current generation, waits for the next, or its deputy
        still has its part of a save of an older one.
        """
        with self._lock:
            return self._membership.knows(member) or any(older.knows(member) for older in self._older)

    @property
    def num_members(self) -> int:
        """The number of live ranks of the current generation and of ranks that wait to join."""
        with self._lock:
            return self._membership.num_live

    @property
    def is_needed(self) -> bool:
        """Whether there is a member, or a save with which deputies go on."""
        with self._lock:
            return self.num_members > 0 or any(call.deputies for call in self._open_calls())

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
        with self._locked():
            call = self._call(call_id, rank, again=again)
            if call.generation == self._membership.generation:
                self._calls.part_sent(call_id, rank, phase)
            future = call.put(rank, phase, message)
            if call.is_save and phase == Phase.WRITE:
                self._begin_next_commit()
            elif call.begin_step(phase):
                self._ready.append((call, phase))
        return future

    def hand_over(self, call_id: CallId, rank: int, deputy: str) -> CheckpointException | None:
        """Note that from now on ``deputy`` takes this rank's part of a save. Returns how that has failed, if it has.

        A deputy says so again to a coordinator that starts over, and then sends what the rank had sent; of several
        saves of a rank it announces the earlier ones first. Raises what ``contribute`` raises, and ``GroupError`` where
        the deputy was called gone before: its rank no longer counts on it.
        """
        if call_id.kind != "save":
            raise GroupError(f"a {call_id.kind} cannot be handed over", group=self.name)
        with self._locked():
            if deputy in self._gone_deputies:
                raise GroupError(f"{deputy} is no deputy any more: {self._gone_deputies[deputy]}", group=self.name)
            if call_id.generation == self._membership.generation:
                self._calls.note_hand_over()
            call = self._call(call_id, rank, is_planned=True)
            call.hand_over(rank, deputy)
            return call.failure

    def hand_back(self, call_id: CallId, rank: int, deputy: str, why: str) -> None:
        """Note that ``deputy`` cannot go on with this rank's part: the rank, if it lives, does."""
        with self._locked():
            call = self._call(call_id, rank)
            call.take_back(deputy, why, rank)
            self._fail_if_lost(call)

    def fail(self, call_id: CallId, rank: int, failure: RankFailure) -> None:
        """Fail a call for all ranks, with what this rank has failed with or has seen fail."""
        with self._locked():
            is_planned = call_id.kind == "save" and failure.phase in (Phase.STAGE, Phase.WRITE)
            self._call(call_id, rank, own=failure, is_planned=is_planned).fail([failure])

    def report_progress(
        self, call_id: CallId, rank: int, phase: Phase, mark: int, nbytes: int
    ) -> CheckpointException | None:
        """Note how far a rank is in a call. Returns how that has failed, if it has: the rank may stop working."""
        with self._locked():
            call = self._call(call_id, rank, is_planned=phase in (Phase.STAGE, Phase.WRITE))
            if not call.has_deputy(rank):  # whose signs count; the rank only wants to know how it goes
                call.see(rank, phase, mark=mark, nbytes=nbytes)
            return call.failure

    def deputy_progress(
        self, call_id: CallId, rank: int, deputy: str, mark: int, nbytes: int
    ) -> CheckpointException | None:
        """As ``report_progress``, for a rank's deputy; it also announces the deputy, as ``hand_over`` does."""
        with self._locked():
            self.hand_over(call_id, rank, deputy)
            call = self._call(call_id, rank, is_planned=True)
            call.see(rank, Phase.WRITE, mark=mark, nbytes=nbytes)
            return call.failure

    def check_limits(self) -> None:
        """Fail the calls, and lose the members, whose time is over.

        Time in which this was not called does not count: then the coordinator itself stood still, and nobody could
        have been heard.
        """
        with self._locked():
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
            self._calls.fail_left()
            is_held_up = False
            for call in self._open_calls():
                self._fail_if_lost(call)
                call.fail_overdue(limits, is_held_up=is_held_up and call.is_save)
                is_held_up |= call.is_save and not call.ended

    @property
    def attempts(self) -> tuple[frozenset[str], frozenset[str]]:
        """The attempts that still go on, and the latest of those that have failed and can never commit."""
        with self._lock:
            return frozenset(call.attempt for call in self._open_calls() if call.attempt), frozenset(self._dead)

    def _call(
        self,
        call_id: CallId,
        rank: int,
        own: RankFailure | None = None,
        *,
        again: bool = False,
        is_planned: bool = False,
    ) -> OpenCall:
        """The call that this rank calls so, failed where it needs a rank that is lost.

        ``is_planned``: the rank has the answer to its plan, so where there is no part of it, an earlier coordinator
        has had them.
        """
        if call_id.generation == self._membership.generation and self._membership.world_size:
            call = self._calls.of(call_id, rank, own)
        else:
            found = [older.find(call_id, rank) for older in self._older if older.number == call_id.generation]
            if not found or found[0] is None:
                raise StaleGenerationError(
                    group=self.name, generation=call_id.generation, current=self._membership.generation
                )
            call = found[0]
        call.started_over |= again or (is_planned and not call.has_parts)
        self._fail_if_lost(call)
        return call

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock in the block, and then carry out the steps that have begun there."""
        with self._lock:
            yield
            ready, self._ready = self._ready, []
        for call, phase in ready:
            self._execute(functools.partial(self._run, call, phase))

    def _run(self, call: OpenCall, phase: Phase) -> None:
        call.run(phase)
        with self._locked():
            pass  # steps that could begin by its end are carried out

    def _begin_next_commit(self) -> None:
        """Begin the commit of the first save that goes on, if its parts are there: none overtakes an earlier one."""
        first = next((call for older in self._older for call in older.open_saves), None)
        first = first or next(iter(self._calls.open_saves), None)
        if first is not None and first.begin_step(Phase.WRITE):
            self._ready.append((first, Phase.WRITE))

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
        self._begin_next_commit()

    def _open_calls(self) -> list[OpenCall]:
        """All calls that are not over; the saves among them that deputies may have are in their order."""
        older = [call for one in self._older for call in one.open_saves]
        saves = self._calls.open_saves
        others = [call for call in (*self._calls, *self._ending) if not call.ended and call not in saves]
        return [*older, *saves, *others]

    def _fail_if_lost(self, call: OpenCall) -> None:
        """Fail a call that needs a part of a rank which is gone, and has no deputy or one that is gone, too."""
        is_current = call.generation == self._membership.generation
        older = (one.lost for one in self._older if one.number == call.generation)
        lost = self._membership.lost if is_current else next(older, {})
        failures = []
        for rank, why in sorted(lost.items()):
            of_deputy = call.without_deputy(rank)
            if of_deputy is not None and not (is_current and self._calls.may_be_announced(call, rank)):
                error = RankLostError(group=self.name, lost={rank: why + of_deputy})
                failures.append(RankFailure(rank, str(call.phase_now), "RankLostError", why + of_deputy, "", error))
        if failures:
            call.fail(failures)

    def _end_calls(self, before: MembershipRecord) -> None:
        """End the calls of a generation that is over; a step under way ends its own, or the stall limit does.

        Saves that need no rank any more go on.
        """
        calls, self._calls = self._calls, self._no_calls()
        going_on = [call for call in calls.open_saves if call.goes_on_without_ranks]
        self._older = [one for one in self._older if one.open_saves] + self._older[-_REMEMBERED_GENERATIONS:]
        self._older = sorted({one.number: one for one in self._older}.values(), key=lambda one: one.number)
        if going_on:
            self._older.append(OlderGeneration.of(before, calls, going_on))
        self._ending = [call for call in (*self._ending, *calls) if not call.ended and call not in going_on]
        stale = StaleGenerationError(group=self.name, generation=before.generation, current=self._membership.generation)
        for call in self._ending:
            call.fail([RankFailure.from_exception(stale, rank=COORDINATOR, phase=call.phase_now)])
