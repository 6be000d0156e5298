"""An asynchronous save whose whole state dict a user's ``AsyncStager`` copies, instead of what the rank will write."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from ray_dcp.planning.values.collect import collect_state
from ray_dcp.protocol.call import Call, phase
from ray_dcp.protocol.rank.save import SaveRequest
from ray_dcp.settings import Phase


def staged_by(stager: AsyncStager, request: SaveRequest, call: Call) -> SaveRequest | Future[dict[str, Any]]:
    """``request`` with its whole state dict staged by the user's stager; the stager's future where it still stages."""
    with phase(call, Phase.COLLECT):
        state = collect_state(request.state_dict, call.rank)
    with phase(call, Phase.STAGE):
        staged = stager.stage(state)
        if isinstance(staged, Future):
            return staged
        # Torch asks for it when the save has begun in its thread, which may then find nothing staged yet.
        if stager.should_synchronize_after_execute:
            stager.synchronize_staging()
    return replace(request, state_dict=staged)


def when_staged(staging: Future[dict[str, Any]], request: SaveRequest, call: Call) -> SaveRequest:
    """``request`` with what a user's stager has staged, once it has."""
    with phase(call, Phase.STAGE):
        return replace(request, state_dict=staging.result())
