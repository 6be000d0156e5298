"""``CoordinatorDoor``: the class of the coordinator's actor, for processes that do without torch.

Whoever is given an actor's handle imports the module of its class. A node's agent has no torch, and the coordinator
needs it: so this class knows only the names of what ``CoordinatorActor`` answers, and makes one in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ANSWERED = (
    *("join", "leave", "ranks_failed", "keep", "live_attempts", "generation"),
    *("contribute", "fail", "report_progress", "heartbeat"),
    *("hand_over", "hand_back", "deliver", "deputy_progress", "deputy_failed", "deputy_lost"),
)
"""The methods of ``CoordinatorActor``, each with the arguments that it has there."""


class CoordinatorDoor:
    """The coordinator's actor of group ``name``; see the module."""

    def __init__(self, name: str) -> None:
        from ray_dcp.cluster.coordinator_actor import CoordinatorActor

        self._actor = CoordinatorActor(name)


def _passed_on(name: str) -> Callable[..., Any]:
    async def answer(self: Any, *arguments: Any) -> Any:
        return await getattr(self._actor, name)(*arguments)

    answer.__name__, answer.__qualname__ = name, f"CoordinatorDoor.{name}"
    return answer


for _name in ANSWERED:
    setattr(CoordinatorDoor, _name, _passed_on(_name))
