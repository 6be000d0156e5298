"""What ray_dcp changes in a run's ``TrainController``, from within its process. All of it is private in Ray.

Where an attribute that is needed is not there, ``AttributeError`` or ``KeyError`` is raised before anything is
changed, and the controller goes on as Ray made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import ray

from ray_dcp.cluster.ray_private import private
from ray_dcp.train.early_look import look_now

_MAX_WAIT_FOR_ANSWERS_S = 0.5
"""The longest wait for workers once a failure is known: on a lost node none answers, and Ray would wait for it until
its next look."""


class ControllerAccess:
    """The controller of this process, which is its actor."""

    def __init__(self) -> None:
        self._actor = ray.get_runtime_context().current_actor
        worker = private("global_worker")
        self._controller: Any = worker.actors[worker.actor_id]
        self.leaves_out = False
        """Whether nodes can be left out of a restart."""

    def look_now(self) -> None:
        """Let the controller look at its workers at once. From any thread."""
        self._actor.__ray_call__.remote(look_now)

    def listen(self) -> None:
        """Let ``look_now`` have an effect."""
        listen(self._controller)

    def leave_out(self, node_ids: Callable[[], frozenset[str]]) -> None:
        """Let the elastic policy count on no node that ``node_ids`` names when it asks what there is."""
        policy = self._controller._scaling_policy
        reserved = policy._get_reserved_resources

        def reserved_elsewhere() -> Any:
            found = reserved()
            if not found:
                return found
            gone = node_ids()
            return {node_id: resources for node_id, resources in found.items() if node_id not in gone}

        policy._get_reserved_resources = reserved_elsewhere
        self.leaves_out = True


def listen(controller: Any) -> None:
    poll, usual_s, _ = controller._poll_workers, controller._health_check_interval_s, controller._latest_poll_time
    told = asyncio.Event()

    async def poll_when_due_or_told() -> Any:
        if not await _told_within(told, controller._latest_poll_time + usual_s - time.monotonic()):
            return await poll()
        controller._latest_poll_time = -math.inf
        controller._health_check_interval_s = min(usual_s, _MAX_WAIT_FOR_ANSWERS_S)
        try:
            return await poll()
        finally:
            controller._health_check_interval_s = usual_s

    controller._ray_dcp_told = told
    controller._poll_workers = poll_when_due_or_told


async def _told_within(told: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(told.wait(), max(0.0, timeout_s))
    was_told = told.is_set()
    told.clear()
    return was_told
