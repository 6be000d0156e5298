"""A rank's half of a save::

    state_dict -> collect -> local plan ==plan==> final plan -> [stage] -> write -> results ==write==> Metadata

``==`` are the two exchanges with the coordinator. ``save`` does all of it; an asynchronous save does it in pieces
(``async_save``). ``steps.SaveSteps`` plan and write.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.errors import without_keys
from ray_dcp.gc_pause import collector_paused
from ray_dcp.planning.values.collect import collect_state
from ray_dcp.protocol.call import Call, agree, phase
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException
from ray_dcp.protocol.memory_steps import KeptInMemory
from ray_dcp.protocol.messages import PLAN_SAVE, WRITE, Busy, SaveSkipped
from ray_dcp.protocol.node_agent import DeputyJob
from ray_dcp.protocol.steps import SaveSteps
from ray_dcp.protocol.turns import Turn
from ray_dcp.settings import DEFAULT_REPLICA_CHECK, Phase, ReplicaCheck
from ray_dcp.staging.buffer_errors import SaveSkippedError, StepNotKeptError
from ray_dcp.trace_points import Point, reached

logger = logging.getLogger("ray_dcp")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the user asks of this rank."""

    state_dict: Mapping[str, Any]
    checkpoint_id: str
    steps: SaveSteps
    """Who plans and writes it."""
    replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK
    busy: Busy | None = None
    """What this rank says with its plan where it is not to wait and has too many saves in flight."""


def save(request: SaveRequest, call: Call) -> Metadata:
    """Save this rank's part; returns when the checkpoint is committed and durable.

    Raises ``CheckpointException``; what this rank wrote is then removed.
    """
    return write_save(plan_save(request, call), call)


def plan_save(request: SaveRequest, call: Call) -> SaveSteps:
    """Collect the state and agree with all ranks on who writes what: a save whose final plan is known.

    Raises ``SaveSkippedError`` where ranks are busy and the save is to be skipped then, and ``StepNotKeptError`` where
    one in memory cannot be kept: it is over on all ranks.
    """
    steps = request.steps
    with phase(call, Phase.COLLECT):
        state = collect_state(request.state_dict, call.rank)
    with phase(call, Phase.PLAN), steps.planning():
        reached(Point.BEFORE_PLAN)
        with collector_paused(), torch.no_grad():
            part = replace(
                steps.plan(state, request.checkpoint_id, request.replica_check),
                busy=request.busy,
                in_memory=steps.in_memory,
                unkept=call.why_not_kept if steps.in_memory else "",
            )
        answer = agree(call, PLAN_SAVE, part, steps.asked)
        if not isinstance(answer, SaveSkipped):
            steps.finish_plan(answer)
            reached(Point.AFTER_PLAN)
    if isinstance(answer, SaveSkipped) and answer.unkept:
        raise StepNotKeptError(reason=answer.unkept)
    if isinstance(answer, SaveSkipped):
        raise SaveSkippedError(max_in_flight=answer.max_in_flight, busy_ranks=answer.busy_ranks)
    return steps


def write_save(steps: SaveSteps, call: Call, job: DeputyJob | None = None, turn: Turn | None = None) -> Metadata:
    """Write this rank's items, unless its deputy does that ``job``, and wait for the commit.

    Where it has a ``turn`` among other saves of this rank, it is written when the earlier ones are over.
    """
    try:
        committed = None if job is None else call.await_deputy(WRITE, job, turn)
        if committed is None:
            if turn is not None:
                turn.wait_to_write()
            with phase(call, Phase.WRITE):
                with torch.no_grad():
                    results = steps.write(again=job is not None)
                reached(Point.BEFORE_RESULT)
            committed = agree(call, WRITE, results, steps.asked)
    except CheckpointException as error:
        found = steps.committed_by_then() if call.started_over else None
        if found is None:
            if not call.started_over and _never_began_to_commit(error):
                steps.abandon()
            raise
        committed = found
    metadata = steps.end(committed.committed if isinstance(committed, KeptInMemory) else committed)
    if call.rank == 0 and steps.is_empty and not metadata.state_dict_metadata:
        logger.warning("%s: the state dict is empty on every rank", without_keys(call.checkpoint_id))
    return metadata


def _never_began_to_commit(error: CheckpointException) -> bool:
    """Whether the failure is some rank's own: then its results never arrived, and without them nothing is committed.

    Where the coordinator failed or is gone or has started over, or a commit on rank 0 had begun, ``.metadata`` may
    have been put: the files must stay.
    """
    return error.phase != Phase.COMMIT and all(failure.rank != COORDINATOR for failure in error.rank_failures)
