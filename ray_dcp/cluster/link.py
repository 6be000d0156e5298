"""``CoordinatorLink``: the way to the coordinator of a group, which may die and come back, for ranks and node agents.

It starts without torch, which node agents do without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ray_dcp.errors import CoordinatorLostError, GroupError
from ray_dcp.settings import Limits
from ray_dcp.wording import first_line_of

NAMESPACE = "ray_dcp"
"""The namespace of ray_dcp's keys in Ray's key-value store, and of the actors that it names."""
START_PATIENCE_S = 120.0
"""How long the first answer of a coordinator may take: its process has to start and to import torch."""
_LOOK_EVERY_S = 1.0
_RETRY_S = 0.1


class CoordinatorLink:
    """The way of one rank, or one node agent, to the coordinator of one group; all its calls share it.

    ``find`` returns the handle of a coordinator that is up; ``start_patience_s``: what its process may take to start.
    """

    def __init__(self, group: str, *, limits: Limits, find: Callable[[], Any], start_patience_s: float) -> None:
        self.group = group
        self._start_patience_s = start_patience_s
        self._limits = limits
        self._find = find
        self._handle = find()
        self._connection = connection_of_process()

    @property
    def is_connected(self) -> bool:
        """Whether this process is still connected to the cluster in which it joined."""
        return self._connection == connection_of_process()

    @property
    def handle(self) -> Any:
        """The handle of the coordinator as last seen. Raises ``GroupError`` after ``ray.shutdown()``."""
        self._require_connected()
        return self._handle

    def ask(self, reference: Any) -> Any:
        """The answer to a question, however long it takes, as long as the coordinator lives and answers at all.

        Raises ``CoordinatorLostError`` when it does not.
        """
        knock, knocked_s = None, time.monotonic()
        while True:
            self._require_connected()
            try:
                with suppress(GetTimeoutError):
                    return ray.get(reference, timeout=_LOOK_EVERY_S)
                if knock is None:
                    knock, knocked_s = self._handle.generation.remote(), time.monotonic()
                elif ray.wait([knock], timeout=0)[0]:
                    ray.get(knock)
                    knock = None
            except RayActorError as error:
                raise CoordinatorLostError(first_line_of(error), group=self.group) from error
            if knock is not None and time.monotonic() - knocked_s > self._limits.coordinator_timeout_s:
                self._give_up_on_frozen()

    def reconnect(self) -> None:
        """Return when there is a coordinator again. Raises ``CoordinatorLostError`` when none comes in time.

        While Ray starts its process it says that the coordinator is unavailable, which is not what the user's limit is
        about: however soon a frozen one is to be replaced, a new one takes what a process takes on this machine.
        """
        deadline = time.monotonic() + self._limits.coordinator_timeout_s + self._start_patience_s
        while True:
            self._require_connected()
            try:
                self._handle = self._find()
                return
            except RayActorError as error:
                if time.monotonic() > deadline:
                    raise CoordinatorLostError(first_line_of(error), group=self.group) from error
            time.sleep(_RETRY_S)

    def _require_connected(self) -> None:
        """Raise ``GroupError`` after ``ray.shutdown()``: a message would then start a cluster of its own."""
        if not self.is_connected:
            raise GroupError(
                "this process has left the Ray cluster in which it joined (ray.shutdown()). Join again",
                group=self.group,
            )

    def _give_up_on_frozen(self) -> None:
        """Have Ray replace a coordinator whose process does not even say its generation."""
        ray.kill(self._handle, no_restart=False)
        raise CoordinatorLostError(
            f"it has not answered for {self._limits.coordinator_timeout_s:g} s (coordinator_timeout_s)",
            group=self.group,
        )


def connection_of_process() -> tuple[str, str] | None:
    """A name (node, job) for this process's connection to Ray, which ``ray.shutdown()`` ends; None without one."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()
