"""``RemoteCall``: a call of one rank of several, whose parts travel to a coordinator in another process.

A coordinator may die and start over in the middle of a call. It then knows the group, but nothing of the call: each
rank sends again all its parts so far, and goes on where it was, provided that the answers are the same as before.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

from ray_dcp.errors import CoordinatorLostError, GroupError
from ray_dcp.progress import Progress, working
from ray_dcp.protocol.call import phase
from ray_dcp.protocol.deputy import MAX_RESTARTS, Exchanged, HandedOver, Told
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import AnswerT, CallId, Carried, Exchange, Message, PartT, carry, decode, encode
from ray_dcp.protocol.node_agent import DeputyJob, StagedPart
from ray_dcp.protocol.turns import Turn
from ray_dcp.settings import Phase, memory_tier_from
from ray_dcp.staging.memory_tier import HeldFile, KeptSave
from ray_dcp.staging.peers.peer import PeerFile

DEPUTY_ENDS_IN_S = 5.0
"""How long memory is kept for a deputy that has to hear that its job is over: it is told so twice a second."""
_OF_STORES = ("AWS_", "GOOGLE_", "RAY_DCP_")


class Link(Protocol):
    """A rank's way to its coordinator, for one call."""

    def send(self, phase: Phase, message: bytes) -> bytes:
        """The coordinator's answer to this rank's part of a phase.

        Raises ``CoordinatorLostError`` when the coordinator has died, does not answer or has started over.
        """
        ...

    def tell(self, failure: RankFailure) -> None:
        """Deliver this rank's failure; raises what ``send`` raises."""
        ...

    def reconnect(self) -> None:
        """Return when there is a coordinator again; raises ``CoordinatorLostError`` when none comes in time."""
        ...


class Deputies(Protocol):
    """A rank's way to the agent of its node."""

    def ready(self, *, wait: bool) -> bool:
        """Whether it is up. It starts by this, if need be, and this may ``wait`` for it for a while."""
        ...

    def take(self, job: DeputyJob, *, wait: bool) -> Told | None:
        """Give ``job`` to it; None where there is none: not yet, unless this is to ``wait`` for it, or no more.

        What is returned says ``taken_back`` where nobody knows whether it has the job.
        """
        ...

    def told(self, job: DeputyJob, look: Callable[[], object]) -> Told | None:
        """How the job has ended, once it has; None where the agent is gone.

        Meanwhile ``look`` is called again and again; what it raises ends the wait and passes unchanged.
        """
        ...

    def held(self, place: str) -> Sequence[HeldFile]:
        """The files of the checkpoint at ``place`` that it has in memory; none where it does not answer at once."""
        ...

    def held_by_peers(self, place: str, keys: Collection[str]) -> Sequence[PeerFile]:
        """Those that the group's agents on other nodes have in memory; of none that does not answer at once.

        No more answers are waited for once there are all of ``keys``.
        """
        ...

    def kept_under(self, root: str) -> Sequence[KeptSave]:
        """What it has in memory of the saves below ``root``; nothing where it does not answer within seconds."""
        ...


def says_in_time(ask: Callable[[Callable[[], None]], object]) -> bool:
    """Whether ``ask`` returns anything but None within ``DEPUTY_ENDS_IN_S``; it calls its argument meanwhile."""
    deadline = time.monotonic() + DEPUTY_ENDS_IN_S

    def look() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        return ask(look) is not None
    except TimeoutError:
        return False


class RemoteCall:
    """One rank of several: parts travel to the coordinator as messages, over a ``Link``."""

    in_one_process: ClassVar[bool] = False

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        kind: str,
        checkpoint_id: str,
        link: Link,
        call_id: CallId | None = None,
        deputies: Deputies | None = None,
    ) -> None:
        """``call_id`` is what a deputy is to name this call, where there are ``deputies``."""
        self.rank = rank
        self.world_size = world_size
        self.number = call_id.number if call_id is not None else 0
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.failed = False
        self.progress = Progress()
        self.started_over = False
        self._is_behind = False
        """Whether the coordinator may be another one than the last that this rank has heard of."""
        self._link = link
        self._call_id = call_id
        self._deputies = deputies
        self.deputy_at_work = False
        self.replicas = 0
        self._deputy_is_lost = False
        self._exchanged: list[Exchanged] = []

    def exchange(self, exchange: Exchange[PartT, AnswerT], part: PartT) -> AnswerT:
        phase, message = exchange.phase, self._encoded(exchange.phase, part)
        working_on, self.progress.phase = self.progress.phase, None
        try:
            answer = self._send(phase, message)
        except GroupError as error:
            raise self._failed_with(error, phase) from error
        except CheckpointException as error:
            raise self.as_failed(error) from error.__cause__
        finally:
            self.progress.phase = working_on
        self._exchanged.append(Exchanged(str(phase), message, answer))
        return exchange.answer(decode(answer))

    def ready_deputy(self, *, wait: bool) -> bool:
        return self._deputies is not None and self._deputies.ready(wait=wait)

    def hand_over(self, part: StagedPart, *, wait: bool) -> DeputyJob | None:
        if self._deputies is None:
            return None
        assert self._call_id is not None, "a deputy is to name the call"
        save = f"{self._call_id.generation} {self._call_id.checkpoint_id}"
        job = DeputyJob(self.handed_over(self._call_id), part, variables_of_stores(os.environ), save, self.replicas)
        told = self._deputies.take(job, wait=wait)
        if told is None:
            return None
        self.deputy_at_work, self._deputy_is_lost = True, told.taken_back
        if told.failed and not told.taken_back:
            self.deputy_at_work = False
            self._raise_told(told, Phase.WRITE)
        return job

    def handed_over(self, call_id: CallId) -> HandedOver:
        """What a deputy must know to take this rank's part of the call from here on."""
        return HandedOver(pickle.dumps(call_id), self.rank, tuple(self._exchanged))

    def await_deputy(
        self, exchange: Exchange[PartT, AnswerT], job: DeputyJob, turn: Turn | None = None
    ) -> AnswerT | None:
        assert self._deputies is not None, "whoever has a job has given it to a deputy"
        told = None
        if not self._deputy_is_lost:
            with working(self.progress, Phase.WRITE):  # so that it is told when the call fails elsewhere
                told = self._deputies.told(job, self.progress.advance)
        self.deputy_at_work = told is None
        if told is None or told.taken_back:
            self.take_back()
            return None
        return self.deputys_answer(exchange, told)

    def deputy_is_done(self, job: DeputyJob) -> bool:
        deputies = self._deputies
        if deputies is None or self._deputy_is_lost:
            return False
        return says_in_time(lambda look: deputies.told(job, look))

    def take_back(self) -> None:
        """Go on without the deputy: nobody here knows how far it had come, and with which coordinator.

        That one may have been told of all that was sent before, and have come to another result.
        """
        self.started_over = self._is_behind = True

    def deputys_answer(self, exchange: Exchange[PartT, AnswerT], told: Told) -> AnswerT:
        """The answer that this rank's deputy has been told. Raises what it has been told of a failure."""
        self.started_over |= told.started_over
        if told.failed:
            self._raise_told(told, exchange.phase)
        return exchange.answer(decode(told.answer))

    def _raise_told(self, told: Told, phase: Phase) -> NoReturn:
        error = pickle.loads(told.failure)
        if isinstance(error, CheckpointException):
            raise self.as_failed(error) from error.__cause__
        raise self._failed_with(error, phase) from error

    def _failed_with(self, error: Exception, phase: Phase) -> CheckpointException:
        self.failed = True
        rank = COORDINATOR if isinstance(error, CoordinatorLostError) else self.rank
        failure = RankFailure.from_exception(error, rank=rank, phase=phase)
        return CheckpointException(self.kind, self.checkpoint_id, [failure])

    def as_failed(self, error: CheckpointException) -> CheckpointException:
        """``error``, with which this call has failed elsewhere, for whoever is at work here."""
        self.failed = True
        if error.checkpoint_id:
            return error
        # The call failed before its coordinator knew what it is about.
        return CheckpointException(self.kind, self.checkpoint_id, error.rank_failures)

    def _encoded(self, name: Phase, part: Message) -> bytes:
        """``part`` as bytes. One that cannot be pickled fails the call: others would wait for it in vain."""
        with phase(self, name):
            return encode(part)

    def _send(self, phase: Phase, message: bytes) -> bytes:
        """The answer, from this coordinator or, when it dies, from the next one."""
        if self._is_behind:
            self._is_behind = False
            self._catch_up()
        for _ in range(MAX_RESTARTS):
            try:
                return self._link.send(phase, message)
            except CoordinatorLostError:
                self._catch_up()
        try:
            return self._link.send(phase, message)
        except CoordinatorLostError as error:
            # It may be only the way there that fails: then the others are with one that lives, and wait for this rank.
            self.report(RankFailure.from_exception(error, rank=COORDINATOR, phase=phase))
            raise

    def _catch_up(self) -> None:
        """Send to a coordinator that starts over what its predecessor had; the answers must be those it gave."""
        self.started_over = True
        self._link.reconnect()
        for earlier in self._exchanged:
            try:
                answer = self._link.send(Phase(earlier.phase), earlier.message)
            except CoordinatorLostError:
                return  # it died once more; whoever sends next finds out
            if answer != earlier.answer and decode(answer) != decode(earlier.answer):
                lost = CoordinatorLostError(
                    f"its successor came to another result in {earlier.phase!r}, so what the ranks have done since "
                    "is of no use",
                    group=self.kind,
                )
                self._link.tell(RankFailure.from_exception(lost, rank=COORDINATOR, phase=earlier.phase))
                raise lost

    def report(self, failure: RankFailure) -> None:
        try:
            self._tell(failure)
        except GroupError:
            # Nobody waits for this rank any more; the failure itself is raised here.
            return

    def _tell(self, failure: RankFailure) -> None:
        """Deliver a failure: to the next coordinator where this one dies, since others may wait there for this rank."""
        for _ in range(MAX_RESTARTS):
            try:
                self._link.tell(failure)
            except CoordinatorLostError:
                self._link.reconnect()
            else:
                return

    def held_nearby(self, place: str) -> Sequence[HeldFile]:
        return () if self._deputies is None else self._deputies.held(place)

    def held_by_peers(self, place: str, keys: Collection[str]) -> Sequence[PeerFile]:
        return () if self._deputies is None else self._deputies.held_by_peers(place, keys)

    def kept_nearby(self, root: str) -> Sequence[KeptSave]:
        return () if self._deputies is None else self._deputies.kept_under(root)

    @property
    def why_not_kept(self) -> str:
        if self._deputies is None:
            return f"rank {self.rank} has no agent on its node (RAY_DCP_AGENTS=0)"
        if not memory_tier_from(os.environ):
            return f"the agent of rank {self.rank} is to keep nothing in memory (RAY_DCP_MEMORY_TIER=0)"
        return ""

    def carry(self, *user_objects: Any) -> Carried | None:
        return carry(*user_objects)


def variables_of_stores(variables: Mapping[str, str]) -> dict[str, str]:
    """Those environment variables by which stores are opened: a deputy is to open them as this process would."""
    return {name: value for name, value in variables.items() if name.startswith(_OF_STORES)}
