"""An actor that takes ranks' parts of saves; it needs no torch, and is to be pickled by value."""

from __future__ import annotations

import sys
from typing import Any

import ray

from ray_dcp.cluster.process import process_name
from ray_dcp.protocol.deputy import DeputyCall, HandedOver, Told


class TorchlessAgent:
    """What a node's agent is to the coordinator."""

    def __init__(self, coordinator: Any) -> None:
        self.group = "by agents"
        self._coordinator = coordinator
        self._calls: list[DeputyCall] = []

    def take(self, handed_over: HandedOver) -> bool:
        """Whether the part is this agent's from now on."""
        self._calls.append(DeputyCall(handed_over, self))
        return not self._calls[-1].hand_over().failed

    def send(self, message: bytes) -> tuple[Told, bool]:
        """What it has been told of its last call, and whether it knows torch by now."""
        return self._calls[-1].deliver(message), "torch" in sys.modules

    def progress(self, call_id: bytes, rank: int) -> Told:
        return ray.get(self._coordinator.deputy_progress.remote(call_id, rank, process_name(), 1, 1))

    def give_up(self, error: Exception) -> Told:
        return self._calls[-1].fail(error)

    # As a ``DeputyLink``.

    def hand_over(self, call_id: bytes, rank: int) -> Told:
        itself = ray.get_runtime_context().current_actor
        return ray.get(self._coordinator.hand_over.remote(call_id, rank, process_name(), [itself]))

    def hand_back(self, call_id: bytes, rank: int, why: str) -> Told:
        return ray.get(self._coordinator.hand_back.remote(call_id, rank, process_name(), why))

    def deliver(self, call_id: bytes, rank: int, phase: str, message: bytes, again: bool) -> Told:
        return ray.get(self._coordinator.deliver.remote(call_id, rank, phase, message, again))

    def fail(self, call_id: bytes, rank: int, error: bytes, traced: str) -> Told:
        return ray.get(self._coordinator.deputy_failed.remote(call_id, rank, error, traced))

    def reconnect(self) -> None:
        """The handle finds the coordinator again."""
