"""Notes what Ray Train's controller does. Both sides have it; it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from recovery_parts import timeline
from recovery_parts.events import note


class Observer(ControllerCallback, WorkerGroupCallback):
    """Must be the first of the callbacks: what those after it do in a hook comes after its note."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        note(self._folder, timeline.DECIDED)

    @contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        note(self._folder, timeline.SHUTDOWN_BEGUN)
        yield
        note(self._folder, timeline.SHUTDOWN_DONE)

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        note(self._folder, timeline.GROUP_START, num_workers=worker_group_context.num_workers)
