"""What a rank sees when a save or load fails anywhere: one ``CheckpointException`` for all of it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from ray_dcp.errors import RayDcpError, without_keys
from ray_dcp.wording import first_lines

COORDINATOR = -1
"""In place of a rank, where the coordinator's own step failed."""
_MAX_TRACEBACKS = 4
"""In one message: what fails on many ranks mostly fails in one way."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's part in a failure. Always picklable, whatever the original exception was."""

    rank: int
    """``COORDINATOR`` where it was no rank."""
    phase: str
    """collect, plan, stage, write, commit, open, read or restore."""
    error_type: str
    message: str
    traceback: str
    """Text; empty where nothing was raised (a rank that died)."""
    cause: BaseException | None = None
    """The original, where it can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        cause = None if self.cause is None else cloudpickle.dumps(self.cause)
        return _rebuild_failure, (cause, self.rank, self.phase, self.error_type, self.message, self.traceback)

    @classmethod
    def from_exception(cls, error: BaseException, *, rank: int, phase: str) -> RankFailure:
        return cls(
            rank=rank,
            phase=phase,
            error_type=type(error).__name__,
            message=_text(error),
            traceback="".join(traceback.format_exception(error)),
            cause=error if _survives_pickling(error) else None,
        )

    @property
    def who(self) -> str:
        return "coordinator" if self.rank == COORDINATOR else f"rank {self.rank}"


class CheckpointException(RayDcpError, TorchCheckpointException):
    """A save or load failed, on every rank of it. ``__cause__`` is the original exception of the first failure.

    Also a ``torch.distributed.checkpoint.CheckpointException``, so code that catches that one goes on working; and,
    unlike torch's, an ``Exception``. Example: rank 1's disk is full while ranks 0 and 2 are done writing: all three
    raise this, with ``phase`` "write" and ``failed_ranks`` (1,); nothing was committed, the next save may begin.
    """

    def __init__(self, kind: str, checkpoint_id: str, rank_failures: Sequence[RankFailure]) -> None:
        first = rank_failures[0]
        more = f" (and {len(rank_failures) - 1} more)" if len(rank_failures) > 1 else ""
        Exception.__init__(
            self,
            f"{kind} of {without_keys(checkpoint_id) or 'a checkpoint'} failed in phase {first.phase!r}: "
            f"{first.who}: {first.error_type}: {first.message}{more}",
        )
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.phase = first.phase
        self.rank_failures = tuple(rank_failures)
        self.__cause__ = first.cause

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointException, (self.kind, self.checkpoint_id, self.rank_failures), dict(self.__dict__)

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """The ranks at fault, sorted; empty where the coordinator's own step failed."""
        return tuple(sorted({failure.rank for failure in self.rank_failures} - {COORDINATOR}))

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """Rank to (exception, traceback summary), as torch's. The coordinator counts as rank 0."""
        return {max(failure.rank, 0): _as_torch_wraps(failure) for failure in self.rank_failures}

    def __str__(self) -> str:
        others = [f"{f.who}: {f.error_type}: {f.message}" for f in self.rank_failures[1:] if f.message]
        listed = "".join(f"\n  {line}" for line in first_lines(others, kept_in=".rank_failures"))
        # Of ours none: they say it all, and a traceback would bury it.
        traced = [f for f in self.rank_failures if f.traceback and not isinstance(f.cause, RayDcpError)]
        traces = "".join(f"\n--- {f.who}, {f.phase} ---\n{f.traceback.rstrip()}" for f in traced[:_MAX_TRACEBACKS])
        return f"{self.args[0]}{listed}{traces}"


def _as_torch_wraps(failure: RankFailure) -> WRAPPED_EXCEPTION:
    error = failure.cause or RuntimeError(f"{failure.error_type}: {failure.message}")
    return error, traceback.StackSummary.from_list([])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as unprintable:  # noqa: BLE001 - a user's class may raise anything here; the others must be told
        return f"(its text cannot be made: {type(unprintable).__name__})"


def _rebuild_failure(
    pickled_cause: bytes | None, rank: int, phase: str, error_type: str, message: str, traceback: str
) -> RankFailure:
    """The failure, without its cause where this process cannot import that: it must arrive all the same."""
    try:
        cause = None if pickled_cause is None else pickle.loads(pickled_cause)
    except BaseException:  # noqa: BLE001 - a user's class may raise anything here
        cause = None
    return RankFailure(rank, phase, error_type, message, traceback, cause)


def _survives_pickling(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except BaseException:  # noqa: BLE001 - a user's class may raise anything here; the failure then travels as text
        return False
