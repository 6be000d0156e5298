"""The board: an actor on which workers note what they do, and from which the driver draws its picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker has loaded what there was to load and begins to train."""

    group: str
    """Which forming of the worker group it belongs to."""
    rank: int
    world_size: int
    node_id: str
    pid: int
    resumed_step: int
    at: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """All workers of a group have finished a step; ``loss`` is the mean over the global batch."""

    group: str
    world_size: int
    step: int
    loss: float
    at: float


@dataclass(frozen=True, slots=True)
class SaveReturned:
    """The training loop goes on after a save that took it ``seconds``."""

    group: str
    step: int
    seconds: float
    at: float


Note = WorkerStarted | StepDone | SaveReturned
_KINDS: dict[str, type[Note]] = {kind.__name__: kind for kind in (WorkerStarted, StepDone, SaveReturned)}


class _Notes:
    def __init__(self) -> None:
        self._notes: list[tuple[str, dict[str, Any]]] = []

    def add(self, kind: str, facts: dict[str, Any]) -> None:
        self._notes.append((kind, facts))

    def since(self, start: int) -> list[tuple[str, dict[str, Any]]]:
        return self._notes[start:]


class Board:
    """A handle that both sides use: workers pin without waiting, the driver reads what is new.

    The actor lives on the node that opened the board, and ends with the job that did.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._num_read = 0

    @classmethod
    def open(cls) -> Board:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return cls(ray.remote(num_cpus=0)(_Notes).options(scheduling_strategy=here).remote())

    def pin(self, note: Note) -> None:
        """Send a note on its way; training goes on at once. It may be lost when this process is killed now."""
        facts = {name: getattr(note, name) for name in note.__dataclass_fields__}
        self._actor.add.remote(type(note).__name__, facts)

    def read_new(self, timeout_s: float = 30.0) -> list[Note]:
        """Return the notes that were added since the last call, in order."""
        found = ray.get(self._actor.since.remote(self._num_read), timeout=timeout_s)
        self._num_read += len(found)
        return [_KINDS[kind](**facts) for kind, facts in found]
