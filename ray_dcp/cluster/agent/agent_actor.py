"""The actor around a ``NodeAgent``: one a node and group, in a process without torch, at the lowest priority.

It is detached, so that no rank's death takes it along, and ends by itself when its group has had no coordinator for a
while and nothing is left to write. What it has in memory of ranks that were killed keeps it a little longer.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.cluster.agent.deputy_messages import DeputyMessages
from ray_dcp.cluster.agent.peer_agents import READS, PeerAgents, agent_name
from ray_dcp.cluster.link import NAMESPACE
from ray_dcp.protocol.deputy import Told
from ray_dcp.protocol.node_agent import DeputyJob, NodeAgent
from ray_dcp.settings import Limits
from ray_dcp.staging.memory_tier import HeldFile, KeptSave
from ray_dcp.staging.peers.peer_copies import CopyOffer

_NUM_THREADS = 256
"""Threads of the actor: each rank of the node has one or two in it."""
_NUM_READS = 8
"""Threads of the actor that send to other nodes what is in memory: beside all else, and no more of them."""
_SEE_COORDINATOR_EVERY_S = 5.0
_NUM_LOOKS = 2
"""An agent that has seen no coordinator so many times in a row ends: a group that re-forms has one all the time."""
_LOWEST_PRIORITY = 19


class AgentActor:
    """See the module. Each method is a shell around one of ``NodeAgent``."""

    def __init__(self, group: str, limits: Limits) -> None:
        os.nice(_LOWEST_PRIORITY)  # training comes first
        self._group = group
        actor = ray.get_runtime_context().current_actor
        self._agent = NodeAgent(DeputyMessages(group, actor, limits), others=PeerAgents(group))
        threading.Thread(target=self._end_when_unneeded, args=(actor,), name="agent-end", daemon=True).start()

    def is_up(self) -> bool:
        return True

    def take(self, job: DeputyJob) -> Told:
        return self._agent.take(job)

    def told(self, call_id: bytes, rank: int) -> Told | None:
        return self._agent.told(call_id, rank)

    def held(self, place: str) -> tuple[HeldFile, ...]:
        return self._agent.memory.held(place)

    def kept_under(self, root: str) -> tuple[KeptSave, ...]:
        return self._agent.kept_under(root)

    def left(self, rank: int) -> None:
        self._agent.left(rank)

    @ray.method(concurrency_group=READS)
    def read(self, file: HeldFile, offset: int, nbytes: int) -> bytes | None:
        return self._agent.memory.read(file, offset, nbytes)

    def take_copy(self, offer: CopyOffer) -> bool:
        return self._agent.copies is not None and self._agent.copies.take(offer)

    def source_left(self, rank: int) -> None:
        self._agent.memory.left(rank)

    def make_room(self, group: str) -> None:
        """Let go of what is in memory, for ``group``: another group's, where this one is gone."""
        if group == self._group or not _has_coordinator(self._group):
            self._agent.make_room()

    def group_ended(self) -> None:
        self._agent.memory.all_left()

    def _end_when_unneeded(self, actor: Any) -> None:
        num_missing = 0
        while num_missing < self._num_looks:
            threading.Event().wait(_SEE_COORDINATOR_EVERY_S)
            num_missing = 0 if self._agent.num_open or _has_coordinator(self._group) else num_missing + 1
        with suppress(Exception):  # it is gone, or its cluster is
            ray.kill(actor)

    @property
    def _num_looks(self) -> int:
        """How many times in a row it sees no coordinator before it ends: more, where ranks may come for its memory."""
        if not self._agent.memory.is_for_later:
            return _NUM_LOOKS
        return _NUM_LOOKS + math.ceil(self._agent.keeps_for_s / _SEE_COORDINATOR_EVERY_S)


def _has_coordinator(group: str) -> bool:
    try:
        ray.get_actor(f"coordinator/{group}", namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def find_agent(group: str) -> Any:
    """The handle of this node's agent for ``group``, which may be starting; None where there is none."""
    try:
        return ray.get_actor(agent_name(group, ray.get_runtime_context().get_node_id()), namespace=NAMESPACE)
    except ValueError:
        return None


def tell_agents_of_end(group: str) -> None:
    """Have all agents of ``group``, on whatever node, keep nothing in memory for when it forms anew."""
    with suppress(RayError):  # they end by themselves, later
        for agent in _agents(lambda name: name.startswith(agent_name(group, ""))):
            agent.group_ended.remote()


def agents_of_node() -> list[Any]:
    """The handles of all agents of this node, of whatever group."""
    node_id = ray.get_runtime_context().get_node_id()
    return _agents(lambda name: name.startswith(agent_name("", "")[:-1]) and name.endswith(f"/{node_id}"))


def _agents(is_meant: Callable[[str], bool]) -> list[Any]:
    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and is_meant(actor["name"]):
            with suppress(ValueError):  # it has ended meanwhile
                found.append(ray.get_actor(actor["name"], namespace=NAMESPACE))
    return found


def start_agent(group: str, limits: Limits) -> Any:
    """The handle of this node's agent for ``group``: found, or about to start."""
    node_id = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(num_cpus=0, concurrency_groups={READS: _NUM_READS})(AgentActor)
        .options(
            name=agent_name(group, node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=_NUM_THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(group, limits)
    )
