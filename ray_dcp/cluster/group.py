"""``RankGroup``: who the ranks of a save or load are, and a rank's way to their coordinator."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import ray
import tenacity

from ray_dcp.cluster import current
from ray_dcp.cluster.agent.agent_link import AgentLink
from ray_dcp.cluster.coordinator_actor import ensure_coordinator
from ray_dcp.cluster.link import START_PATIENCE_S, CoordinatorLink
from ray_dcp.cluster.process import before_actor_ends, process_name, require_own_connection
from ray_dcp.cluster.pulse import Pulse
from ray_dcp.errors import ConfigError, CoordinatorLostError, GroupError
from ray_dcp.protocol.call import phase
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.protocol.messages import ARRIVE, CallId
from ray_dcp.protocol.rank.background import BackgroundSaves, finish_and_tell
from ray_dcp.protocol.rank.remote_call import RemoteCall
from ray_dcp.settings import Limits, Phase, agents_from, memory_keep_from, memory_tier_from

_LEAVE_AGAIN_S = 0.2


class RankGroup:
    """This process as one rank of a named group. Made by ``join``.

    All ranks must make the same saves, loads and barriers in the same order. Usable as ``with group:``, within which
    it is the ``current_group()``.
    """

    def __init__(self, request: JoinRequest, link: CoordinatorLink, generation: int) -> None:
        self.name = link.group
        self.rank = request.rank
        self.world_size = request.world_size
        self.limits = request.limits
        self.generation = generation
        has_agent = agents_from(os.environ)
        has_memory = memory_tier_from(os.environ)
        memory_keep_from(os.environ)  # which is refused here, where it is set, and not in the agent
        self._link = link
        self._pulse = Pulse(
            link,
            rank=request.rank,
            world_size=request.world_size,
            member=request.member if request.beats else None,
            heartbeat_timeout_s=request.limits.heartbeat_timeout_s,
        )
        self._agent = AgentLink(self.name, limits=self.limits, has_memory=has_memory) if has_agent else None
        self.background = BackgroundSaves(
            spares_newest=has_agent and has_memory, make_room=None if self._agent is None else self._agent.make_room
        )
        self._num_calls = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def join(
        cls,
        name: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float = 60.0,
        limits: Limits | None = None,
        incarnation: str | None = None,
    ) -> RankGroup:
        """Join group ``name`` as ``rank``; returns when all ``world_size`` ranks have.

        Works in any process that is connected to a Ray cluster. A set of ranks that has gathered is a new
        *generation* of the group; calls of older ones are refused from then on. ``incarnation``, where given, is the
        same for processes started together: those of a newer one replace an older one that is still waiting.
        ``limits``: how long the ranks of this group wait for what, the same on all of them; by default what the
        environment says (``RAY_DCP_STALL_TIMEOUT_S`` and so on, see ``Limits``).

        Raises ``JoinTimeoutError`` naming the ranks that did not come within ``timeout_s`` (the time it takes to
        start the coordinator does not count), ``RankConflictError`` where another process has this rank, and
        ``GroupError`` where this process is not connected to Ray.
        """
        _require_valid(name, rank, world_size, timeout_s)
        request = JoinRequest(
            rank=rank,
            world_size=world_size,
            member=_member_name(rank),
            incarnation=incarnation,
            limits=limits if limits is not None else Limits.from_variables(os.environ),
            beats=not ray.get_runtime_context().get_actor_id(),
        )
        group = cls(request, *_join(name, request, timeout_s))
        current.set_joined(group)
        if request.beats:
            atexit.register(group._end)  # not an actor, whose death Ray would tell of
        else:
            _finish_before_actor_ends(request.limits.finish_timeout_s)
        return group

    def start_call(self, kind: str, checkpoint_id: str = "") -> RemoteCall:
        """This rank's end of the group's next save, load or barrier. Raises ``GroupError`` when the group is closed."""
        require_own_connection(self._pid)
        if self._closed:
            raise GroupError("this group is closed", group=self.name)
        with self._lock:
            call_id = CallId.named(self.generation, self._num_calls, kind, checkpoint_id)
            self._num_calls += 1

        call = RemoteCall(
            rank=self.rank,
            world_size=self.world_size,
            kind=kind,
            checkpoint_id=checkpoint_id,
            link=CallLink(self._link, call_id, self.rank, lambda: self.background.numbers_in_flight(call_id.number)),
            call_id=call_id,
            deputies=self._agent,
        )
        self._pulse.watch(call_id, call)
        return call

    def barrier(self) -> None:
        """Return when every rank has called this. Raises ``CheckpointException`` when a rank is lost."""
        call = self.start_call("barrier")
        with phase(call, Phase.ARRIVE):
            call.exchange(ARRIVE, None)

    def close(self) -> None:
        """Leave the group, after the asynchronous save under way, if any. Idempotent; the last rank ends the group.

        Raises ``EarlierSaveError``, when it has left, where a save failed and nobody had looked.
        """
        self._end()
        self.background.tell_earlier("close", None)

    def _end(self) -> None:
        """Leave the group; saves that failed stay untold."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return  # a fork of the rank: it is not the one to leave
        atexit.unregister(self._end)
        current.forget_joined(self)
        try:
            self.background.settle()
            self.background.buffers.close()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._pulse.end()
        if not self._link.is_connected:
            return  # it was seen to leave with its connection
        if self._agent is not None:
            self._agent.leave(self.rank)
        for _ in range(2):  # a coordinator that is just starting again must not wait for this rank
            try:
                ray.get(self._link.handle.leave.remote(self.generation, self.rank), timeout=10)
            except ray.exceptions.RayActorError:
                time.sleep(_LEAVE_AGAIN_S)
            except ray.exceptions.GetTimeoutError:
                return
            else:
                return

    def __enter__(self) -> RankGroup:
        current.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.leave(self)

    def __repr__(self) -> str:
        return f"RankGroup({self.name!r}, rank={self.rank}, world_size={self.world_size}, generation={self.generation})"


class CallLink:
    """The ``Link`` of one call."""

    def __init__(
        self, link: CoordinatorLink, call_id: CallId, rank: int, in_flight: Callable[[], tuple[int, ...]]
    ) -> None:
        """``in_flight``: the numbers of this rank's earlier saves that go on, as it begins, or begins again."""
        self._link = link
        self._in_flight = in_flight
        self._call_id = replace(call_id, behind=in_flight())
        self._rank = rank
        self._again = False

    def send(self, phase: Phase, message: bytes) -> bytes:
        asked = self._link.handle.contribute.remote(self._call_id, self._rank, str(phase), message, self._again)
        answer: bytes = self._link.ask(asked).unwrap()
        return answer

    def tell(self, failure: RankFailure) -> None:
        self._link.ask(self._link.handle.fail.remote(self._call_id, self._rank, failure)).unwrap()

    def reconnect(self) -> None:
        self._again = True
        self._link.reconnect()
        self._call_id = replace(self._call_id, behind=self._in_flight())


@functools.cache  # once in a process is enough
def _finish_before_actor_ends(timeout_s: float) -> None:
    before_actor_ends(lambda: finish_and_tell(timeout_s))


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(CoordinatorLostError),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_random_exponential(multiplier=0.1, max=1),
    reraise=True,
)
def _join(name: str, request: JoinRequest, timeout_s: float) -> tuple[CoordinatorLink, int]:
    """A link to the coordinator, and the generation joined. One that was about to end is replaced by a new one."""
    link = CoordinatorLink(
        name, limits=request.limits, find=lambda: ensure_coordinator(name), start_patience_s=START_PATIENCE_S
    )
    actor = [] if request.beats else [ray.get_runtime_context().current_actor]
    return link, link.ask(link.handle.join.remote(request, timeout_s, actor)).unwrap()


def _member_name(rank: int) -> str:
    """A name for this process in one joining: it may join again, as another member."""
    return f"{process_name()} as rank {rank} ({uuid.uuid4().hex[:8]})"


def _require_valid(name: str, rank: int, world_size: int, timeout_s: float) -> None:
    require_own_connection()
    if not name or not isinstance(name, str):
        raise ConfigError("name", "a group needs a name, the same on all ranks")
    if world_size < 1:
        raise ConfigError("world_size", f"{world_size} is below 1")
    if not 0 <= rank < world_size:
        raise ConfigError("rank", f"{rank} is not between 0 and world_size - 1 = {world_size - 1}")
    if not timeout_s > 0:
        raise ConfigError("timeout_s", f"{timeout_s} is not above 0")
    if not ray.is_initialized():
        raise GroupError("this process is not connected to Ray; call ray.init() first", group=name)
