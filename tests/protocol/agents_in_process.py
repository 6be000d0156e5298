"""A node agent in this process: real jobs, buffers and stores, and messages that are there at once."""

from __future__ import annotations

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
        self.alive = True
        self.taken: list[tuple[int, int]] = []
        """The rank, and how many jobs it had here, of each job in the order in which they came."""

    def take(self, job: DeputyJob, *, wait: bool) -> Told | None:
        if not self.alive:
            return None
        rank = job.handed_over.rank
        self.taken.append((rank, sum(one == rank for one, _ in self.taken)))
        return self.agent.take(job)

    def told(self, job: DeputyJob, look: Callable[[], object]) -> Told | None:
        answer: list[Told | None] = []
        asking = threading.Thread(
            target=lambda: answer.append(self.agent.told(job.handed_over.call_id, job.handed_over.rank)), daemon=True
        )
        asking.start()
        while asking.is_alive():
            asking.join(0.01)
            look()
        return answer[0]
