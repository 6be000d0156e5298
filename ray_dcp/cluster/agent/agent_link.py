"""``AgentLink``: a rank's way to the agent of its node, which takes its part of asynchronous saves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ray_dcp.cluster.agent.agent_actor import agents_of_node, find_agent, start_agent
from ray_dcp.cluster.agent.peer_agents import PeerAgents
from ray_dcp.protocol.deputy import Told
from ray_dcp.protocol.node_agent import KEPT_PATIENCE_S, DeputyJob
from ray_dcp.settings import Limits
from ray_dcp.staging.memory_tier import HeldFile, KeptSave
from ray_dcp.staging.peers.peer import PeerFile
from ray_dcp.wording import first_line_of

logger = logging.getLogger(__name__)

_AGENT_STARTS_IN_S = 20.0
"""How long a save's own thread waits for an agent that is starting: its rank then writes by itself."""
_TAKE_TIMEOUT_S = 5.0
"""How long the caller of an asynchronous save waits for an agent that is up, and mostly answers within milliseconds."""
_FROZEN_S = 20.0
"""An agent that does not even say that it is up for this long is ended, so that another one can take its place."""
_ASK_EVERY_S = 1.0
_HELD_TIMEOUT_S = 1.0
"""How long a load waits for an agent to say what it has in memory: then all is read from the store."""


class AgentLink:
    """The ``Deputies`` of one rank. The agent starts when it is first asked for, beside whatever the rank does."""

    def __init__(self, group: str, *, limits: Limits, has_memory: bool = True) -> None:
        """``has_memory``: whether loads look what the agent has in memory."""
        self._group = group
        self._has_memory = has_memory
        self._limits = limits
        self._lock = threading.Lock()
        self._handle: Any = None
        self._up: Any = None
        self._warned = False
        self._agents: dict[bytes, Any] = {}
        """Which agent has each job that is not over: while one goes on another may have taken its agent's place."""

    def start(self) -> tuple[Any, Any]:
        """The agent's handle, and a reference that is there once it is up; it starts, unless it is there."""
        with self._lock:
            if self._handle is None:
                self._handle = start_agent(self._group, self._limits)
                self._up = self._handle.is_up.remote()
            return self._handle, self._up

    def ready(self, *, wait: bool) -> bool:
        return self._found_up(wait=wait) is not None

    def _found_up(self, *, wait: bool) -> Any:
        """The handle of the agent, which is up. None where there is none, which is logged unless it may come yet."""
        agent, up = None, None
        try:
            agent, up = self.start()
            patience_s = _AGENT_STARTS_IN_S if wait and not self._warned else 0
            if not ray.wait([up], timeout=patience_s)[0]:
                if wait:  # later saves take it if it comes by then, and wait no more
                    self._say_once(f"has not started within {_AGENT_STARTS_IN_S:g} s")
                return None
            ray.get(up)
        except RayError as error:
            self._lost(agent, f"is not there: {first_line_of(error)}")
            return None
        return agent

    def take(self, job: DeputyJob, *, wait: bool) -> Told | None:
        """Give ``job`` to the agent. None where there is none: not yet, unless this is to ``wait`` for it, or no more.

        The rank then does it by itself, carefully where what is returned says ``taken_back``: an agent that does not
        answer may have the job.
        """
        agent = self._found_up(wait=wait)
        if agent is None:
            return None
        try:
            told: Told = ray.get(agent.take.remote(job), timeout=_TAKE_TIMEOUT_S)
        except RayTaskError as error:
            self._say_once(f"cannot write this rank's part: {first_line_of(error.cause)}")
            return None
        except (RayError, GetTimeoutError) as error:
            threading.Thread(target=_end_if_frozen, args=(agent,), daemon=True).start()
            self._lost(agent, f"does not answer: {first_line_of(error)}")
            return Told(taken_back=True)
        self._agents[job.handed_over.call_id] = agent
        return told

    def told(self, job: DeputyJob, look: Callable[[], object]) -> Told | None:
        """How the job has ended, once it has; None where the agent is gone, so that the rank does it by itself.

        One that does not even say that it is up is ended.
        """
        handed = job.handed_over
        agent = self._agents[handed.call_id]
        asked = agent.told.remote(handed.call_id, handed.rank)
        knock, knocked_s = None, 0.0
        try:
            while not ray.wait([asked], timeout=_ASK_EVERY_S)[0]:
                look()
                if knock is None:
                    knock, knocked_s = agent.is_up.remote(), time.monotonic()
                elif ray.wait([knock], timeout=0)[0]:
                    knock = None
                elif time.monotonic() - knocked_s > _FROZEN_S:
                    ray.kill(agent)
                    self._lost(agent, f"has not answered for {_FROZEN_S:g} s and was ended")
                    return None
            told: Told | None = ray.get(asked)
        except RayError as error:
            self._lost(agent, f"is gone: {first_line_of(error)}")
            return None
        self._agents.pop(handed.call_id, None)
        return told

    def held(self, place: str) -> Sequence[HeldFile]:
        """The files of the checkpoint at ``place`` that the node's agent has in memory.

        None where there is no agent, or it does not answer at once. No agent is started for this.
        """
        held: Sequence[HeldFile] = self._in_memory("held", place, _HELD_TIMEOUT_S)
        return held

    def kept_under(self, root: str) -> Sequence[KeptSave]:
        """What the node's agent has in memory of the saves below ``root``; nothing as with ``held``.

        It is waited for for some seconds, since it may itself wait for a save that a rank has left to it.
        """
        kept: Sequence[KeptSave] = self._in_memory("kept_under", root, KEPT_PATIENCE_S + _HELD_TIMEOUT_S)
        return kept

    def _in_memory(self, method: str, place: str, timeout_s: float) -> Any:
        agent = None
        try:
            agent = self._known() if self._has_memory else None
            return () if agent is None else ray.get(getattr(agent, method).remote(place), timeout=timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with an agent, a load has the storage
            logger.warning("the node agent of group %r does not say what it has in memory, so all is read from "
                           "storage: %s", self._group, first_line_of(error))  # fmt: skip
            if isinstance(error, RayActorError):
                self._forget(agent)
            return ()

    def held_by_peers(self, place: str, keys: Collection[str]) -> Sequence[PeerFile]:
        """The files of the checkpoint at ``place`` that the group's agents on other nodes have in memory.

        No more answers are waited for once there are all of ``keys``.
        """
        if not self._has_memory:
            return ()
        try:
            return PeerAgents(self._group).held(place, keys)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with an agent, a load has the storage
            logger.warning("the node agents of group %r on other nodes are not found, so nothing is read from their "
                           "memory: %s", self._group, first_line_of(error))  # fmt: skip
            return ()

    def leave(self, rank: int) -> None:
        """Tell the agent, if there is one, that ``rank`` leaves in order; nobody waits for it."""
        with suppress(RayError):
            agent = self._known() if self._has_memory else None
            if agent is not None:
                agent.left.remote(rank)

    def make_room(self) -> None:
        """Have the agents of this node let go of what they keep in memory: a rank has none to stage in.

        Agents of other groups do it where their group is gone. Returns when they have, or do not answer at once.
        """
        with suppress(RayError):
            asked = [agent.make_room.remote(self._group) for agent in agents_of_node()]
            ray.wait(asked, num_returns=len(asked), timeout=_HELD_TIMEOUT_S)

    def _known(self) -> Any:
        """The handle of this node's agent, also of one that another rank has started; None where none is up."""
        with self._lock:
            handle, up = self._handle, self._up
        if handle is None:
            return find_agent(self._group)
        return handle if ray.wait([up], timeout=0)[0] else None

    def _lost(self, agent: Any, how: str) -> None:
        """Let the next save start another agent in the place of ``agent``, unless that has been done."""
        self._forget(agent)
        self._say_once(how)

    def _forget(self, agent: Any) -> None:
        with self._lock:
            if self._handle is agent:
                self._handle = self._up = None

    def _say_once(self, what: str) -> None:
        log = logger.debug if self._warned else logger.warning
        self._warned = True
        log("the node agent of group %r %s; this rank writes by itself, and its death would lose the save", self._group,
            what)  # fmt: skip


def _end_if_frozen(agent: Any) -> None:
    with suppress(RayError):  # it is dead already
        if not ray.wait([agent.is_up.remote()], timeout=_FROZEN_S)[0]:
            ray.kill(agent)
