"""A rank's half of a warm-up: all of a save that needs no save, ahead of the first one."""

from __future__ import annotations

import logging
import os

import torch

from ray_dcp.gc_pause import collector_paused
from ray_dcp.planning.values.collect import collect_state
from ray_dcp.protocol.call import Call, phase
from ray_dcp.protocol.messages import PLAN_WARM_UP
from ray_dcp.protocol.rank.save import SaveRequest
from ray_dcp.settings import Phase, staging_nbytes_from
from ray_dcp.staging.buffer_errors import StagingMemoryError
from ray_dcp.staging.buffer_pool import BufferPool

logger = logging.getLogger("ray_dcp")


def warm_up(request: SaveRequest, call: Call, buffers: BufferPool) -> int:
    """Have the deputy up, and all ``buffers`` ready for what this rank would stage now; returns how many bytes that is.

    Raises ``CheckpointException``. That there is no memory is no failure: a save goes on without, and says so.
    """
    call.ready_deputy(wait=False)  # it starts beside the rest
    steps = request.steps
    with phase(call, Phase.COLLECT):
        state = collect_state(request.state_dict, call.rank)
    with phase(call, Phase.PLAN), steps.planning():
        with collector_paused(), torch.no_grad():
            part = steps.plan(state, request.checkpoint_id, request.replica_check)
        answer = call.exchange(PLAN_WARM_UP, part)
    nbytes = 0
    if answer is not None:
        with phase(call, Phase.STAGE), torch.no_grad():
            steps.finish_plan(answer)
            nbytes = steps.nbytes_to_stage()
            if nbytes:
                _prepare(buffers, nbytes)
    call.ready_deputy(wait=True)
    return nbytes


def _prepare(buffers: BufferPool, nbytes: int) -> None:
    try:
        buffers.prepare(nbytes, max_nbytes=staging_nbytes_from(os.environ))
    except StagingMemoryError as error:
        logger.warning(
            "%s; asynchronous saves that find no buffer are written before the call returns. Give the process more "
            "memory, or have fewer saves in flight (max_in_flight=)",
            error,
        )
