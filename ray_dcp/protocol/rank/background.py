"""Saves that go on behind the caller's back: a few at a time, in order, none of their failures lost.

Each has a thread of its own, for which the interpreter waits when it exits. A failure is told once: to whoever looks at
the response; else by the next save or load of that rank, after its own work; else on stderr when the process ends.

A process that was forked meanwhile has no such thread: there the save counts as over, and whoever asks is told why.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse as TorchAsyncSaveResponse
from typing_extensions import Self

from ray_dcp.errors import ForkedProcessError
from ray_dcp.lifetime import before_exit
from ray_dcp.protocol.call import Call, phase
from ray_dcp.protocol.exception import CheckpointException, RankFailure, UntoldSaveError
from ray_dcp.protocol.messages import Busy
from ray_dcp.protocol.turns import Turn
from ray_dcp.settings import InFlight, Phase
from ray_dcp.staging.buffer_errors import StagingError, StepNotKeptError
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.staging.pinned import pin
from ray_dcp.store.location.urls import shown_url

logger = logging.getLogger("ray_dcp")

_T = TypeVar("_T")

_untold: dict[AsyncSaveResponse, None] = {}
"""The saves of this process that are under way, or have failed without anybody having looked."""


class _OfThisProcess:
    """A future whose work is a thread of this process: a copy would never be told that it is done."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a save goes on in the process that has begun it, so its response cannot be pickled or sent to another "
            "one: wait there, and send what result() returns"
        )


class _Staging(_OfThisProcess, Future[None]):
    """The ``staging_completion`` of a save."""


class AsyncSaveResponse(_OfThisProcess, TorchAsyncSaveResponse, Future[Metadata]):
    """What ``async_save`` returns: torch's response, and the future that torch's default call returns, in one.

    It cannot be cancelled: a save that all ranks have begun goes on, and ``cancel()`` returns False.
    """

    staging_completion: Future[None]
    """Done when the state dict may change again."""

    def __init__(self, what: str = "an asynchronous save") -> None:
        Future.__init__(self)
        self.what = what
        """A name for the save in messages."""
        self.staging_completion = _Staging()
        self.skipped = False
        """Whether nothing was saved, on no rank, since too many saves were in flight (``when_busy="skip"``).

        The response is done then, ``exception()`` gives a ``SaveSkippedError``, and that is no failure to be told. So
        is one of a step that could not be kept in memory, with a ``StepNotKeptError``; that may show only later.
        """
        self.number = 0
        """How many calls its rank had made before."""
        self.turn = Turn()
        """Its place behind earlier saves."""
        self._writer: threading.Thread | None = None
        self._looked_at = False
        for future in (self, self.staging_completion):
            future.set_running_or_notify_cancel()  # what runs cannot be cancelled

    @property
    def upload_completion(self) -> Future[Metadata]:  # type: ignore[override]  # torch's is a plain attribute
        """Done when the checkpoint is committed and durable, or the save has failed: the response itself."""
        return self

    def result(self, timeout: float | None = None) -> Metadata:
        """The checkpoint's ``Metadata``; raises ``CheckpointException``, or ``TimeoutError`` after ``timeout`` s."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """How the save failed, or None; raises ``TimeoutError`` after ``timeout`` seconds."""
        error = super().exception(timeout)
        self._look()
        return error

    def untold_failure(self) -> CheckpointException | None:
        """How it failed, if it did and nobody has looked; looking here does not count."""
        failed = self.done() and not self._looked_at and super().exception() is not None
        return _checkpoint_exception(super().exception()) if failed else None

    def is_over_and_told(self) -> bool:
        """Whether it is over, and there is nothing about that to be told."""
        return self.done() and self.untold_failure() is None

    def tell(self) -> None:
        """Return when it is over. Raises its failure, if nobody has looked at that yet."""
        wait([self])
        failure = self.untold_failure()
        self._look()
        if failure is not None:
            raise failure

    def skip(self, why: StagingError) -> None:
        """End it by ``why`` nothing was saved, which is no failure."""
        self.skipped = True
        self._look()
        self.set_exception(why)

    def written_by(self, writer: threading.Thread) -> threading.Thread:
        self._writer = writer
        return writer

    def is_written_here(self) -> bool:
        """Whether it is this very thread that writes it."""
        return self.running() and self._writer is threading.current_thread()

    def _look(self) -> None:
        self._looked_at = True
        _untold.pop(self, None)

    def _get_snapshot(self) -> Any:
        """The snapshot through which asyncio looks from Python 3.14 on."""
        snapshot: Any = super()._get_snapshot()  # type: ignore[misc]
        if self.done():
            self._look()
        return snapshot

    # Torch's response is a dataclass, which compares by value: a future is itself, and has to go into a set.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = Future.__repr__


class BackgroundSaves:
    """The asynchronous saves of one rank."""

    def __init__(self, *, spares_newest: bool = False, make_room: Callable[[], None] | None = None) -> None:
        """Both are for the ``BufferPool``."""
        self._new_pool = functools.partial(BufferPool, on_new=pin, spares_newest=spares_newest, make_room=make_room)
        self._buffers = (os.getpid(), self._new_pool())
        self._started: list[AsyncSaveResponse] = []
        """Those under way, in their order, and those whose failure is to be told."""

    @property
    def buffers(self) -> BufferPool:
        """What they are staged in; a fork has buffers of its own."""
        if self._buffers[0] != os.getpid():
            self._buffers = (os.getpid(), self._new_pool())
        return self._buffers[1]

    def settle(self) -> None:
        """Return when no save is under way; how they have ended stays untold."""
        wait(self._running())
        self._forget_told()

    def make_room(self, limit: InFlight, uses: Sequence[object], *, alone: bool) -> Busy | None:
        """Return when one more save may begin, or with what is to be said of it where it is not to wait for that.

        Whatever the ``limit`` says, it waits for saves that use one of the objects that it ``uses``, which may keep in
        them what they are at, and where this one or they are to be ``alone``, for all.
        """
        self._forget_told()
        for response in self._running():
            if alone or response.turn.alone or any(one is other for one in response.turn.uses for other in uses):
                wait([response])
        self.buffers.allow(limit.max_in_flight)
        while len(running := self._running()) >= limit.max_in_flight:
            if limit.when_busy != "wait":
                return Busy(limit.max_in_flight, raises=limit.when_busy == "error")
            wait(running, return_when=FIRST_COMPLETED)
        return None

    def _forget_told(self) -> None:
        self._started = [one for one in self._started if not one.is_over_and_told()]

    def next_turn(self, uses: Sequence[object], *, alone: bool) -> Turn:
        """The turn of a save that begins now, behind those under way."""
        return Turn([response.turn for response in self._running()], uses=uses, alone=alone)

    def numbers_in_flight(self, before: int) -> tuple[int, ...]:
        """The numbers of the calls below ``before`` that are saves under way."""
        return tuple(response.number for response in self._running() if response.number < before)

    def _running(self) -> list[AsyncSaveResponse]:
        """The saves under way, in order; where it is one of them that asks, by a hook of its own, those before it."""
        running = []
        for response in tuple(self._started):
            if response.is_written_here():
                break
            if not response.done():
                running.append(response)
        return running

    def skipped(self, why: StagingError, call: Call) -> AsyncSaveResponse:
        """The response of a save that all ranks leave out."""
        response = _response_of(call)
        response.staging_completion.set_result(None)
        response.skip(why)
        logger.info("%s is skipped: %s", response.what, why)
        return response

    def wait_for_latest(self, timeout_s: float) -> bool:
        """Return whether no save is under way, after at most ``timeout_s``; how it ended stays untold."""
        return not wait(tuple(self._started), timeout=timeout_s).not_done

    def start(
        self,
        save: Callable[[], Metadata],
        call: Call,
        turn: Turn | None = None,
        *,
        staging: Future[Any] | None = None,
    ) -> AsyncSaveResponse:
        """Begin to ``save`` in the background; ``make_room``, or ``settle``, comes first.

        ``staging`` is what a user's stager has returned where it still stages; without it everything is staged.
        """
        response = _response_of(call, turn)
        response.add_done_callback(lambda ended: ended.turn.end())  # type: ignore[attr-defined]
        if staging is None:
            response.staging_completion.set_result(None)
        else:
            staging.add_done_callback(functools.partial(_pass_on, to=response.staging_completion))
        _prepare_for_end()
        _untold[response] = None
        self._started.append(response)
        writer = threading.Thread(target=_run, args=(response, save, call), name="ray_dcp-save", daemon=False)
        try:
            _start(response.written_by(writer), call)
        except BaseException as error:
            response.set_exception(error)
            response._look()  # it is raised here
            raise
        return response

    @contextmanager
    def noting_earlier(self) -> Iterator[None]:
        """A call that fails in the block also tells of a save before that failed and at which nobody has looked."""
        try:
            yield
        except CheckpointException as error:
            untold = self._oldest_untold()
            if untold is None:
                raise
            raise error.after(untold[1]) from error.__cause__

    def tell_earlier(self, kind: str, result: _T) -> _T:
        """Return ``result``, which is that of a call of ``kind`` that has succeeded.

        Raises ``EarlierSaveError`` with it where a save before failed and nobody has looked.
        """
        untold = self._oldest_untold(but=result)
        if untold is None:
            return result
        response, failure = untold
        response._look()
        raise UntoldSaveError.told_by(failure, kind, result) from failure

    def _oldest_untold(self, *, but: object = None) -> tuple[AsyncSaveResponse, CheckpointException] | None:
        for response in self._started:
            failure = response.untold_failure()
            if failure is not None and response is not but:
                return response, failure
        return None


def _response_of(call: Call, turn: Turn | None = None) -> AsyncSaveResponse:
    response = AsyncSaveResponse(f"the asynchronous save of {shown_url(call.checkpoint_id) or 'a checkpoint'}")
    response.number, response.turn = call.number, turn or response.turn
    return response


def _start(writer: threading.Thread, call: Call) -> None:
    """Start the thread; should the system have none to give, the others must not wait for this rank."""
    try:
        writer.start()
    except BaseException:
        # Not around the start: the thread may be at work when that returns, and says by then what it is busy with.
        with phase(call, Phase.WRITE):
            raise


def _run(response: AsyncSaveResponse, save: Callable[[], Metadata], call: Call) -> None:
    try:
        metadata = save()
    except CheckpointException as error:
        response.set_exception(error)
    except StepNotKeptError as why:
        response.skip(why)
    except BaseException as error:  # noqa: BLE001 - the thread ends here: the response is where it is told
        failure = RankFailure.from_exception(error, rank=call.rank, phase=Phase.WRITE)
        response.set_exception(CheckpointException(call.kind, call.checkpoint_id, [failure]))
    else:
        response.set_result(metadata)
        _untold.pop(response, None)


def _pass_on(staging: Future[Any], to: Future[None]) -> None:
    try:
        staging.result()
    except BaseException as error:  # noqa: BLE001 - a user's stager may raise anything; whoever waits is told
        to.set_exception(error)
    else:
        to.set_result(None)


def _checkpoint_exception(error: BaseException | None) -> CheckpointException:
    assert isinstance(error, CheckpointException), "all that a save in the background raises is made one"
    return error


# The end of the process, and its forks.


@dataclass(frozen=True, slots=True)
class Finished:
    """How the asynchronous saves of a process have ended, for which somebody waited at its end."""

    unfinished: Sequence[str]
    """The names of saves that still go on, for messages."""
    failures: Sequence[CheckpointException]
    """The failures of which nobody had known."""


def end_saves(timeout_s: float) -> Finished:
    """Wait at most ``timeout_s`` seconds for all saves of this process; what is told here is told to nobody else."""
    responses = tuple(_untold)
    wait(responses, timeout=timeout_s)
    failures = [failure for response in responses if (failure := response.untold_failure()) is not None]
    for response in responses:
        if response.done():
            response._look()
    return Finished([response.what for response in responses if not response.done()], failures)


@functools.cache
def _prepare_for_end() -> None:
    before_exit(_finish_and_tell)
    atexit.register(_tell_of_untold)
    os.register_at_fork(after_in_child=_forget_in_fork)


def finish_saves() -> None:
    """Return when no asynchronous save of this process is under way."""
    while running := [response for response in tuple(_untold) if response.running()]:
        wait(running)


def finish_and_tell(timeout_s: float) -> None:
    """Wait at most ``timeout_s`` seconds for all saves of this process, which ends; untold failures go to stderr."""
    wait(tuple(_untold), timeout=timeout_s)
    _tell_of_untold()


def _finish_and_tell() -> None:
    finish_saves()
    if multiprocessing.parent_process() is not None:
        _tell_of_untold()  # processes that multiprocessing has forked end without atexit's hooks


def _tell_of_untold() -> None:
    for response in tuple(_untold):
        failure = response.untold_failure()
        _untold.pop(response, None)
        if sys.stderr is None:
            continue
        if failure is not None:
            print(f"ray_dcp: an asynchronous save failed, and nobody had asked: {failure}", file=sys.stderr, flush=True)
        elif response.running():
            print(f"ray_dcp: {response.what} is cut off by the end of this process", file=sys.stderr, flush=True)


def _forget_in_fork() -> None:
    """End the parent's saves in a fork: no thread here would ever finish them, and the parent tells how they ended."""
    for response in _untold:
        reason = f"{response.what} goes on there, and cannot be waited for here"
        for future in (response, response.staging_completion):
            _end_in_fork(future, ForkedProcessError(reason, pid=os.getppid()))
        response._looked_at = True
    _untold.clear()


def _end_in_fork(future: Future[Any], why: ForkedProcessError) -> None:
    if future._state != "FINISHED":  # done() takes a lock that nobody may ever release
        Future.__init__(future)
        future.set_exception(why)
    else:
        future._condition = threading.Condition()
