"""A process alone, as a group of one: both halves of every call run in it, nothing is pickled, no Ray is needed."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from ray_dcp.gc_pause import collector_paused
from ray_dcp.maintenance.sweep.after_save import SweepAfterSave
from ray_dcp.progress import Progress
from ray_dcp.protocol.coordinator.coordinator import SaveEnded
from ray_dcp.protocol.coordinator.open_call import coordinator_phase
from ray_dcp.protocol.coordinator.small_sessions import SESSIONS
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import AnswerT, CarriedInPlace, Exchange, Message, PartT
from ray_dcp.protocol.node_agent import DeputyJob, StagedPart
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.settings import Phase


class SoloGroup:
    """What ``cluster.group.RankGroup`` is for several ranks, with a sweep of its own behind each save."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.background = BackgroundSaves()
        self.sweep = SweepAfterSave(lambda: (frozenset(), frozenset()))

    def start_call(self, kind: str, checkpoint_id: str = "") -> SoloCall:
        """The only rank's end of its next save, load or look-up."""
        return SoloCall(kind, checkpoint_id, on_save_ended=self.sweep.save_ended)


class SoloCall:
    """The only rank of a call. ``on_save_ended`` is told as a ``Coordinator``'s is."""

    in_one_process: ClassVar[bool] = True
    deputy_at_work = False

    def __init__(self, kind: str, checkpoint_id: str, *, on_save_ended: SaveEnded | None = None) -> None:
        self.rank = 0
        self.world_size = 1
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.failed = False
        self.started_over = False
        self.progress = Progress()
        self._on_save_ended = on_save_ended
        self._session = SESSIONS[kind]()

    def exchange(self, exchange: Exchange[PartT, AnswerT], part: PartT) -> AnswerT:
        phase = exchange.phase
        try:
            answer = exchange.answer(self._step(phase, part))
        except (Exception, TorchCheckpointException) as error:
            failure = RankFailure.from_exception(error, rank=COORDINATOR, phase=coordinator_phase(self.kind, phase))
            self.failed = True
            self._tell_ended(committed=False)
            raise CheckpointException(self.kind, self.checkpoint_id, [failure]) from error
        if self._session.next_phase(phase) is None:
            self._tell_ended(committed=True)
        return answer

    def _step(self, phase: Phase, part: Message) -> Any:
        with collector_paused():
            (answer,) = self._session.step(phase, [part])
        return answer

    def _tell_ended(self, *, committed: bool) -> None:
        if self._session.attempt is not None and self._on_save_ended is not None:
            self._on_save_ended(self._session.checkpoint_id, committed=committed)

    def report(self, failure: RankFailure) -> None:
        """Note that the call has failed: there is nobody else to tell."""
        self._tell_ended(committed=False)

    def hand_over(self, part: StagedPart, *, wait: bool) -> None:
        """Return None: there is no deputy."""

    def await_deputy(self, exchange: Exchange[PartT, AnswerT], job: DeputyJob) -> AnswerT | None:
        raise AssertionError("a process alone has no deputy")

    def held_nearby(self, place: str) -> tuple[()]:
        """Return nothing: there is no agent."""
        return ()

    def carry(self, *user_objects: Any) -> CarriedInPlace:
        return CarriedInPlace(user_objects)
