"""A process alone, as a group of one: both halves of every call run in it, and no Ray is needed.

Nothing is pickled, but for an asynchronous save whose file a child of the process writes (``child``).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, cast

from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from ray_dcp.gc_pause import collector_paused
from ray_dcp.maintenance.sweep.after_save import SweepAfterSave
from ray_dcp.progress import Progress, working
from ray_dcp.protocol.child.child_messages import WriteFailed
from ray_dcp.protocol.child.process_link import WriterProcess, Writing
from ray_dcp.protocol.coordinator.coordinator import SaveEnded
from ray_dcp.protocol.coordinator.open_call import coordinator_phase
from ray_dcp.protocol.coordinator.small_sessions import SESSIONS
from ray_dcp.protocol.deputy import Exchanged, HandedOver, SealedPart
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import (
    AnswerT,
    CarriedInPlace,
    Exchange,
    Message,
    PartT,
    SavePart,
    carry,
    decode,
    encode,
)
from ray_dcp.protocol.node_agent import DeputyJob, StagedPart
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.protocol.rank.remote_call import says_in_time, variables_of_stores
from ray_dcp.protocol.turns import Turn
from ray_dcp.settings import Phase, agents_from
from ray_dcp.store.open import opened_alike_elsewhere


class SoloGroup:
    """What ``cluster.group.RankGroup`` is for several ranks, with a sweep of its own behind each save."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.background = BackgroundSaves()
        self.writer_process: WriterProcess | None = WriterProcess()
        """The child that writes asynchronous saves; None: a thread of this process does."""
        self.sweep = SweepAfterSave(lambda: (frozenset(), frozenset()))

    def start_call(self, kind: str, checkpoint_id: str = "") -> SoloCall:
        """The only rank's end of its next save, load or look-up."""
        writers = self.writer_process if agents_from(os.environ) else None
        return SoloCall(kind, checkpoint_id, on_save_ended=self.sweep.save_ended, writers=writers)


class SoloCall:
    """The only rank of a call. ``on_save_ended`` is told as a ``Coordinator``'s is."""

    in_one_process: ClassVar[bool] = True
    number = 0

    def __init__(
        self,
        kind: str,
        checkpoint_id: str,
        *,
        on_save_ended: SaveEnded | None = None,
        writers: WriterProcess | None = None,
    ) -> None:
        """``writers`` may write what is staged."""
        self.rank = 0
        self.world_size = 1
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.failed = False
        self.started_over = False
        self.replicas = 0
        self.progress = Progress()
        self._on_save_ended = on_save_ended
        self._session = SESSIONS[kind]()
        self._writers = writers
        self._writing: Writing | None = None
        self.deputy_at_work = False
        self._planned: tuple[SavePart, Message] | None = None

    def exchange(self, exchange: Exchange[PartT, AnswerT], part: PartT) -> AnswerT:
        phase = exchange.phase
        try:
            answer = exchange.answer(self._step(phase, part))
        except (Exception, TorchCheckpointException) as error:
            failure = RankFailure.from_exception(error, rank=COORDINATOR, phase=coordinator_phase(self.kind, phase))
            self.failed = True
            self._tell_ended(committed=False)
            raise CheckpointException(self.kind, self.checkpoint_id, [failure]) from error
        if self._writers is not None and isinstance(part, SavePart):
            self._planned = part, answer
        if self._session.next_phase(phase) is None:
            self._tell_ended(committed=True)
        return answer

    def _step(self, phase: Phase, part: Message) -> Any:
        with collector_paused():
            (answer,) = self._session.step(phase, [part])
        return answer

    def _tell_ended(self, *, committed: bool) -> None:
        if self._writing is not None:
            self._writing.over()
        if self._session.attempt is not None and self._on_save_ended is not None:
            self._on_save_ended(self._session.checkpoint_id, committed=committed)

    def report(self, failure: RankFailure) -> None:
        """Note that the call has failed: there is nobody else to tell."""
        self._tell_ended(committed=False)

    def ready_deputy(self, *, wait: bool) -> bool:
        return self._writers is not None and self._writers.ready(wait=wait)

    def hand_over(self, part: StagedPart, *, wait: bool) -> DeputyJob | None:
        if self._writers is None or (part.file is not None and not opened_alike_elsewhere(part.file.place)):
            return None
        handed = self._handed_over()
        if handed is None:
            return None
        job = DeputyJob(handed, part, variables_of_stores(os.environ))
        self._writing = self._writers.take(job, wait=wait)
        self.deputy_at_work = self._writing is not None
        return job if self._writing is not None else None

    def _handed_over(self) -> HandedOver | None:
        """What somebody who is to commit in this process's place must know; None where that cannot be told."""
        if self._planned is None:
            return None
        part, answer = self._planned
        carried = part.carried and carry(*part.carried.unpack())
        if carried is None:
            return None
        return HandedOver(b"", 0, (Exchanged(str(Phase.PLAN), encode(replace(part, carried=carried)), encode(answer)),))

    def await_deputy(
        self, exchange: Exchange[PartT, AnswerT], job: DeputyJob, turn: Turn | None = None
    ) -> AnswerT | None:
        """The answer to what the child has written: this process commits it. None where it is to write by itself."""
        assert self._writing is not None, "whoever has a job has given it to the child"
        with working(self.progress, exchange.phase):
            ended = self._writing.ended(self.progress.advance)
        self.deputy_at_work = ended is None and self._writing.may_go_on
        if ended is None:
            return None
        if isinstance(ended, WriteFailed):
            failure = RankFailure.of_deputy(ended.error, rank=0, phase=exchange.phase, traced=ended.traced)
            self.failed = True
            self._tell_ended(committed=False)
            raise CheckpointException(self.kind, self.checkpoint_id, [failure]) from failure.cause
        if turn is not None:
            turn.wait_to_commit()
        sealed = SealedPart(job.part.prepared, ended.crcs) if job.part.file is not None else decode(job.part.prepared)
        return self.exchange(exchange, cast(PartT, sealed))

    def held_nearby(self, place: str) -> tuple[()]:
        """Return nothing: there is no agent."""
        return ()

    def kept_nearby(self, root: str) -> tuple[()]:
        """Return nothing, as before."""
        return ()

    @property
    def why_not_kept(self) -> str:
        return "this process saves alone, and agents keep the memory of groups (RankGroup.join)"

    def deputy_is_done(self, job: DeputyJob) -> bool:
        return self._writing is not None and says_in_time(self._writing.ended)

    def held_by_peers(self, place: str, keys: Collection[str]) -> tuple[()]:
        """Return nothing: there are no other nodes."""
        return ()

    def carry(self, *user_objects: Any) -> CarriedInPlace:
        return CarriedInPlace(user_objects)
