"""A rank's end of one save, load or barrier, as whoever works in it sees it.

A *call* is what a rank holds while it takes part. ``exchange`` sends this rank's part of a phase and returns its
answer once all ranks have sent theirs. The first failure anywhere ends the call for every rank. There are two:
``rank.remote_call.RemoteCall`` for one rank of several, ``solo.SoloCall`` for a process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from ray_dcp.progress import Progress, working
from ray_dcp.protocol.exception import CheckpointException, RankFailure
from ray_dcp.protocol.messages import AnswerT, Asked, Carries, Exchange, Message, PartT
from ray_dcp.protocol.node_agent import DeputyJob, StagedPart
from ray_dcp.protocol.turns import Turn
from ray_dcp.settings import Phase
from ray_dcp.staging.memory_tier import HeldFile, KeptSave
from ray_dcp.staging.peers.peer import PeerFile


class Call(Protocol):
    """One rank's end of one call. Used by one thread at a time."""

    rank: int
    world_size: int
    kind: str
    checkpoint_id: str
    number: int
    """How many calls this rank had made before."""
    in_one_process: ClassVar[bool]
    """Whether ranks and coordinator are one process: then a place may be one that no other process sees."""
    failed: bool
    """Whether it has failed. A ``CheckpointException`` before that is of another call, such as one of a user's hook."""
    progress: Progress
    """How far this rank is; whoever waits for it looks at this."""
    deputy_at_work: bool
    """Whether a deputy may be at work on this rank's part, and in the memory in which that is staged."""
    replicas: int
    """On how many other nodes a copy of what this rank hands over is to be kept in memory."""
    started_over: bool
    """Whether the coordinator died during this call: nobody here knows how far it had come."""

    def exchange(self, exchange: Exchange[PartT, AnswerT], part: PartT) -> AnswerT:
        """Send this rank's part, return its answer. Raises ``CheckpointException`` when the call fails anywhere."""
        ...

    def report(self, failure: RankFailure) -> None:
        """Tell the others that this rank has failed; never raises."""
        ...

    def ready_deputy(self, *, wait: bool) -> bool:
        """Whether there is a deputy that is up. It starts by this, if need be, and this may ``wait`` for it."""
        ...

    def hand_over(self, part: StagedPart, *, wait: bool) -> DeputyJob | None:
        """Give this rank's write part to a deputy, which takes it whatever becomes of the rank from then on.

        None where there is no deputy; where one is just starting this may ``wait`` for it. Raises
        ``CheckpointException`` where the call has failed.
        """
        ...

    def await_deputy(
        self, exchange: Exchange[PartT, AnswerT], job: DeputyJob, turn: Turn | None = None
    ) -> AnswerT | None:
        """The answer that the deputy has been told. None where the part is this rank's own again.

        ``turn`` is waited for before a commit that no coordinator keeps in order. Raises ``CheckpointException`` when
        the call has failed.
        """
        ...

    def held_nearby(self, place: str) -> Sequence[HeldFile]:
        """The files of the checkpoint at ``place`` that are in memory of this node, as far as anybody says; at once."""
        ...

    def kept_nearby(self, root: str) -> Sequence[KeptSave]:
        """What is in memory of this node of the saves below ``root``, as far as anybody says within seconds."""
        ...

    @property
    def why_not_kept(self) -> str:
        """Why nothing that this rank saves is kept in memory; empty where that may be."""
        ...

    def deputy_is_done(self, job: DeputyJob) -> bool:
        """Whether the deputy has said how ``job`` has ended, so that it touches nothing of it any more.

        This waits for its word for a while, since the deputy may hear later than this rank that the call has failed.
        """
        ...

    def held_by_peers(self, place: str, keys: Collection[str]) -> Sequence[PeerFile]:
        """Those in memory of other nodes, as far as they say so within a second, or until there are all of ``keys``."""
        ...

    def carry(self, *user_objects: Any) -> Carries | None:
        """Planners, writers and readers in the form in which the coordinator's half takes them.

        None where they cannot travel, so that their global steps are this rank's.
        """
        ...


@contextmanager
def phase(call: Call, name: Phase) -> Iterator[None]:
    """An error in the block fails the call on all ranks, as this rank's failure in phase ``name``.

    Raises ``CheckpointException`` then, or the error itself where that asks the process to end.
    """
    try:
        with working(call.progress, name):
            yield
    except BaseException as error:
        if call.failed and isinstance(error, CheckpointException):
            raise
        failure = RankFailure.from_exception(error, rank=call.rank, phase=name)
        call.report(failure)
        if not isinstance(error, Exception | TorchCheckpointException):
            raise  # KeyboardInterrupt, SystemExit: the others know, this process ends
        call.failed = True
        raise CheckpointException(call.kind, call.checkpoint_id, [failure]) from error


def agree(call: Call, exchange: Exchange[PartT, AnswerT], part: PartT, do: Callable[[Asked], Message]) -> AnswerT:
    """The answer to ``part``, once this rank has sent all that the coordinator asks of it on the way.

    ``do`` makes such a part out of what was ``Asked``: a user's plug-in that stays on rank 0 takes its steps there.
    """
    answer = call.exchange(exchange, part)
    while isinstance(answer, Asked):
        with phase(call, answer.done_in):
            more = do(answer)
        answer = exchange.answer(call.exchange(answer.sent_in, more))
    return answer
