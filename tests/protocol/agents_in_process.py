"""A node agent in this process: real jobs, buffers and stores, and messages that are there at once."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from ray_dcp.protocol.deputy import Told
from ray_dcp.protocol.node_agent import DeputyJob, NodeAgent
from tests.protocol.handed_saves import DirectLink
from tests.slack import within


class ThreadAgent:
    """The ``Deputies`` of ranks that are threads: each job is a ``NodeAgent``'s, in a thread of that."""

    def __init__(self, coordinators: list[Any], name: str = "agent", before: Any = lambda what: None) -> None:
        self.agent = NodeAgent(DirectLink(coordinators, name, before, patience_s=within(60)), pulse_s=0.01)
        self.name, self._coordinators = name, coordinators
        self.is_up = threading.Event()
        """It takes nothing before."""
        self.is_up.set()
        self.is_gone = False
        self.taken: list[tuple[int, int]] = []
        """The rank and the number of the call of each job, in the order in which they came."""

    def die(self) -> None:
        """Be gone, as all hear at once; what it is at goes on, unseen."""
        self.is_gone = True
        self._coordinators[-1].deputy_lost(self.name, "killed")

    def ready(self, *, wait: bool) -> bool:
        return self.is_up.wait(within(60) if wait else 0) and not self.is_gone

    def take(self, job: DeputyJob, *, wait: bool) -> Told | None:
        if not self.ready(wait=wait):
            return None
        self.taken.append((job.handed_over.rank, pickle.loads(job.handed_over.call_id).number))
        return self.agent.take(job)

    def told(self, job: DeputyJob, look: Callable[[], object]) -> Told | None:
        answer: list[Told | None] = []
        asking = threading.Thread(
            target=lambda: answer.append(self.agent.told(job.handed_over.call_id, job.handed_over.rank)), daemon=True
        )
        asking.start()
        while asking.is_alive() and not self.is_gone:
            asking.join(0.01)
            look()
        return None if self.is_gone else answer[0]

    def kept_under(self, root: str) -> Any:
        return () if self.is_gone else self.agent.kept_under(root)

    def held(self, place: str) -> Any:
        return () if self.is_gone else self.agent.memory.held(place)

    def held_by_peers(self, place: str, keys: Any) -> Any:
        return ()
