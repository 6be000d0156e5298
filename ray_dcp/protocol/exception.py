"""What a rank sees when a save or load fails anywhere: one ``CheckpointException`` for all of it."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from ray_dcp.errors import EarlierSaveError, RayDcpError, without_keys
from ray_dcp.system_error import SystemFacts, behind
from ray_dcp.wording import first_lines

COORDINATOR = -1
"""What stands in place of a rank where the coordinator's own step failed."""
_MAX_TRACEBACKS = 4
"""The most tracebacks in one message: what fails on many ranks mostly fails in one way."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's part in a failure. Always picklable, whatever the original exception was."""

    rank: int
    """The rank's number; ``COORDINATOR`` where it was not a rank."""
    phase: str
    """The word of the ``Phase`` in which it failed: "collect", "plan", "write", "commit" and so on."""
    error_type: str
    message: str
    traceback: str
    """The traceback as text; empty where nothing was raised (a rank that died)."""
    cause: BaseException | None = None
    """The original exception, where it can be pickled."""
    catchable_as: tuple[str, ...] = ()
    """Names of the built-in exceptions that the original was, also where that has been left behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        cause = None if self.cause is None else cloudpickle.dumps(self.cause)
        told = self.rank, self.phase, self.error_type, self.message, self.traceback
        return _rebuild_failure, (cause, *told, self.catchable_as)

    @classmethod
    def from_exception(cls, error: BaseException, *, rank: int, phase: str) -> RankFailure:
        return cls(
            rank=rank,
            phase=str(phase),  # a word, also where a ``Phase`` is at hand
            error_type=type(error).__name__,
            message=_text(error),
            traceback="".join(traceback.format_exception(error)),
            cause=error if _survives_pickling(error) else None,
            catchable_as=tuple(kind.__name__ for kind in _builtins_of(type(error))),
        )

    @classmethod
    def of_deputy(cls, error: bytes, *, rank: int, phase: str, traced: str) -> RankFailure:
        """The failure of whoever takes this rank's part, who has pickled what was raised and its traceback."""
        try:
            raised = pickle.loads(error)
        except BaseException as unknown:  # noqa: BLE001 - anybody's class may raise anything here; it must arrive
            raised = RuntimeError(f"what was raised cannot be read: {type(unknown).__name__}")
        return dataclasses.replace(cls.from_exception(raised, rank=rank, phase=phase), traceback=traced)

    @property
    def who(self) -> str:
        return "coordinator" if self.rank == COORDINATOR else f"rank {self.rank}"


class CheckpointException(RayDcpError, TorchCheckpointException):
    """A save or load failed, on every rank of it. ``__cause__`` is the original exception of the first failure.

    Also a ``torch.distributed.checkpoint.CheckpointException``, so code that catches that one goes on working; and,
    unlike torch's, an ``Exception``. It can be caught as what the cause is, too: ``FileNotFoundError`` where there is
    no checkpoint, ``ValueError`` where a state dict does not fit, ``OSError``, ``KeyError``, ``RuntimeError`` ...
    Example: rank 1's disk is full while ranks 0 and 2 are done writing: all three raise this (an ``OSError`` as well),
    with ``phase`` "write" and ``failed_ranks`` (1,); nothing was committed, the next save may begin.
    """

    def __new__(cls, *facts: Any, **named: Any) -> CheckpointException:
        # Ray makes a subclass that is its ``RayTaskError`` too, and gives it this error alone.
        failures: Sequence[RankFailure] = named.get("rank_failures", facts[2] if len(facts) > 2 else ())
        also: Any = _also(cast(Any, cls), failures[0].catchable_as if failures else ())
        return super(CheckpointException, also).__new__(also)

    def __init__(self, kind: str, checkpoint_id: str, rank_failures: Sequence[RankFailure]) -> None:
        first = rank_failures[0]
        more = f" (and {len(rank_failures) - 1} more)" if len(rank_failures) > 1 else ""
        Exception.__init__(
            self,
            f"{kind} of {without_keys(checkpoint_id) or 'a checkpoint'} failed in phase {first.phase!r}: "
            f"{first.who}: {first.error_type}: {first.message}{more}{_what_is_changed(kind, first.phase)}",
        )
        self.kind = kind
        self.checkpoint_id = checkpoint_id
        self.phase = first.phase
        self.rank_failures = tuple(rank_failures)
        self.earlier: CheckpointException | None = None
        """How an asynchronous save before this call had failed, where nobody had asked."""
        self.__cause__ = first.cause

    def after(self, earlier: CheckpointException) -> CheckpointException:
        """A copy, since ranks may share this one, that tells of an ``earlier`` failure, too."""
        both = copy.copy(self)
        both.earlier = earlier
        return both.with_traceback(self.__traceback__)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointException, (self.kind, self.checkpoint_id, self.rank_failures), dict(self.__dict__)

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """The ranks at fault, sorted; empty where the coordinator's own step failed."""
        return tuple(sorted({failure.rank for failure in self.rank_failures} - {COORDINATOR}))

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """(exception, traceback summary) by rank, as torch's has it. The coordinator counts as rank 0."""
        return {max(failure.rank, 0): _as_torch_wraps(failure) for failure in self.rank_failures}

    def __str__(self) -> str:
        others = [f"{f.who}: {f.error_type}: {f.message}" for f in self.rank_failures[1:] if f.message]
        listed = "".join(f"\n  {line}" for line in first_lines(others, kept_in=".rank_failures"))
        # No tracebacks of our own errors: these say it all, and a traceback would bury it.
        traced = [f for f in self.rank_failures if f.traceback and not isinstance(f.cause, RayDcpError)]
        traces = "".join(f"\n--- {f.who}, {f.phase} ---\n{f.traceback.rstrip()}" for f in traced[:_MAX_TRACEBACKS])
        before = self.earlier.args[0] if self.earlier is not None else ""
        earlier = f"\nAn asynchronous save before it had failed, too, and nobody had asked: {before}" if before else ""
        return f"{self.args[0]}{listed}{earlier}{traces}"


class UntoldSaveError(EarlierSaveError, CheckpointException):
    """An ``EarlierSaveError`` as it is raised: a ``CheckpointException`` with the facts of the save that failed."""

    def __init__(
        self, kind: str, checkpoint_id: str, rank_failures: Sequence[RankFailure], call: str, result: Any
    ) -> None:
        CheckpointException.__init__(self, kind, checkpoint_id, rank_failures)
        EarlierSaveError.__init__(self, self.args[0], call, result)

    @classmethod
    def told_by(cls, failure: CheckpointException, call: str, result: Any) -> UntoldSaveError:
        """``failure``, as it is raised by a ``call`` that has itself succeeded with ``result``."""
        return cls(failure.kind, failure.checkpoint_id, failure.rank_failures, call, result)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = self.portable_facts()
        told = (self.kind, self.checkpoint_id, self.rank_failures, self.call, facts["result"])
        return UntoldSaveError, told, facts


_CATCHABLE = frozenset(
    {
        *(one for one in vars(builtins).values() if isinstance(one, type) and issubclass(one, OSError)),
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        KeyError,
        IndexError,
        RuntimeError,
        NotImplementedError,
        AssertionError,
        ArithmeticError,
    }
) - {TimeoutError}
"""The built-in exceptions as which a failure can be caught. Not those that say something to Python itself
(``StopIteration``), nor ``TimeoutError``: from ``upload_completion.result(5)`` that means a save that still goes on."""


def _builtins_of(cause: type[BaseException]) -> list[type[BaseException]]:
    """The built-in exceptions that a cause is, none of them a base of another."""
    found: list[type[BaseException]] = []
    if not issubclass(cause, TimeoutError):
        for one in cause.__mro__:
            if one in _CATCHABLE and not any(issubclass(earlier, one) for earlier in found):
                found.append(one)
    return sorted(found, key=lambda kind: not issubclass(kind, OSError))  # the one whose objects have another shape


@functools.cache
def _also(cls: Any, names: tuple[str, ...]) -> Any:
    """A subclass of ``cls`` that can also be caught as these built-in exceptions; made once, pickled as ``cls``."""
    kinds = tuple(getattr(builtins, name) for name in names)
    if not kinds or issubclass(cls, kinds):
        return cls
    told = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if any(issubclass(kind, OSError) for kind in kinds):
        told |= {"errno": SystemFacts.errno, "strerror": SystemFacts.strerror, "filename": property(_filename)}
    return type(cls.__name__, (cls, *kinds), told)


def _filename(error: BaseException) -> Any:
    return getattr(behind(error), "filename", None)


def _what_is_changed(kind: str, phase: str) -> str:
    """A message's end about what a failed load has changed in the template: before phase "read", nothing."""
    if kind != "load" or phase not in ("read", "restore"):
        return ""
    return "; its tensors are filled by now" if phase == "restore" else "; some of the template's tensors may be filled"


def _as_torch_wraps(failure: RankFailure) -> WRAPPED_EXCEPTION:
    error = failure.cause or RuntimeError(f"{failure.error_type}: {failure.message}")
    return error, traceback.StackSummary.from_list([])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as unprintable:  # noqa: BLE001 - a user's class may raise anything here; the others must be told
        return f"(its text cannot be made: {type(unprintable).__name__})"


def _rebuild_failure(
    pickled_cause: bytes | None,
    rank: int,
    phase: str,
    error_type: str,
    message: str,
    traceback: str,
    catchable_as: tuple[str, ...],
) -> RankFailure:
    """The failure, without its cause where this process cannot import that: it must arrive all the same."""
    try:
        cause = None if pickled_cause is None else pickle.loads(pickled_cause)
    except BaseException:  # noqa: BLE001 - a user's class may raise anything here
        cause = None
    return RankFailure(rank, phase, error_type, message, traceback, cause, catchable_as)


def _survives_pickling(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except BaseException:  # noqa: BLE001 - a user's class may raise anything here; the failure then travels as text
        return False
