"""``DeputyMessages``: what a node agent says to its group's coordinator, as an actor's methods."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError

from ray_dcp.cluster.link import NAMESPACE, START_PATIENCE_S, CoordinatorLink
from ray_dcp.cluster.process import process_name
from ray_dcp.errors import CoordinatorLostError
from ray_dcp.protocol.deputy import Told
from ray_dcp.settings import Limits


class DeputyMessages:
    """The ``DeputyLink`` of one node agent. ``actor`` is its own handle, by which the coordinator sees it die."""

    def __init__(self, group: str, actor: Any, limits: Limits) -> None:
        self.group = group
        self._actor = actor
        self._name = process_name()
        self._link = CoordinatorLink(
            group, limits=limits, find=lambda: find_coordinator(group), start_patience_s=START_PATIENCE_S
        )

    def hand_over(self, call_id: bytes, rank: int) -> Told:
        return self._told(self._link.handle.hand_over.remote(call_id, rank, self._name, [self._actor]))

    def hand_back(self, call_id: bytes, rank: int, why: str) -> Told:
        return self._told(self._link.handle.hand_back.remote(call_id, rank, self._name, why))

    def deliver(self, call_id: bytes, rank: int, phase: str, message: bytes, again: bool) -> Told:
        return self._told(self._link.handle.deliver.remote(call_id, rank, phase, message, again))

    def fail(self, call_id: bytes, rank: int, error: bytes, traced: str) -> Told:
        return self._told(self._link.handle.deputy_failed.remote(call_id, rank, error, traced))

    def progress(self, call_id: bytes, rank: int, mark: int, nbytes: int) -> Told:
        return self._told(self._link.handle.deputy_progress.remote(call_id, rank, self._name, mark, nbytes))

    def reconnect(self) -> None:
        self._link.reconnect()

    def _told(self, reference: Any) -> Told:
        told: Told = self._link.ask(reference)
        return told


def find_coordinator(group: str) -> Any:
    """The handle of a group's coordinator, which is up. Raises ``RayActorError`` where there is none at the moment."""
    try:
        handle = ray.get_actor(f"coordinator/{group}", namespace=NAMESPACE)
    except ValueError as error:
        raise ActorDiedError(f"group {group!r} has no coordinator") from error
    try:
        ray.get(handle.generation.remote(), timeout=START_PATIENCE_S)
    except ray.exceptions.GetTimeoutError as error:
        raise CoordinatorLostError(f"it has not answered for {START_PATIENCE_S:g} s", group=group) from error
    return handle
