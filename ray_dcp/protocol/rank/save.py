"""A rank's half of a save::

    state_dict -> collect -> local plan ==plan==> final plan -> [stage] -> write -> results ==write==> Metadata

``==`` are the two exchanges with the coordinator. ``save`` does all of it; an asynchronous save does ``plan_save``,
``stage_save`` and ``hand_over_save`` in the caller and ``finish_save`` behind its back. ``steps.SaveSteps`` plan and
write.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.errors import without_keys
from ray_dcp.gc_pause import collector_paused
from ray_dcp.planning.values.collect import collect_state
from ray_dcp.protocol.call import Call, agree, phase
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException
from ray_dcp.protocol.messages import PLAN_SAVE, WRITE
from ray_dcp.protocol.node_agent import DeputyJob
from ray_dcp.protocol.steps import SaveSteps
from ray_dcp.settings import DEFAULT_REPLICA_CHECK, Phase, ReplicaCheck
from ray_dcp.staging.buffer_pool import BufferPool
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


def save(request: SaveRequest, call: Call) -> Metadata:
    """Save this rank's part; returns when the checkpoint is committed and durable.

    Raises ``CheckpointException``; what this rank wrote is then removed.
    """
    return write_save(plan_save(request, call), call)


def plan_save(request: SaveRequest, call: Call) -> SaveSteps:
    """Collect the state and agree with all ranks on who writes what: a save whose final plan is known."""
    steps = request.steps
    with phase(call, Phase.COLLECT):
        state = collect_state(request.state_dict, call.rank)
    with phase(call, Phase.PLAN), steps.planning():
        reached(Point.BEFORE_PLAN)
        with collector_paused(), torch.no_grad():
            part = steps.plan(state, request.checkpoint_id, request.replica_check)
        answer = agree(call, PLAN_SAVE, part, steps.asked)
        steps.finish_plan(answer)
        reached(Point.AFTER_PLAN)
    return steps


def stage_save(steps: SaveSteps, call: Call, buffers: BufferPool) -> SaveSteps:
    """Copy what this rank will write, and only that: afterwards the state dict may change.

    Whoever has staged it gives the memory back with ``steps.release()``.
    """
    with phase(call, Phase.STAGE):
        steps.stage(buffers)
    return steps


def hand_over_save(steps: SaveSteps, call: Call, *, wait: bool = False) -> DeputyJob | None:
    """Give what is staged to this rank's deputy: from then on the save needs this process no more.

    None where it is to write by itself.
    """
    part = steps.staged_part()
    if part is None:
        return None
    with phase(call, Phase.WRITE):
        return call.hand_over(part, wait=wait)


def finish_save(steps: SaveSteps, call: Call, job: DeputyJob | None) -> Metadata:
    """Do behind the caller's back what is left of a staged save, which the deputy has if there is a ``job``."""
    try:
        return write_save(steps, call, job or hand_over_save(steps, call, wait=True))
    finally:
        steps.release(to_others=call.deputy_at_work)


def write_save(steps: SaveSteps, call: Call, job: DeputyJob | None = None) -> Metadata:
    """Write this rank's items, unless its deputy does, and wait for the commit."""
    try:
        committed = None if job is None else call.await_deputy(WRITE, job)
        if committed is None:
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
    metadata = steps.end(committed)
    if call.rank == 0 and steps.is_empty and not metadata.state_dict_metadata:
        logger.warning("%s: the state dict is empty on every rank", without_keys(call.checkpoint_id))
    return metadata


def _never_began_to_commit(error: CheckpointException) -> bool:
    """Whether the failure is some rank's own: then its results never arrived, and without them nothing is committed.

    Where the coordinator failed or is gone or has started over, or a commit on rank 0 had begun, ``.metadata`` may
    have been put: the files must stay.
    """
    return error.phase != Phase.COMMIT and all(failure.rank != COORDINATOR for failure in error.rank_failures)
