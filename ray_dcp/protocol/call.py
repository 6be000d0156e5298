"""A rank's end of one save, load or barrier.

A *call* is what a rank holds while it takes part. ``exchange`` sends this rank's part of a phase and returns its
answer once all ranks have sent theirs. The first failure anywhere ends the call for every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from ray_dcp.errors import CoordinatorLostError, GroupError
from ray_dcp.protocol.failures import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.sessions import SESSIONS
from ray_dcp.protocol.wire import carry, decode, encode


class Call(Protocol):
    """One rank's end of one call. Used by one thread at a time."""

    rank: int
    world_size: int
    kind: str
    checkpoint_id: str
    failed: bool
    """A ``CheckpointException`` before that is not this call's: a hook of the user's has made another one, say."""

    def exchange(self, phase: str, part: Any) -> Any:
        """Send this rank's part, return its answer. Raises ``CheckpointException`` when the call fails anywhere."""
        ...

    def report(self, failure: RankFailure) -> None:
        """Tell the others that this rank has failed; never raises."""
        ...

    def carry(self, *user_objects: Any) -> Any:
        """Planners, writers and readers in the form in which the coordinator's half takes them.

        None where they cannot travel, so that their global steps are this rank's.
        """
        ...


@contextmanager
def phase(call: Call, name: str) -> Iterator[None]:
    """What fails in the block fails the call, everywhere, as this rank's failure in phase ``name``.

    Leaves by ``CheckpointException``, or by the original where it asks the process to end.
    """
    try:
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


class SoloCall:
    """The only rank of a call: the coordinator's half runs in place, nothing is pickled, no Ray is needed."""

    def __init__(self, kind: str, checkpoint_id: str) -> None:
        self.rank = 0
        self.world_size = 1
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.failed = False
        self._session = SESSIONS[kind]()

    def exchange(self, phase: str, part: Any) -> Any:
        try:
            (answer,) = self._session.step(phase, [part])
        except (Exception, TorchCheckpointException) as error:
            failure = RankFailure.from_exception(error, rank=COORDINATOR, phase=coordinator_phase(self.kind, phase))
            self.failed = True
            raise CheckpointException(self.kind, self.checkpoint_id, [failure]) from error
        return answer

    def report(self, failure: RankFailure) -> None:
        """There is nobody else."""

    def carry(self, *user_objects: Any) -> Any:
        return user_objects


class RemoteCall:
    """One rank of several: parts travel to the coordinator as messages.

    ``send(phase, message)`` returns the coordinator's answer, both encoded, or raises; ``tell`` delivers a failure.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        kind: str,
        checkpoint_id: str,
        send: Callable[[str, bytes], bytes],
        tell: Callable[[RankFailure], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.failed = False
        self._send = send
        self._tell = tell

    def exchange(self, phase: str, part: Any) -> Any:
        message = self._encoded(phase, part)
        try:
            answer = self._send(phase, message)
        except GroupError as error:
            rank = COORDINATOR if isinstance(error, CoordinatorLostError) else self.rank
            failure = RankFailure.from_exception(error, rank=rank, phase=phase)
            self.failed = True
            raise CheckpointException(self.kind, self.checkpoint_id, [failure]) from error
        except CheckpointException as error:
            self.failed = True
            if error.checkpoint_id:
                raise
            # The call failed before its coordinator knew what it is about.
            raise CheckpointException(self.kind, self.checkpoint_id, error.rank_failures) from error.__cause__
        return decode(answer)

    def _encoded(self, name: str, part: Any) -> bytes:
        """A part that cannot be pickled never arrives: the others must not wait for it."""
        with phase(self, name):
            return encode(part)

    def report(self, failure: RankFailure) -> None:
        try:
            self._tell(failure)
        except GroupError:
            # The coordinator is gone, so nobody waits there for this rank; the failure itself is raised here.
            return

    def carry(self, *user_objects: Any) -> Any:
        return carry(*user_objects)


def coordinator_phase(kind: str, phase: str) -> str:
    """The name of what the coordinator does when all parts of ``phase`` are there."""
    return "commit" if (kind, phase) == ("save", "write") else phase
