"""Let Ray Train's controller look at its workers when one has failed, not only every two seconds.

``look_now`` is called in the controller's actor, ``ActorWatch`` in its process, ``tell_of_own_failure`` in each worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray_dcp.cluster.ray_private import private

logger = logging.getLogger(__name__)

_FAILURE_LOOK_S = 0.1
_DEAD = 4
"""``ActorTableData.ActorState.DEAD``."""


def look_now(controller: Any) -> None:
    """Let ``controller`` look at its workers at once, if it listens."""
    told = getattr(controller, "_ray_dcp_told", None)
    if told is not None:
        told.set()


class ActorWatch:
    """A thread that calls back once for each of some actors that dies.

    It asks this process only, which Ray tells of the deaths of actors that it has called; nothing is sent.
    """

    def __init__(self, actors: Sequence[Any], on_death: Callable[[], None]) -> None:
        self._actors = list(actors)
        self._on_death = on_death
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="ray_dcp-actor-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        try:
            while self._actors and not self._stopped.wait(_FAILURE_LOOK_S):
                alive = [actor for actor in self._actors if actor._get_local_state() != _DEAD]
                if len(alive) < len(self._actors) and not self._stopped.is_set():
                    self._on_death()
                self._actors = alive
        except Exception as error:  # noqa: BLE001 - a private question to Ray: without it, a death is noticed later
            logger.warning("deaths of workers are noticed at Ray Train's next look only: %r", error)


def tell_of_own_failure() -> None:
    """Start a thread in a worker that tells the controller as soon as this worker's train function has raised."""
    context = private("get_train_context")()
    runner, controller = context.execution_context.training_thread_runner, context.controller_actor

    def watch() -> None:
        try:
            while runner.get_error() is None:
                time.sleep(_FAILURE_LOOK_S)
            controller.__ray_call__.remote(look_now)
        except Exception as error:  # noqa: BLE001 - the controller looks by itself, later
            logger.debug("could not tell the controller of a failure: %r", error)

    threading.Thread(target=watch, name="ray_dcp-own-failure", daemon=True).start()
