"""Every error that ray_dcp raises, in one tree.

::

    RayDcpError (Exception)
    |-- ConfigError (ValueError)                 a setting or argument is refused
    |   `-- NoCheckpointIdError (RuntimeError)   neither a checkpoint_id nor a writer or reader that has one
    |-- StoreError (OSError)                     a store could not do what was asked
    |   |-- ObjectNotFoundError (FileNotFoundError)
    |   |-- ObjectTooShortError                  an object ends before what is asked of it
    |   |-- BucketNotFoundError (FileNotFoundError)
    |   |-- StorePermissionError (PermissionError)
    |   |-- StoreUnavailableError                a store failed again and again in a way that may pass
    |   |-- NotAFolderError (NotADirectoryError)      a file lies where a folder should be
    |   `-- UnknownSchemeError (ValueError, RuntimeError)
    |-- CheckpointNotFoundError (FileNotFoundError)   nothing committed is there, and why
    |-- CorruptCheckpointError                   stored bytes are not what was written
    |-- UnsafeDataError                          a file asks for code to be run
    |-- FormatVersionError                       written by a newer ray_dcp
    |-- StateDictError (ValueError)              the state dict and the checkpoint do not fit
    |-- SupersededError                        a newer save of the same checkpoint has begun
    |-- EarlierSaveError                       an asynchronous save failed and nobody had asked; this call succeeded
    |   `-- UntoldSaveError                      as it is raised: also a CheckpointException
    |-- ForkedProcessError                     a forked process has neither its parent's saves nor its group
    |-- StagingError                           the shared memory of asynchronous saves
    |   |-- StagingMemoryError                   there is not enough for a buffer
    |   |-- StagingLostError / StepNotKeptError  the buffer of another process is gone; a step could not stay in memory
    |   |-- StagingBusyError (TimeoutError)      all buffers are in use
    |   `-- SavesInFlightError / SaveSkippedError / TornStagingError   too many at once; left out for that; changed
    |-- GroupError
    |   |-- JoinTimeoutError (TimeoutError)      ranks that never joined
    |   |-- RankConflictError                    two ranks joined with one number
    |   |-- StaleGenerationError                 a call from an older forming of the group
    |   |-- RankLostError                        a rank died
    |   |-- RankAbsentError (TimeoutError)       a rank did not make the call that others made
    |   |-- OutOfStepError                       a rank makes another call than those that wait for it
    |   |-- StalledError (TimeoutError)          a rank, or the coordinator's own step, stopped making progress
    |   |-- CoordinatorLostError                 the coordinator died
    |   |-- NotEnoughResourcesError              the cluster has no room for min_ranks
    |   `-- UnfinishedSavesError (TimeoutError)  ranks were stopped in the middle of asynchronous saves
    `-- CheckpointException                      what every rank of a failed save or load sees

``CheckpointException`` and ``UntoldSaveError`` are defined in ``ray_dcp.protocol.exception``: they are also torch's
``CheckpointException``, and this module must not import torch. ``StagingError`` and its kinds are in
``ray_dcp.staging.buffer_errors``. Facts are attributes; each error survives pickling, so it crosses Ray unchanged.
``exit_code`` is what the command line exits with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from ray_dcp.system_error import SystemFacts
from ray_dcp.wording import first_lines, number_runs

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_KEYS_IN_URL = re.compile(r"(?<=://)(?:[^/?@]*@|[^/?@]*:[^?@]*@)")
"""Keys in front of a bucket's name; a secret key may have slashes in it that somebody forgot to quote."""


def without_keys(url: str) -> str:
    """``url`` as a message may show it: that of a bucket without keys and parameters, a path as it is."""
    if _URL.match(url) is None or url.startswith("file://"):
        return url
    return _KEYS_IN_URL.sub("", url.partition("?")[0])


def _rebuild_error(cls: type[RayDcpError], args: tuple[Any, ...], facts: dict[str, Any]) -> RayDcpError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class RayDcpError(Exception):
    """Base of all errors of this package."""

    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), self.args, dict(self.__dict__))


class ConfigError(RayDcpError, ValueError):
    """A setting or an argument is refused; ``setting`` is its name."""

    exit_code = 2

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class NoCheckpointIdError(ConfigError, RuntimeError):
    """Nothing says where: no ``checkpoint_id`` or an empty one, and no writer or reader that has one.

    It is also a ``RuntimeError``, which is what torch raises.
    """


class StoreError(SystemFacts, RayDcpError, OSError):
    """A store could not do what was asked; ``url`` says where, ``key`` which object ("" = the store itself)."""

    exit_code = 4

    def __init__(self, message: str, *, url: str, key: str = "") -> None:
        self.url = without_keys(url)
        self.key = key
        super().__init__(f"{message} ({self.filename})")

    @property
    def filename(self) -> str:
        """The store's URL, and below it the object's key if there is one."""
        return f"{self.url}/{self.key}" if self.key else self.url


class ObjectNotFoundError(StoreError, FileNotFoundError):
    """The store has no object with this key."""

    exit_code = 3


class BucketNotFoundError(StoreError, FileNotFoundError):
    """There is no such bucket: a wrong name, endpoint or region, and not a place where nothing has been saved yet."""

    exit_code = 3


class ObjectTooShortError(StoreError):
    """The object ends before the byte range that was asked for."""


class StorePermissionError(StoreError, PermissionError):
    """The store refuses this user."""


class StoreUnavailableError(StoreError):
    """A store failed ``num_attempts`` times in ``elapsed_s`` seconds, each time in a way that may pass.

    Example: a bucket's server is down or answers that it has too much to do. ``__cause__`` is the last failure.
    """

    def __init__(self, message: str, *, url: str, key: str = "", num_attempts: int, elapsed_s: float) -> None:
        attempts = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
        super().__init__(f"after {attempts} in {elapsed_s:.1f} s: {message}", url=url, key=key)
        self.num_attempts = num_attempts
        self.elapsed_s = elapsed_s


class NotAFolderError(StoreError, NotADirectoryError):
    """A file lies where a folder should be."""

    exit_code = 3


class UnknownSchemeError(StoreError, ValueError, RuntimeError):
    """The URL's scheme belongs to no store. It is also a ``RuntimeError``, which is what torch raises."""

    exit_code = 2


class CheckpointNotFoundError(SystemFacts, RayDcpError, FileNotFoundError):
    """Nothing committed lies at ``checkpoint_id``; ``reason`` says what was found instead."""

    exit_code = 3

    def __init__(self, checkpoint_id: str, reason: str) -> None:
        super().__init__(f"no checkpoint at {without_keys(checkpoint_id)}: {reason}")
        self.checkpoint_id = checkpoint_id
        self.reason = reason

    @property
    def filename(self) -> str:
        """The checkpoint's place, without keys."""
        return without_keys(self.checkpoint_id)


class CorruptCheckpointError(RayDcpError):
    """Stored bytes differ from what was written: in ``file``, of value ``fqn``, ``nbytes`` bytes from ``offset`` on.

    ``fqn`` is empty and ``nbytes`` is 0 where the error is not about one value or one byte range.
    """

    exit_code = 5

    def __init__(self, message: str, *, file: str, fqn: str = "", offset: int = 0, nbytes: int = 0) -> None:
        self.file = without_keys(file)
        where = f"{self.file}{f', bytes {offset} to {offset + nbytes}' if nbytes else ''}"
        super().__init__(f"{f'{fqn}: ' if fqn else ''}{message} ({where})")
        self.fqn = fqn
        self.offset = offset
        self.nbytes = nbytes


class UnsafeDataError(RayDcpError):
    """A file names something outside the allow-list; nothing of it was run.

    ``ways`` is the end of the message: what a program can do about it. The command line says something else there.
    """

    exit_code = 5

    def __init__(self, message: str, *, file: str, fqn: str = "", ways: str = "") -> None:
        self.file = without_keys(file)
        super().__init__(f"{f'{fqn}: ' if fqn else ''}{message}{ways and f'. {ways}'} ({self.file})")
        self.fqn = fqn
        self.ways = ways


class FormatVersionError(RayDcpError):
    """The checkpoint was written in a newer format than this version reads."""

    exit_code = 5

    def __init__(self, *, found: int, supported: int, file: str) -> None:
        self.file = without_keys(file)
        super().__init__(
            f"{self.file} has format version {found}, this ray_dcp reads up to {supported}: upgrade ray_dcp to read it"
        )
        self.found = found
        self.supported = supported


class StateDictError(RayDcpError, ValueError):
    """State dict and checkpoint do not fit; ``problems`` has one line for each thing that is wrong.

    The message has the first of them and a count, ``problems`` has all.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        listed = "".join(f"\n  - {problem}" for problem in first_lines(problems, kept_in="the error's .problems"))
        super().__init__(f"{message}{listed}")
        self.problems = tuple(problems)


class SupersededError(RayDcpError):
    """A newer save of the same checkpoint has begun, so this one was given up before its commit.

    Example: a node freezes in the middle of a save; its run goes on elsewhere, comes to the same step and saves it;
    the node wakes up and goes on. ``attempt`` and ``newer`` name the two saves, as their shard files do;
    ``world_size`` is that of the save that was given up.
    """

    def __init__(self, *, checkpoint_id: str, attempt: str, newer: str, world_size: int | None = None) -> None:
        alone = (
            " No group here, so this process saved alone: ranks that save one checkpoint together need a group "
            "(RankGroup.join, RankPool)."
        )
        super().__init__(
            f"a newer save of {without_keys(checkpoint_id)} has begun (attempt {newer}), so this one ({attempt}) was "
            f"given up without a commit. Two runs that save to one place need a root each."
            f"{alone if world_size == 1 else ''}"
        )
        self.world_size = world_size
        self.checkpoint_id = checkpoint_id
        self.attempt = attempt
        self.newer = newer


class EarlierSaveError(RayDcpError):
    """An asynchronous save failed and nobody had asked; the ``call`` that tells it has itself succeeded.

    Example: the disk was full when step 100 was written in the background. The save of step 200 writes its checkpoint,
    and then raises this: ``result`` is what it would have returned. Raised on the ranks where nobody had looked at the
    response of the failed save, as an ``UntoldSaveError``. ``result`` is None where the error has come from another
    process and what the call returns cannot: an ``AsyncSaveResponse``.
    """

    def __init__(self, failure: BaseException | str, call: str = "call", result: Any = None) -> None:
        told = f"this {call} has succeeded, but an asynchronous save before it failed, and nobody had asked: {failure}"
        RayDcpError.__init__(self, told)  # not what comes next where a subclass has several bases
        self.call = call
        self.result = result

    def portable_facts(self) -> dict[str, Any]:
        """The attributes, with None for a ``result`` that cannot leave the process."""
        result = None if isinstance(self.result, Future) else self.result
        return {**self.__dict__, "result": result}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_error, (type(self), self.args, self.portable_facts())


class ForkedProcessError(RayDcpError):
    """What process ``pid`` has begun does not go on in a fork of it: they share no threads and no connections."""

    def __init__(self, message: str, *, pid: int) -> None:
        super().__init__(f"this process was forked from process {pid}: {message}")
        self.pid = pid


class GroupError(RayDcpError):
    """Base of what goes wrong between the ranks of a group; ``group`` is its name."""

    def __init__(self, message: str, *, group: str) -> None:
        super().__init__(f"group {group!r}: {message}")
        self.group = group


class JoinTimeoutError(GroupError, TimeoutError):
    """Not all ranks joined in time; ``missing_ranks`` never did."""

    def __init__(self, *, group: str, world_size: int, missing_ranks: Sequence[int], timeout_s: float) -> None:
        super().__init__(
            f"ranks {number_runs(missing_ranks)} of {world_size} did not join within {timeout_s:g} s. "
            "Are their processes running, and do they pass the same group name and world_size?",
            group=group,
        )
        self.world_size = world_size
        self.missing_ranks = tuple(missing_ranks)
        self.timeout_s = timeout_s


class RankConflictError(GroupError):
    """Two processes joined as the same rank, or with different world sizes."""

    def __init__(self, message: str, *, group: str, rank: int) -> None:
        super().__init__(message, group=group)
        self.rank = rank


class StaleGenerationError(GroupError):
    """The group has re-formed, or ended, since this rank joined.

    ``generation`` is the caller's, ``current`` the group's. Both are the same where the group has ended and no other
    generation has formed since.
    """

    def __init__(self, *, group: str, generation: int, current: int) -> None:
        since = (
            f"the group is at {current}: other ranks have taken its place"
            if generation != current
            else "which has ended: all its ranks were lost or had left"
        )
        super().__init__(
            f"this call comes from generation {generation}, {since}, so it may no longer save or load. Join again.",
            group=group,
        )
        self.generation = generation
        self.current = current


class RankLostError(GroupError):
    """Ranks died; ``lost`` maps each lost rank to what was seen of it."""

    def __init__(self, *, group: str, lost: Mapping[int, str]) -> None:
        lines = [f"rank {rank}: {why}" for rank, why in sorted(lost.items())]
        super().__init__(f"lost {'; '.join(first_lines(lines, kept_in='.lost'))}", group=group)
        self.lost = dict(lost)


class OutOfStepError(GroupError):
    """``rank`` makes the call ``call`` while ``others`` are in ``others_call`` and wait for it there.

    Example: rank 1 forgets the save of step 100 and comes to that of step 200 while ranks 0 and 2 wait in the first:
    both saves fail at once on all ranks, which then are in step again.
    """

    def __init__(self, *, group: str, rank: int, call: str, others: Sequence[int], others_call: str) -> None:
        named = f"rank {others[0]} is" if len(others) == 1 else f"ranks {', '.join(map(str, others))} are"
        super().__init__(
            f"rank {rank} calls {call} while {named} in {others_call}. All ranks must make the same calls in the same "
            "order: these have failed, the next one that all make works",
            group=group,
        )
        self.rank = rank
        self.call = call
        self.others = tuple(others)
        self.others_call = others_call


class RankAbsentError(GroupError, TimeoutError):
    """Other ranks made a call of ``kind`` and ``rank`` did not, within ``waited_s`` seconds.

    Raise ``arrival_timeout_s`` if a rank may be so late.
    """

    def __init__(self, *, group: str, rank: int, kind: str, waited_s: float) -> None:
        super().__init__(
            f"rank {rank} did not call {kind} within {waited_s:g} s of the first rank that did (arrival_timeout_s). "
            "All ranks must make the same calls in the same order.",
            group=group,
        )
        self.rank = rank
        self.kind = kind
        self.waited_s = waited_s


class StalledError(GroupError, TimeoutError):
    """``rank`` made no progress for ``stalled_s`` seconds in ``phase``, and others waited for it.

    Example: rank 3 writes to a network drive that has stopped answering. ``rank`` is -1 for the coordinator. ``nbytes``
    is how many bytes it had moved before.
    """

    def __init__(self, *, group: str, rank: int, phase: str, stalled_s: float, nbytes: int = 0) -> None:
        who = "the coordinator" if rank < 0 else f"rank {rank}"
        moved = f" after {nbytes} bytes" if nbytes else ""
        super().__init__(
            f"{who} made no progress in phase {phase!r} for {stalled_s:g} s{moved}. Look for a hanging disk, network "
            "or hook there; raise stall_timeout_s if such a pause is normal.",
            group=group,
        )
        self.rank = rank
        self.phase = phase
        self.stalled_s = stalled_s
        self.nbytes = nbytes


class CoordinatorLostError(GroupError):
    """The coordinator died or does not answer, and could not be replaced in time or in the middle of the call."""

    def __init__(self, why: str, *, group: str) -> None:
        super().__init__(
            f"its coordinator is gone ({why}). Make the call again; join again if that fails.", group=group
        )


class NotEnoughResourcesError(GroupError):
    """Fewer ranks fit on the cluster than ``min_ranks``."""

    def __init__(self, *, group: str, min_ranks: int, fit: int, resources_per_rank: Mapping[str, float]) -> None:
        super().__init__(
            f"{fit} ranks fit on the cluster now, min_ranks is {min_ranks} "
            f"(each needs {dict(resources_per_rank)}). Add nodes, or lower min_ranks or resources_per_rank.",
            group=group,
        )
        self.min_ranks = min_ranks
        self.fit = fit
        self.resources_per_rank = dict(resources_per_rank)


class UnfinishedSavesError(GroupError, TimeoutError):
    """Ranks were stopped in the middle of asynchronous saves; ``unfinished`` maps each rank to what it was saving.

    Nothing of these saves is committed. Raise ``finish_timeout_s``, or wait for saves before the pool is left.
    """

    def __init__(self, *, group: str, unfinished: Mapping[int, str], timeout_s: float) -> None:
        listed = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(unfinished.items()))
        super().__init__(
            f"its ranks were stopped before their asynchronous saves were over ({listed}), which took longer than "
            f"{timeout_s:g} s (finish_timeout_s). Nothing of these saves is committed.",
            group=group,
        )
        self.unfinished = dict(unfinished)
        self.timeout_s = timeout_s
