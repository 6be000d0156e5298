"""A rank's half of an asynchronous save: as ``rank.save``, in pieces::

    caller    plan_save -> stage_save -> hand_over_save -> return
    thread    hand_over_save, if it is not -> its deputy's word, or write_save -> release

Several may be in flight, each with its ``Turn``: an earlier one never waits for a later one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager

from ray_dcp.protocol.call import Call, phase
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.protocol.node_agent import DeputyJob
from ray_dcp.protocol.rank.background import AsyncSaveResponse, BackgroundSaves
from ray_dcp.protocol.rank.overlap import note_staging
from ray_dcp.protocol.rank.save import SaveRequest, plan_save, save, write_save
from ray_dcp.protocol.rank.user_staging import staged_by, when_staged
from ray_dcp.protocol.steps import SaveSteps
from ray_dcp.protocol.turns import Turn
from ray_dcp.settings import Phase
from ray_dcp.staging.buffer_errors import SaveSkippedError, StepNotKeptError, TornStagingError
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.wording import first_line_of


def save_behind(
    request: SaveRequest,
    call: Call,
    saves: BackgroundSaves,
    turn: Turn,
    stager: AsyncStager | None,
    *,
    overlap: bool = False,
) -> AsyncSaveResponse:
    """Begin an asynchronous save; when this returns what is to be written is staged, unless a ``stager`` still stages.

    With ``overlap`` a thread copies it. The response of one that is skipped is done.
    """
    if stager is not None:
        return _save_behind_stager(request, call, saves, turn, stager)
    try:
        if request.steps.in_memory and call.in_one_process:
            raise StepNotKeptError(reason=call.why_not_kept)
        planned = plan_save(request, call)
    except (SaveSkippedError, StepNotKeptError) as skipped:
        return saves.skipped(skipped, call)
    try:
        with _losing_nothing(planned):
            return _save_planned(planned, call, saves, turn, overlap=overlap)
    except StepNotKeptError as skipped:
        return saves.skipped(skipped, call)


def _save_planned(
    planned: SaveSteps, call: Call, saves: BackgroundSaves, turn: Turn, *, overlap: bool
) -> AsyncSaveResponse:
    if overlap:
        with phase(call, Phase.STAGE):
            goes_on = planned.begin_staging(saves.buffers)
        if goes_on:
            return _stage_behind(planned, call, saves, turn)
    steps = planned if overlap else stage_save(planned, call, saves.buffers)
    try:
        job = hand_over_save(steps, call, turn)
        return saves.start(lambda: finish_save(steps, call, turn, job), call, turn)
    except BaseException:
        steps.release(to_others=call.deputy_at_work)
        raise


def _stage_behind(steps: SaveSteps, call: Call, saves: BackgroundSaves, turn: Turn) -> AsyncSaveResponse:
    """Leave the copy to a thread, too."""
    staging: Future[None] = Future()

    def stage_and_finish() -> Metadata:
        try:
            with _losing_nothing(steps), phase(call, Phase.STAGE):
                steps.end_staging()
        except BaseException as error:
            staging.set_exception(error)
            raise
        staging.set_result(None)
        return finish_save(steps, call, turn, None)

    try:
        response = saves.start(stage_and_finish, call, turn, staging=staging)
    except BaseException:
        steps.release(to_others=False)
        raise
    note_staging(response)
    return response


def _save_behind_stager(
    request: SaveRequest, call: Call, saves: BackgroundSaves, turn: Turn, stager: AsyncStager
) -> AsyncSaveResponse:
    staged = staged_by(stager, request, call)
    if not isinstance(staged, Future):
        steps = plan_save(staged, call)
        return saves.start(lambda: write_save(steps, call), call, turn)
    # What is saved is known only when it is staged, which may take as long as a step of the training.
    staging = staged
    return saves.start(lambda: save(when_staged(staging, request, call), call), call, turn, staging=staging)


def stage_save(steps: SaveSteps, call: Call, buffers: BufferPool) -> SaveSteps:
    """Copy what this rank will write, and only that: afterwards the state dict may change.

    Whoever has staged it gives the memory back with ``steps.release()``.
    """
    with phase(call, Phase.STAGE):
        steps.stage(buffers)
    return steps


def hand_over_save(steps: SaveSteps, call: Call, turn: Turn, *, wait: bool = False) -> DeputyJob | None:
    """Give what is staged to this rank's deputy: from then on the save needs this process no more.

    None where it is to write by itself; also, unless this is to ``wait``, where it is not this save's turn, or the
    deputy is not up yet.
    """
    part = steps.staged_part()
    if part is None:
        return None
    if wait:
        turn.wait_to_hand_over()
    if not turn.may_hand_over:
        return None
    with phase(call, Phase.WRITE):
        job = call.hand_over(part, wait=wait)
    if job is not None:
        turn.handed_over()
    return job


def finish_save(steps: SaveSteps, call: Call, turn: Turn, job: DeputyJob | None) -> Metadata:
    """Do behind the caller's back what is left of a staged save, which the deputy has if there is a ``job``."""
    try:
        with _losing_nothing(steps):
            job = job or hand_over_save(steps, call, turn, wait=True)
            return write_save(steps, call, job, turn)
    finally:
        _release(steps, call, job)


@contextmanager
def _losing_nothing(steps: SaveSteps) -> Iterator[None]:
    """A save in memory that fails in the block, after its plan, is one that is not kept.

    It was to protect work, and none is lost where it does not. A state that was changed under it is told all the same.
    """
    try:
        yield
    except CheckpointException as error:
        torn = any(failure.error_type == TornStagingError.__name__ for failure in error.rank_failures)
        if not steps.in_memory or torn:
            raise
        causes = [failure.cause for failure in error.rank_failures if isinstance(failure.cause, StepNotKeptError)]
        raise (causes[0] if causes else StepNotKeptError(reason=first_line_of(error))) from error


def _release(steps: SaveSteps, call: Call, job: DeputyJob | None) -> None:
    """Let go of the memory: at once, or where a deputy may be at work in it when that has said that it is not."""
    if job is None or not call.deputy_at_work:
        steps.release(to_others=call.deputy_at_work)
        return
    try:
        threading.Thread(
            target=functools.partial(_release_later, steps, call, job), name="ray_dcp-release", daemon=True
        ).start()
    except RuntimeError:  # the system has no thread to give
        steps.release(to_others=True)


def _release_later(steps: SaveSteps, call: Call, job: DeputyJob) -> None:
    steps.release(to_others=not call.deputy_is_done(job))
