"""``OpenCall``: one save, load or barrier at the coordinator, from the first part that arrives to how it ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ray_dcp.errors import CoordinatorLostError, GroupError, RankAbsentError, StalledError, without_keys
from ray_dcp.gc_pause import collector_paused
from ray_dcp.progress import Progress, working
from ray_dcp.protocol.coordinator.membership import resolve
from ray_dcp.protocol.coordinator.small_sessions import SESSIONS
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import CallId, Message, decode, encode
from ray_dcp.settings import Limits, Phase

logger = logging.getLogger(__name__)

ANNOUNCE_S = 15.0
"""How long a coordinator that starts over waits for the deputy of a rank that is not there, if there may be one."""
SAY_EVERY_S = 30.0
"""How often a call that takes long says whom it waits for."""
_MAX_NAMED_RANKS = 8


def coordinator_phase(kind: str, phase: Phase) -> Phase:
    """The phase in which the coordinator is when all parts of ``phase`` are there."""
    return Phase.COMMIT if (kind, phase) == ("save", Phase.WRITE) else phase


@dataclass(slots=True)
class _SentPart:
    """What a rank sent for a phase, and the futures of its answer: several where it was sent again."""

    message: bytes
    waiting: list[Future[bytes]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was last seen of a rank, and since when it has not changed."""

    phase: Phase
    mark: int
    nbytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class _Deputy:
    """Who has a rank's part of a call; ``gone`` says why that has ended, empty where it has not."""

    name: str
    gone: str = ""


class OpenCall:
    """The parts of a call's phases as they arrive, how far each rank is, and how it ended."""

    def __init__(
        self,
        call_id: CallId,
        *,
        group: str,
        world_size: int,
        lock: threading.RLock,
        clock: Callable[[], float],
        on_end: Callable[[OpenCall], None] = lambda call: None,
    ) -> None:
        self._id = call_id
        self._group = group
        self._world_size = world_size
        self._lock = lock
        self._clock = clock
        self._on_end = on_end
        self._opened_s = self._said_s = clock()
        self._session = SESSIONS[call_id.kind]()
        self._phase_now = self._session.first_phase
        self._parts: dict[Phase, dict[int, _SentPart]] = {}
        self._answers: dict[Phase, Sequence[bytes]] = {}
        self._seen: dict[int, _Seen] = {}
        self._deputies: dict[int, _Deputy] = {}
        """By rank, who takes its part, of the ranks that have handed over."""
        self._step: _Seen | None = None
        """How far the coordinator's own step is, while it runs."""
        self._step_progress = Progress()
        self._failed_while_stepping: list[RankFailure] = []
        self.started_over = False
        """Whether its ranks had another coordinator for it before."""
        self.failure: CheckpointException | None = None
        self.ended = False

    @property
    def phase_now(self) -> Phase:
        """The phase that is being waited for or carried out."""
        return self._phase_now

    @property
    def is_save(self) -> bool:
        return self._id.kind == "save"

    @property
    def generation(self) -> int:
        return self._id.generation

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint id; until the first phase is complete as the first rank named it, which may be empty."""
        return self._session.checkpoint_id or self._id.checkpoint_id

    @property
    def attempt(self) -> str | None:
        """The attempt at a checkpoint that a save makes; None before its plan, and for everything else."""
        return self._session.attempt

    @property
    def failed_for_good(self) -> bool:
        """Whether the call has failed and certainly nothing of it is committed, here or by a coordinator before."""
        return self.failure is not None and not self.started_over and not self._session.may_have_committed

    def put(self, rank: int, phase: Phase, message: bytes) -> Future[bytes]:
        """Take a rank's part; returns a future of the answer. A part that comes again gets the same as before."""
        future: Future[bytes] = Future()
        if self.failure is not None:
            future.set_exception(self.failure)
        elif phase in self._answers:
            future.set_result(self._answers[phase][rank])
        elif self.ended:
            raise GroupError("this call has ended, and its answers are forgotten", group=self._group)
        elif phase != self._phase_now:
            # Only a coordinator that started over in the middle of the call has not seen what comes before.
            raise CoordinatorLostError(f"it has no part before {phase!r} of this call", group=self._group)
        else:
            self._take(rank, phase, message, future)
        return future

    def _take(self, rank: int, phase: Phase, message: bytes, future: Future[bytes]) -> None:
        part = self._parts.setdefault(phase, {}).setdefault(rank, _SentPart(message, []))
        if part.message != message:
            raise GroupError(f"rank {rank} sent two different parts of {phase!r}", group=self._group)
        part.waiting.append(future)
        self.see(rank, phase, mark=-1, nbytes=0)

    def see(self, rank: int, phase: Phase, *, mark: int, nbytes: int) -> None:
        """Note that a rank works on this call and has come as far as ``mark``."""
        before = self._seen.get(rank)
        if before is None or (before.phase, before.mark) != (phase, mark):
            self._seen[rank] = _Seen(phase, mark, nbytes, self._clock())

    @property
    def open_s(self) -> float:
        """How many seconds ago its first rank came."""
        return self._clock() - self._opened_s

    @property
    def has_parts(self) -> bool:
        """Whether any rank has sent a part."""
        return bool(self._parts)

    def waits_for(self, rank: int) -> bool:
        """Whether the call goes on and this rank has not sent its part of the phase."""
        return not self.ended and rank not in self._parts.get(self._phase_now, {})

    def hand_over(self, rank: int, deputy: str) -> None:
        """Note that ``deputy`` takes this rank's part from now on. To hear of it again is no sign of progress."""
        if self._deputies.get(rank) != _Deputy(deputy):
            self._deputies[rank] = _Deputy(deputy)
            self.see(rank, Phase.WRITE, mark=-3, nbytes=0)

    def take_back(self, deputy: str, why: str, rank: int | None = None) -> None:
        """Note that ``deputy`` takes no rank's part any more, or not that of ``rank``: a live rank takes it again."""
        for one, having in self._deputies.items():
            if having == _Deputy(deputy) and rank in (None, one):
                self._deputies[one] = _Deputy(deputy, why)
                self.see(one, Phase.WRITE, mark=-4, nbytes=0)

    @property
    def deputies(self) -> frozenset[str]:
        """Who takes parts of this call in place of its ranks."""
        return frozenset(having.name for having in self._deputies.values() if not having.gone)

    def without_deputy(self, rank: int) -> str | None:
        """What is to be said of a rank's deputy where the rank is lost; None where it has one, which goes on."""
        having = self._deputies.get(rank)
        if having is None:
            return ""
        return f"; {having.name}, which had taken over its part, is gone, too: {having.gone}" if having.gone else None

    def has_deputy(self, rank: int) -> bool:
        """Whether somebody takes this rank's part in its place at the moment."""
        return self.without_deputy(rank) is None

    def has_handed_over(self, rank: int) -> bool:
        """Whether this rank has ever handed over its part of this call."""
        return rank in self._deputies

    def may_be_announced(self, rank: int) -> bool:
        """Whether a rank may have a deputy that the coordinator before this one knew.

        What is heard of the rank itself says nothing: its messages from before may come late.
        """
        is_open = self.is_save and self.started_over and self.open_s <= ANNOUNCE_S
        return is_open and rank not in self._deputies

    @property
    def goes_on_without_ranks(self) -> bool:
        """Whether all that this save waits for are deputies, or the coordinator itself."""
        if self.ended or not self._deputies or self._failed_while_stepping:
            return False
        sent = self._parts.get(Phase.WRITE, {}) if self._phase_now == Phase.WRITE else {}
        return all(rank in sent or self.without_deputy(rank) is None for rank in range(self._world_size))

    @property
    def waits_for_ranks(self) -> list[int]:
        """The ranks whose parts of the phase are not there."""
        return [rank for rank in range(self._world_size) if self.waits_for(rank)]

    def begin_step(self, phase: Phase) -> bool:
        """Begin the coordinator's step if all parts are there, and say whether: from then on it alone decides.

        A rank that dies during a commit has sent its results already. Failing the call for it while ``.metadata``
        may be on its way would tell ranks that a checkpoint is absent which then turns out to be there.
        """
        begins = (
            not self.ended
            and self._step is None
            and phase == self._phase_now
            and len(self._parts.get(phase, {})) == self._world_size
        )
        if begins:
            self._step_progress = Progress()
            self._step = _Seen(coordinator_phase(self._id.kind, phase), 0, 0, self._clock())
        return begins

    def run(self, phase: Phase) -> None:
        """Carry out the coordinator's step of a complete phase and answer every rank, or fail the call."""
        parts = [self._parts[phase][rank] for rank in range(self._world_size)]
        name = coordinator_phase(self._id.kind, phase)
        try:
            with working(self._step_progress, name), collector_paused():
                answers = self._session.step(phase, [decode(part.message) for part in parts])
                encoded = _encode_each(answers)
        except BaseException as error:  # noqa: BLE001 - whatever a user's planner raises, the ranks wait for it
            self._end_step([RankFailure.from_exception(error, rank=COORDINATOR, phase=name)])
            return
        with self._lock:
            if not self.ended:
                self._answer(phase, parts, encoded)
            self._end_step([])

    def _answer(self, phase: Phase, parts: Sequence[_SentPart], encoded: Sequence[bytes]) -> None:
        following = self._session.next_phase(phase)
        self._phase_now = following or phase
        self._answers[phase] = encoded
        for rank, (part, answer) in enumerate(zip(parts, encoded, strict=True)):
            self.see(rank, self._phase_now, mark=-2, nbytes=0)
            for future in part.waiting:
                resolve(future, answer)
        if following is None:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._on_end(self)

    def _end_step(self, failures: list[RankFailure]) -> None:
        with self._lock:
            self._step = None
            later = failures or self._failed_while_stepping
            if later:
                self.fail(later)

    def fail(self, failures: list[RankFailure]) -> None:
        """Fail for all. The first failure wins, later ones change nothing; none interrupts the coordinator's step."""
        with self._lock:
            if self._step is not None:
                self._failed_while_stepping = self._failed_while_stepping or failures
            elif self.failure is None and not self.ended:
                self.failure = CheckpointException(self._id.kind, self.checkpoint_id, failures)
                self._session.give_up()
                self._end()
                for parts in self._parts.values():
                    for future in (future for part in parts.values() for future in part.waiting):
                        if not future.done():
                            future.set_exception(self.failure)

    def restore_failure(self, failure: CheckpointException) -> None:
        """Take over ``failure``, with which the call has failed at an earlier coordinator."""
        self.failure = failure
        self.started_over = self.ended = True

    def forget_parts(self) -> None:
        """Keep of an ended call only how it ended."""
        self._parts.clear()
        self._answers.clear()

    def fail_overdue(self, limits: Limits, *, is_held_up: bool = False) -> None:
        """Fail the call where a rank, or the coordinator's own step, has stood still for longer than allowed.

        ``is_held_up``: an earlier save goes on, and until that has ended nobody need write this one.
        """
        if self.ended:
            return
        if self._step is not None:
            self._fail_overdue_step(self._step, limits)
            return
        arrived = self._parts.get(self._phase_now, {})
        waited_for = self.waits_for_ranks
        for rank in waited_for:
            if is_held_up and (rank in self._deputies or self._phase_now == Phase.WRITE):
                self._seen[rank] = replace(self._seen[rank], since_s=self._clock())
        overdue = [self._overdue(rank, limits) for rank in waited_for]
        failures = [failure for failure in overdue if failure is not None]
        if failures:
            self.fail(failures)
        elif arrived and self._clock() - self._said_s >= SAY_EVERY_S:
            self._said_s = self._clock()
            logger.warning("%s", self._waiting_text(waited_for))

    def _waiting_text(self, waited_for: Sequence[int]) -> str:
        """A message for whoever wonders why a save takes so long."""
        texts = []
        for rank in waited_for[:_MAX_NAMED_RANKS]:
            seen = self._seen.get(rank)
            moved = f", {seen.nbytes / 2**20:.0f} MiB so far" if seen is not None and seen.nbytes else ""
            doing = "has not come yet" if seen is None else f"is in phase {seen.phase!r}{moved}"
            quiet = "" if seen is None else f", no progress for {self._clock() - seen.since_s:.0f} s"
            texts.append(f"rank {rank} {doing}{quiet}")
        if not waited_for:
            texts.append("an earlier save of the group is to be committed first")
        more = len(waited_for) - len(texts)
        return (
            f"{self._id.kind} of {without_keys(self.checkpoint_id) or 'a checkpoint'} in group {self._group!r} has "
            f"taken {self._clock() - self._opened_s:.0f} s; waiting for {len(waited_for)} of {self._world_size} ranks: "
            f"{'; '.join(texts)}{f'; and {more} more' if more else ''}"
        )

    def _overdue(self, rank: int, limits: Limits) -> RankFailure | None:
        seen, now = self._seen.get(rank), self._clock()
        if seen is None:
            if now - self._opened_s <= limits.arrival_timeout_s:
                return None
            absent = RankAbsentError(
                group=self._group, rank=rank, kind=self._id.kind, waited_s=round(now - self._opened_s, 1)
            )
            return RankFailure.from_exception(absent, rank=rank, phase=Phase.COLLECT)
        if now - seen.since_s <= limits.stall_limit_s(seen.phase):
            return None
        return self._stalled(rank, seen)

    def _stalled(self, rank: int, seen: _Seen) -> RankFailure:
        stalled = StalledError(
            group=self._group,
            rank=rank,
            phase=str(seen.phase),
            stalled_s=round(self._clock() - seen.since_s, 1),
            nbytes=seen.nbytes,
        )
        return RankFailure.from_exception(stalled, rank=rank, phase=seen.phase)

    def _fail_overdue_step(self, step: _Seen, limits: Limits) -> None:
        progress = self._step_progress
        if progress.mark != step.mark:
            self._step = _Seen(step.phase, progress.mark, progress.nbytes, self._clock())
        elif self._clock() - step.since_s > limits.stall_limit_s(step.phase):
            # The step may wake up later: it must not commit what the ranks were told is lost.
            self._session.give_up()
            self._step = None
            self.fail([self._stalled(COORDINATOR, step)])


def _encode_each(answers: Sequence[Message]) -> list[bytes]:
    """Every answer encoded; one that goes to all ranks is encoded once."""
    encoded: dict[int, bytes] = {}
    for answer in answers:
        if id(answer) not in encoded:
            encoded[id(answer)] = encode(answer)
    return [encoded[id(answer)] for answer in answers]
