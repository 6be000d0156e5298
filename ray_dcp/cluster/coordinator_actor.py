"""The actor around a ``Coordinator``: it awaits its futures, watches its ranks, and ends when nobody needs it.

It is detached, so that no rank's death takes it along, and ends by itself: at once when the last rank has closed the
group, a little later when all have died, never while a keeper (a Ray Train controller) lives.

When its process dies Ray starts it again. It then finds its group in Ray's key-value store, watches the ranks as
before, and the ranks send again what they had sent in calls that go on.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import tenacity
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.cluster.agent.agent_actor import tell_agents_of_end
from ray_dcp.cluster.coordinator_door import CoordinatorDoor
from ray_dcp.cluster.group_record import GroupRecord, end_record, read_record, write_record
from ray_dcp.cluster.link import NAMESPACE, START_PATIENCE_S
from ray_dcp.cluster.process import process_name_of
from ray_dcp.errors import CoordinatorLostError, GroupError, JoinTimeoutError, RayDcpError
from ray_dcp.maintenance.sweep.after_save import SweepAfterSave
from ray_dcp.protocol.coordinator.coordinator import CHECK_INTERVAL_S, Coordinator, CoordinatorRecord
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.deputy import Told
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.protocol.messages import CallId, decode_call_id, told_to_deputy
from ray_dcp.settings import Phase
from ray_dcp.wording import first_line_of

_PING_INTERVAL_S = 0.5
_LINGER_S = 10.0
"""How long it stays without ranks: a group that re-forms after a failure finds its coordinator still there."""
_FIRST_JOIN_S = 120.0
_HEAD_RESOURCE = "node:__internal_head__"
_MAX_CONCURRENCY = 20_000
"""Calls of the actor in flight: one waits per rank."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer or an error, which is returned since Ray wraps what an actor raises."""

    answer: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer


class CoordinatorActor:
    """The coordinator's actor, behind a ``CoordinatorDoor``. Each method is a shell around one of ``Coordinator``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._sweep = SweepAfterSave(lambda: self._coordinator.attempts)
        self._coordinator = Coordinator(
            name, execute=_in_a_thread, on_save_ended=self._sweep.save_ended, keep=self._write_record
        )
        self._actors: dict[str, Any] = {}
        self._keepers: list[Any] = []
        self._recorded: tuple[CoordinatorRecord, int] | None = None
        self._needed_until = time.monotonic() + _FIRST_JOIN_S
        self._deputies: set[str] = set()
        """The deputies that are watched."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        gc.freeze()  # what torch has made stays; a walk over it would hold up every rank for 0.1 s

    async def _start(self) -> None:
        """When asked for the first time, go on with the group of an earlier coordinator, if there was one."""
        if self._started:
            return
        self._started = True
        record = read_record(self._name)
        self._coordinator.restore(record.coordinator)
        for member, handle in record.actors.items():
            self._watch_actor(member, handle)
        for keeper in record.keepers:
            self._watch_keeper(keeper)
        self._spawn(self._check_limits())
        self._spawn(self._end_when_unneeded())

    async def join(self, request: JoinRequest, timeout_s: float, actor: list[Any]) -> Outcome:
        await self._start()
        try:
            future = self._coordinator.join(request)
        except GroupError as error:
            return Outcome(error=error)
        self._actors = {member: handle for member, handle in self._actors.items() if self._coordinator.knows(member)}
        for handle in actor:
            self._watch_actor(request.member, handle)
        self._coordinator.keep_record()
        try:
            return Outcome(await asyncio.wait_for(asyncio.wrap_future(future), timeout_s))
        except asyncio.TimeoutError:
            missing = self._coordinator.withdraw(request)
            self._needed_until = time.monotonic() + _LINGER_S
            return Outcome(
                error=JoinTimeoutError(
                    group=self._name, world_size=request.world_size, missing_ranks=missing, timeout_s=timeout_s
                )
            )
        except GroupError as error:
            return Outcome(error=error)

    async def contribute(self, call_id: CallId, rank: int, phase: str, message: bytes, again: bool = False) -> Outcome:
        await self._start()
        try:
            future = self._coordinator.contribute(call_id, rank, Phase(phase), message, again=again)
            return Outcome(await asyncio.wrap_future(future))
        except RayDcpError as error:
            return Outcome(error=error)

    async def report_progress(self, call_id: CallId, rank: int, phase: str, mark: int, nbytes: int) -> Outcome:
        await self._start()
        try:
            return Outcome(self._coordinator.report_progress(call_id, rank, Phase(phase), mark, nbytes))
        except GroupError as error:
            return Outcome(error=error)

    async def heartbeat(self, member: str) -> None:
        await self._start()
        self._coordinator.heartbeat(member)

    # For deputies: processes without torch, which cannot read what the methods above take and return.

    async def hand_over(self, call_id: bytes, rank: int, deputy: str, actor: list[Any]) -> Told:
        await self._start()
        told = told_to_deputy(lambda: self._coordinator.hand_over(decode_call_id(call_id), rank, deputy))
        self._watch_deputy(deputy, actor[0])
        return told

    async def hand_back(self, call_id: bytes, rank: int, deputy: str, why: str) -> Told:
        await self._start()
        return told_to_deputy(lambda: self._coordinator.hand_back(decode_call_id(call_id), rank, deputy, why))

    async def deliver(self, call_id: bytes, rank: int, phase: str, message: bytes, again: bool) -> Told:
        outcome = await self.contribute(decode_call_id(call_id), rank, phase, message, again)
        return told_to_deputy(outcome.unwrap)

    async def deputy_progress(self, call_id: bytes, rank: int, deputy: str, mark: int, nbytes: int) -> Told:
        await self._start()
        return told_to_deputy(
            lambda: self._coordinator.deputy_progress(decode_call_id(call_id), rank, deputy, mark, nbytes)
        )

    async def deputy_failed(self, call_id: bytes, rank: int, error: bytes, traced: str) -> Told:
        failure = RankFailure.of_deputy(error, rank=rank, phase=Phase.WRITE, traced=traced)
        outcome = await self.fail(decode_call_id(call_id), rank, failure)
        return told_to_deputy(outcome.unwrap)

    async def deputy_lost(self, deputy: str, why: str) -> None:
        await self._start()
        self._coordinator.deputy_lost(deputy, why)

    async def fail(self, call_id: CallId, rank: int, failure: RankFailure) -> Outcome:
        await self._start()
        try:
            self._coordinator.fail(call_id, rank, failure)
            return Outcome()
        except GroupError as error:
            return Outcome(error=error)

    async def leave(self, generation: int, rank: int) -> None:
        await self._start()
        self._coordinator.leave(generation, rank)
        self._coordinator.keep_record()
        if not self._coordinator.num_members:
            self._needed_until = time.monotonic()

    async def ranks_failed(self, failed: dict[int, str]) -> None:
        await self._start()
        self._coordinator.ranks_failed(failed)
        self._coordinator.keep_record()

    async def keep(self, keeper: list[Any]) -> None:
        """Live at least as long as ``keeper``, an actor."""
        await self._start()
        self._watch_keeper(keeper[0])
        self._coordinator.keep_record()

    async def live_attempts(self) -> frozenset[str]:
        """The names of the attempts that are under way."""
        await self._start()
        return self._coordinator.attempts[0]

    async def generation(self) -> int:
        await self._start()
        return self._coordinator.generation

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _write_record(self, record: CoordinatorRecord) -> None:
        """Keep what has changed. Called under the coordinator's lock, from whatever thread has changed something."""
        changed = (record, len(self._keepers))
        if changed != self._recorded:
            self._recorded = changed
            actors = {member: one for member, one in list(self._actors.items()) if self._coordinator.knows(member)}
            write_record(self._name, GroupRecord(record, actors, tuple(self._keepers)))

    def _watch_actor(self, member: str, handle: Any) -> None:
        if member not in self._actors:
            self._actors[member] = handle
            self._spawn(self._tell_death_of(member, handle))

    async def _tell_death_of(self, member: str, handle: Any) -> None:
        process = member.partition(" as rank ")[0]
        why = await self._death_of(handle, process=process, while_true=lambda: self._coordinator.knows(member))
        self._coordinator.member_lost(member, why)
        self._needed_until = time.monotonic() + _LINGER_S

    def _watch_deputy(self, deputy: str, handle: Any) -> None:
        if deputy not in self._deputies:
            self._deputies.add(deputy)
            self._spawn(self._tell_death_of_deputy(deputy, handle))

    async def _tell_death_of_deputy(self, deputy: str, handle: Any) -> None:
        """Watch a deputy, whose name is that of its process, for as long as it has a part of any call."""
        has_part = functools.partial(self._coordinator.has_part_with, deputy)
        why = await self._death_of(handle, process=deputy, while_true=has_part)
        self._deputies.discard(deputy)
        if has_part():
            self._coordinator.deputy_lost(deputy, why)
        self._needed_until = max(self._needed_until, time.monotonic() + _LINGER_S)

    def _watch_keeper(self, handle: Any) -> None:
        self._keepers.append(handle)
        self._spawn(self._outlive(handle))

    async def _outlive(self, keeper: Any) -> None:
        await self._death_of(keeper)
        self._keepers.remove(keeper)
        self._needed_until = time.monotonic() + _LINGER_S

    async def _death_of(
        self, handle: Any, *, process: str | None = None, while_true: Callable[[], bool] = lambda: True
    ) -> str:
        """Return why the actor, or its first process, has died, once it has; also once ``while_true`` says False.

        An idle actor is asked now and then, a busy one holds the question.
        """
        unreachable_since: float | None = None
        while while_true():
            grace_s = self._coordinator.limits.unreachable_grace_s
            try:
                name = await handle.__ray_call__.remote(process_name_of)
                unreachable_since = None
                if process is not None and name != process:
                    return f"{process} died, and Ray has started its actor again as {name}"
            except ActorDiedError as error:
                return first_line_of(error)
            except RayActorError as error:
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > grace_s:
                    return f"unreachable for {grace_s:g} s: {first_line_of(error)}"
            await asyncio.sleep(_PING_INTERVAL_S)
        return "another process has taken its place"

    async def _check_limits(self) -> None:
        while True:
            self._coordinator.check_limits()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _end_when_unneeded(self) -> None:
        while self._keepers or self._coordinator.is_needed or time.monotonic() < self._needed_until:
            await asyncio.sleep(0.1)
        end_record(self._name)
        ray.kill(ray.get_runtime_context().current_actor)


def _in_a_thread(step: Callable[[], None]) -> None:
    """Run ``step`` in a thread of its own: one that hangs must not keep the next from its turn."""
    threading.Thread(target=step, name="coordinator-step", daemon=True).start()


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((ActorDiedError, ActorUnavailableError)),
    stop=tenacity.stop_after_attempt(5),
    wait=tenacity.wait_random_exponential(multiplier=0.1, max=2),
    reraise=True,
)
def ensure_coordinator(name: str, *, keeper: Any = None, timeout_s: float = START_PATIENCE_S) -> Any:
    """The handle of the coordinator of group ``name``: found, or started, and up.

    It is started on the head node, so that no loss of another node takes it along, and lives at least as long as
    ``keeper``, an actor. Raises ``CoordinatorLostError`` when it says nothing for ``timeout_s``; it is then replaced.
    """
    handle = (
        ray.remote(num_cpus=0)(CoordinatorDoor)
        .options(
            name=f"coordinator/{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=_MAX_CONCURRENCY,
            max_restarts=-1,
            scheduling_strategy=_on_head_node(),
        )
        .remote(name)
    )
    up = handle.keep.remote([keeper]) if keeper is not None else handle.generation.remote()
    try:
        ray.get(up, timeout=timeout_s)
    except GetTimeoutError as error:
        ray.kill(handle, no_restart=False)
        raise CoordinatorLostError(f"it has not answered for {timeout_s:g} s", group=name) from error
    return handle


def _on_head_node() -> Any:
    # Ray often does not follow a soft wish for a node without CPUs, which a head should be.
    head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_RESOURCE in node["Resources"]]
    return NodeAffinitySchedulingStrategy(head[0], soft=False) if head else "DEFAULT"


def live_attempts(name: str) -> frozenset[str]:
    """The names of the attempts of group ``name`` that are under way, as far as its coordinator says."""
    try:
        coordinator = ray.get_actor(f"coordinator/{name}", namespace=NAMESPACE)
        attempts: frozenset[str] = ray.get(coordinator.live_attempts.remote(), timeout=10)
    except (ValueError, RayActorError, GetTimeoutError):
        return frozenset()
    return attempts


def end_coordinator(name: str, *, generation: int | None = None, forms_anew: bool = False) -> None:
    """Stop the coordinator of group ``name`` now, if there is one: whoever calls this knows that its ranks are done.

    With ``generation``, only if no newer one has formed meanwhile. Where nobody expects that it ``forms_anew``, its
    node agents keep nothing in memory for that.
    """
    try:
        coordinator = ray.get_actor(f"coordinator/{name}", namespace=NAMESPACE)
        if generation is None or ray.get(coordinator.generation.remote(), timeout=10) == generation:
            end_record(name)
            ray.kill(coordinator)
            if not forms_anew:
                tell_agents_of_end(name)
    except (ValueError, RayActorError, GetTimeoutError):
        return  # it has ended already, or ends by itself
