"""The actor around a ``Coordinator``: awaits its futures, watches its ranks, and ends when nobody needs it.

It is detached, so that no rank's death takes it along, and ends by itself: at once when the last rank has closed the
group, a little later when all have died, never while a keeper (a pool or a Ray Train controller) lives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
import tenacity
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.errors import CoordinatorLostError, GroupError, JoinTimeoutError, RayDcpError
from ray_dcp.protocol.coordinator import Coordinator
from ray_dcp.protocol.failures import RankFailure
from ray_dcp.protocol.membership import JoinRequest
from ray_dcp.protocol.wire import CallId

NAMESPACE = "ray_dcp"
_ARRIVAL_TIMEOUT_S = 1800.0
"""A rank that does not call what another one called this long ago is taken for absent; gloo's default limit."""
_PING_INTERVAL_S = 0.5
_UNAVAILABLE_GRACE_S = 10.0
"""Ray cannot reach a process but has not declared it dead: it may come back within this time."""
_LINGER_S = 10.0
"""Without ranks; a group that re-forms after a failure finds its coordinator still there."""
_FIRST_JOIN_S = 120.0
_HEAD_RESOURCE = "node:__internal_head__"
_MAX_CONCURRENCY = 20_000
"""Calls in flight: one waits per rank."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer or an error: returned, since Ray wraps what an actor raises."""

    answer: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer


class CoordinatorActor:
    """Each method is a shell around one of ``Coordinator``; see there."""

    def __init__(self, name: str) -> None:
        self._steps = ThreadPoolExecutor(max_workers=4, thread_name_prefix="coordinator-step")
        self._coordinator = Coordinator(name, execute=self._steps.submit)
        self._num_keepers = 0
        self._needed_until = time.monotonic() + _FIRST_JOIN_S
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, request: JoinRequest, timeout_s: float, actor: list[Any]) -> Outcome:
        self._spawn(self._end_when_unneeded(), name="end")
        try:
            future = self._coordinator.join(request)
        except GroupError as error:
            return Outcome(error=error)
        for handle in actor:
            self._spawn(self._watch(request.member, handle))
        try:
            return Outcome(await asyncio.wait_for(asyncio.wrap_future(future), timeout_s))
        except asyncio.TimeoutError:
            missing = self._coordinator.withdraw(request)
            self._needed_until = time.monotonic() + _LINGER_S
            return Outcome(
                error=JoinTimeoutError(
                    group=self._coordinator.name,
                    world_size=request.world_size,
                    missing_ranks=missing,
                    timeout_s=timeout_s,
                )
            )
        except GroupError as error:
            return Outcome(error=error)

    async def contribute(self, call_id: CallId, rank: int, phase: str, message: bytes) -> Outcome:
        expiry = asyncio.get_running_loop().call_later(
            _ARRIVAL_TIMEOUT_S, self._coordinator.expire, call_id, _ARRIVAL_TIMEOUT_S
        )
        try:
            return Outcome(await asyncio.wrap_future(self._coordinator.contribute(call_id, rank, phase, message)))
        except RayDcpError as error:
            return Outcome(error=error)
        finally:
            expiry.cancel()

    async def fail(self, call_id: CallId, failure: RankFailure) -> Outcome:
        try:
            self._coordinator.fail(call_id, failure)
            return Outcome()
        except GroupError as error:
            return Outcome(error=error)

    async def leave(self, generation: int, rank: int) -> None:
        self._coordinator.leave(generation, rank)
        if not self._coordinator.num_members:
            self._needed_until = time.monotonic()

    async def ranks_failed(self, failed: dict[int, str]) -> None:
        self._coordinator.ranks_failed(failed)

    async def keep(self, keeper: list[Any]) -> None:
        """Live at least as long as ``keeper``, an actor."""
        self._spawn(self._end_when_unneeded(), name="end")
        self._num_keepers += 1
        self._spawn(self._watch_keeper(keeper[0]))

    async def generation(self) -> int:
        return self._coordinator.generation

    def _spawn(self, coroutine: Any, name: str | None = None) -> None:
        if name is not None and any(task.get_name() == name for task in self._tasks):
            coroutine.close()
            return
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, member: str, handle: Any) -> None:
        why = await _death_of(handle, while_true=lambda: self._coordinator.knows(member))
        self._coordinator.member_lost(member, why)
        self._needed_until = time.monotonic() + _LINGER_S

    async def _watch_keeper(self, handle: Any) -> None:
        await _death_of(handle)
        self._num_keepers -= 1
        self._needed_until = time.monotonic() + _LINGER_S

    async def _end_when_unneeded(self) -> None:
        while self._num_keepers or self._coordinator.num_members or time.monotonic() < self._needed_until:
            await asyncio.sleep(0.1)
        ray.kill(ray.get_runtime_context().current_actor)


async def _death_of(handle: Any, while_true: Callable[[], bool] = lambda: True) -> str:
    """Returns when the actor has died: why. An idle actor is asked now and then, a busy one holds the question."""
    unreachable_since: float | None = None
    while while_true():
        try:
            await handle.__ray_ready__.remote()
            unreachable_since = None
        except ActorDiedError as error:
            return _first_line(error)
        except RayActorError as error:
            unreachable_since = unreachable_since or time.monotonic()
            if time.monotonic() - unreachable_since > _UNAVAILABLE_GRACE_S:
                return f"unreachable for {_UNAVAILABLE_GRACE_S:g} s: {_first_line(error)}"
        await asyncio.sleep(_PING_INTERVAL_S)
    return "another process has taken its place"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((ActorDiedError, ActorUnavailableError)),
    stop=tenacity.stop_after_attempt(5),
    wait=tenacity.wait_random_exponential(multiplier=0.1, max=2),
    reraise=True,
)
def ensure_coordinator(name: str, *, keeper: Any = None) -> Any:
    """The handle of the coordinator of group ``name``: found, or started, and up.

    It is started on the head node, so that no loss of another node takes it along, and lives at least as long as
    ``keeper``, an actor.
    """
    handle = (
        ray.remote(num_cpus=0)(CoordinatorActor)
        .options(
            name=f"coordinator/{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=_MAX_CONCURRENCY,
            scheduling_strategy=_on_head_node(),
        )
        .remote(name)
    )
    ray.get(handle.keep.remote([keeper]) if keeper is not None else handle.generation.remote())
    return handle


def _on_head_node() -> Any:
    head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD_RESOURCE in node["Resources"]]
    return NodeAffinitySchedulingStrategy(head[0], soft=True) if head else "DEFAULT"


def end_coordinator(name: str, *, generation: int | None = None) -> None:
    """Stop the coordinator of group ``name`` now, if there is one: whoever calls this knows that its ranks are done.

    With ``generation``, only if no newer one has formed meanwhile.
    """
    try:
        coordinator = ray.get_actor(f"coordinator/{name}", namespace=NAMESPACE)
        if generation is None or ray.get(coordinator.generation.remote(), timeout=10) == generation:
            ray.kill(coordinator)
    except (ValueError, RayActorError, GetTimeoutError):
        return  # it has ended already, or ends by itself


def ask(reference: Any, *, group: str) -> Any:
    """The answer of a call to a coordinator, or its error. Raises ``CoordinatorLostError`` when that has died."""
    try:
        outcome: Outcome = ray.get(reference)
    except RayActorError as error:
        raise CoordinatorLostError(_first_line(error), group=group) from error
    return outcome.unwrap()
