"""``RankPool``: an elastic set of rank actors, for people without TorchTrainer."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_dcp.cluster.coordinator_actor import end_coordinator, ensure_coordinator, live_attempts
from ray_dcp.cluster.group import RankGroup
from ray_dcp.cluster.link import connection_of_process
from ray_dcp.cluster.process import before_actor_ends, require_own_connection
from ray_dcp.cluster.ray_private import private
from ray_dcp.errors import (
    ConfigError,
    GroupError,
    NotEnoughResourcesError,
    RankLostError,
    RayDcpError,
    UnfinishedSavesError,
)
from ray_dcp.lifetime import before_exit
from ray_dcp.protocol.exception import UntoldSaveError
from ray_dcp.protocol.rank.background import Finished, end_saves
from ray_dcp.settings import Limits
from ray_dcp.wording import first_line_of

_PLACEMENT_TIMEOUT_S = 15.0
"""Resources that are free now are placed in milliseconds; what takes this long is not there."""
_END_RANKS_TIMEOUT_S = 5.0
"""How long to wait for the resources of stopped ranks: they are free again within a second, or never, on a lost node
that Ray takes for alive."""
_ENDED_LOOK_S = 0.05
_START_TIMEOUT_S = 300.0
_LAST_WORDS_S = 5.0
"""How long the other ranks have, when one is lost, to show that they are lost, too; and how long a busy rank has, when
a pool is left and no save is under way, to say how its last saves ended."""
_LOOK_FOR_SAVES_S = 0.25
_RANKS_ENDED = "ray.shutdown() has ended its ranks"

logger = logging.getLogger(__name__)
_started: weakref.WeakSet[RankPool] = weakref.WeakSet()
"""The pools of this process whose ranks are up."""


class RankPool:
    """As many rank actors of one class as fit on the cluster, joined to one group.

    ``ActorClass`` is a plain class or a ``ray.remote`` one. Each actor joins the group before its constructor runs, so
    ``ray_dcp.current_group()`` gives its rank there already. ``resources_per_rank`` are Ray resources: "CPU", "GPU",
    "memory" or custom ones. ``limits`` say how long ranks wait for what. Usable as ``with RankPool(...) as pool:``,
    which starts and shuts it down. Asynchronous saves that are under way then are finished before the ranks end.
    """

    def __init__(
        self,
        ActorClass: type | Any,
        *args: Any,
        name: str | None = None,
        min_ranks: int = 1,
        max_ranks: int = 8,
        resources_per_rank: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        **kwargs: Any,
    ) -> None:
        if not 1 <= min_ranks <= max_ranks:
            raise ConfigError("min_ranks", f"{min_ranks} is not between 1 and max_ranks = {max_ranks}")
        resources = dict(resources_per_rank if resources_per_rank is not None else {"CPU": 1})
        if not resources or any(amount < 0 for amount in resources.values()) or not any(resources.values()):
            raise ConfigError("resources_per_rank", f"{resources} asks for nothing; give what one rank needs")
        self.name = name or f"pool-{uuid.uuid4().hex[:8]}"
        self.min_ranks = min_ranks
        self.max_ranks = max_ranks
        self.resources_per_rank = resources
        self.limits = limits if limits is not None else Limits.from_variables(os.environ)
        self._rank_class = _rank_class(ActorClass)
        self._args = args
        self._kwargs = kwargs
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._generation: int | None = None
        self._connection: tuple[str, str] | None = None
        self._pid = os.getpid()

    @property
    def world_size(self) -> int:
        """The number of ranks of the pool now; 0 when it is not started."""
        return len(self._actors)

    @property
    def actors(self) -> Sequence[Any]:
        """The handles of the ranks' actors, in rank order."""
        return tuple(self._actors)

    def start(self) -> int:
        """Start as many ranks as fit now, ``min_ranks`` to ``max_ranks``; return how many, all joined and built.

        Raises ``NotEnoughResourcesError``, ``GroupError`` where the pool is started already or this process is not
        connected to Ray, or what a rank's constructor raised.
        """
        require_own_connection()
        if not ray.is_initialized():
            raise GroupError(
                "this process is not connected to Ray. Call ray.init() first, for a Ray of this machine, or "
                'ray.init(address="auto") on a node of a cluster',
                group=self.name,
            )
        if self._actors:
            raise GroupError("the pool is started already; use restart() to re-form it", group=self.name)
        self._connection = connection_of_process()
        self._placement = self._place()
        ensure_coordinator(self.name)
        world_size = self._placement.bundle_count
        # Ranks of this start never mix with those of another pool of this name, or of an earlier start.
        incarnation = uuid.uuid4().hex
        places = [_Place(self.name, rank, world_size, incarnation, self.limits) for rank in range(world_size)]
        self._actors = [self._start_rank(place) for place in places]
        try:
            ready = [actor.ray_dcp_ready.remote() for actor in self._actors]
            self._generation = self._collect(ready, timeout_s=_START_TIMEOUT_S)[0]
        except BaseException:
            self._end()
            raise
        _started.add(self)
        _shut_down_at_exit()
        return world_size

    def run(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``method`` on every rank; returns the results in rank order.

        Raises what a rank's method raised, or ``RankLostError`` naming the ranks that died; ``restart`` then.
        """
        if not self._actors:
            raise GroupError("the pool is not started", group=self.name)
        if not self._is_connected:
            raise GroupError(f"{_RANKS_ENDED}. Call restart()", group=self.name)
        return self._collect([getattr(actor, method).remote(*args, **kwargs) for actor in self._actors])

    def restart(self) -> int:
        """Re-form on what is there now: new processes, a new generation; return how many ranks.

        Asynchronous saves that are under way are finished first, as far as their ranks live. When the new ranks are up
        it raises as ``shutdown`` does, unless a save failed because ranks were lost: a restart is for that.
        """
        finished = self._finish_saves()
        self._stop_ranks()
        try:
            world_size = self.start()
        except BaseException:
            finished.log()
            raise
        untold = finished.error("restart", world_size)
        if isinstance(untold, UntoldSaveError) and _is_loss(untold):
            logger.warning("%s", untold.args[0])
        elif untold is not None:
            raise untold
        return world_size

    def shutdown(self) -> None:
        """Stop all ranks, when their asynchronous saves are over, and the coordinator. Idempotent.

        Raises, when all is stopped, ``EarlierSaveError`` where a save failed and nobody had looked, and
        ``UnfinishedSavesError`` where one took longer than ``finish_timeout_s`` of the limits.
        """
        if self._pid != os.getpid():
            return  # a fork of the process that started it: the ranks are not its own
        try:
            finished = self._finish_saves()
        finally:
            self._end()
        untold = finished.error("shutdown", None)
        if untold is not None:
            raise untold

    @property
    def _is_connected(self) -> bool:
        """Whether this process is still connected to the cluster in which it started the ranks."""
        return self._connection is not None and self._connection == connection_of_process()

    def _end(self) -> None:
        self._stop_ranks()
        if self._generation is not None and self._is_connected:
            end_coordinator(self.name, generation=self._generation)
        self._generation = None

    def __enter__(self) -> RankPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.shutdown()
        except RayDcpError as untold:
            if error is None:
                raise
            logger.error("%s", untold.args[0])  # the block's own error goes on

    def _finish_saves(self) -> _FinishedSaves:
        """Ask each rank to finish its saves; one that is busy hears it late, but the coordinator knows what goes on."""
        if not self._actors:
            return _FinishedSaves(self.name, self.limits.finish_timeout_s, {})
        if not self._is_connected:
            self._tell_of_cut_off(f"{_RANKS_ENDED}; leave the pool first")
            return _FinishedSaves(self.name, self.limits.finish_timeout_s, {})
        asked = {
            actor.ray_dcp_finish_saves.remote(self.limits.finish_timeout_s): rank
            for rank, actor in enumerate(self._actors)
        }
        finished: dict[int, Finished] = {}
        quiet_since = time.monotonic()
        deadline = quiet_since + self.limits.finish_timeout_s + _LAST_WORDS_S  # ranks keep to the limit by themselves
        while asked and time.monotonic() < deadline:
            for reference in ray.wait(list(asked), num_returns=1, timeout=_LOOK_FOR_SAVES_S)[0]:
                rank = asked.pop(reference)
                with suppress(RayError):  # its process is lost, and was missed in the save itself
                    finished[rank] = ray.get(reference)
            if live_attempts(self.name):
                quiet_since = time.monotonic()
            elif time.monotonic() > quiet_since + _LAST_WORDS_S:
                logger.warning("ranks %s are busy: whether saves of theirs failed is not known", sorted(asked.values()))
                return _FinishedSaves(self.name, self.limits.finish_timeout_s, finished)
        if not finished and not asked:  # where an actor that has started them ends, Ray ends them first
            self._tell_of_cut_off("all its ranks are lost")
        busy = {rank: Finished(["a save"], []) for rank in asked.values()}
        return _FinishedSaves(self.name, self.limits.finish_timeout_s, finished | busy)

    def _tell_of_cut_off(self, why: str) -> None:
        """Warn that no rank is left to finish its saves; whether there was one is not known."""
        told = "If an asynchronous save was under way it was cut off, and is not committed"
        logger.warning("pool %r: %s. %s", self.name, why, told)

    def _place(self) -> PlacementGroup:
        """Take room for as many ranks as fit. Raises ``NotEnoughResourcesError``."""
        num_ranks = min(self._num_fitting(), self.max_ranks)
        while num_ranks >= self.min_ranks:
            placement = placement_group([self.resources_per_rank] * num_ranks, strategy="SPREAD")
            if placement.wait(_PLACEMENT_TIMEOUT_S):
                return placement
            remove_placement_group(placement)
            num_ranks -= 1
        raise NotEnoughResourcesError(
            group=self.name,
            min_ranks=self.min_ranks,
            fit=num_ranks,
            resources_per_rank=self.resources_per_rank,
        )

    def _num_placed(self, placement: PlacementGroup) -> int:
        """How many ranks have room on live nodes."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return sum(node_id in alive for node_id in placement_group_table(placement)["bundles_to_node_id"].values())

    def _num_fitting(self) -> int:
        """How many ranks the free resources of all live nodes have room for."""
        needed = {name: amount for name, amount in self.resources_per_rank.items() if amount}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        free_by_node = private("available_resources_per_node")()
        return sum(
            min(int(free.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items())
            for node_id, free in free_by_node.items()
            if node_id in alive
        )

    def _start_rank(self, place: _Place) -> Any:
        resources = dict(self.resources_per_rank)
        return (
            ray.remote(self._rank_class)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, place.rank),
            )
            .remote(place, *self._args, **self._kwargs)
        )

    def _collect(self, references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        pending = list(references)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout_s)
            if not done:
                raise GroupError(f"{len(pending)} ranks were not up after {timeout_s:g} s", group=self.name)
            self._require_done(done[0], references)
        return ray.get(list(references))

    def _require_done(self, reference: Any, references: Sequence[Any]) -> None:
        try:
            ray.get(reference)
        except RayActorError as error:
            raise RankLostError(group=self.name, lost=self._lost(references)) from error
        except RayTaskError as error:
            lost = self._lost(references)
            if lost:  # what a rank raises because another one died is only the consequence
                raise RankLostError(group=self.name, lost=lost) from error
            raise

    def _lost(self, references: Sequence[Any]) -> dict[int, str]:
        ray.wait(list(references), num_returns=len(references), timeout=_LAST_WORDS_S)
        lost = {}
        for rank, actor in enumerate(self._actors):
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=_LAST_WORDS_S)
            except RayActorError as error:
                lost[rank] = first_line_of(error)
            except (GetTimeoutError, RayTaskError):
                continue  # busy, so alive
        return lost

    def _stop_ranks(self) -> None:
        """Stop the ranks; return when their resources are free again, which would count as missing before that."""
        _started.discard(self)
        actors, self._actors = self._actors, []
        if not self._is_connected:  # they ended with the connection
            self._placement = None
            return
        for actor in actors:
            ray.kill(actor)
        if self._placement is None:
            return
        room = self._num_fitting() + self._num_placed(self._placement)
        remove_placement_group(self._placement)
        self._placement = None
        deadline = time.monotonic() + _END_RANKS_TIMEOUT_S
        while self._num_fitting() < room and time.monotonic() < deadline:
            time.sleep(_ENDED_LOOK_S)


@dataclass(frozen=True, slots=True)
class _FinishedSaves:
    """How the asynchronous saves of a pool's ranks have ended; ``by_rank`` lacks ranks of which nothing is known."""

    group: str
    timeout_s: float
    by_rank: Mapping[int, Finished]

    def error(self, call: str, result: Any) -> RayDcpError | None:
        """The error for the ``call`` of the pool that has waited for them to raise; None where all went well."""
        unfinished = {rank: ", ".join(one.unfinished) for rank, one in self.by_rank.items() if one.unfinished}
        if unfinished:
            return UnfinishedSavesError(group=self.group, unfinished=unfinished, timeout_s=self.timeout_s)
        for _, one in sorted(self.by_rank.items()):
            for failure in one.failures:
                return UntoldSaveError.told_by(failure, call, result)
        return None

    def log(self) -> None:
        """Log that error, where something else is raised."""
        untold = self.error("shutdown", None)
        if untold is not None:
            logger.error("%s", untold.args[0])


def _is_loss(untold: UntoldSaveError) -> bool:
    return any(failure.error_type == RankLostError.__name__ for failure in untold.rank_failures)


@functools.cache
def _shut_down_at_exit() -> None:
    """Shut pools down before this process ends: their ranks end with it, and are to finish their saves before."""
    before_exit(_shut_down_all)
    if ray.get_runtime_context().get_actor_id():
        before_actor_ends(_shut_down_all)


def _shut_down_all() -> None:
    for pool in [*_started]:
        try:
            pool.shutdown()
        except RayDcpError as untold:
            print(f"ray_dcp: {untold}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's place in its group, on its way to the actor."""

    group: str
    rank: int
    world_size: int
    incarnation: str
    limits: Limits


def _rank_class(ActorClass: Any) -> type:
    """A subclass of the user's class that joins its group before the user's constructor runs."""
    metadata = getattr(ActorClass, "__ray_metadata__", None)
    user_class: Any = metadata.modified_class if metadata is not None else ActorClass
    if not isinstance(user_class, type):
        raise ConfigError("ActorClass", f"{ActorClass!r} is not a class")

    class Rank(user_class):
        def __init__(self, place: _Place, *args: Any, **kwargs: Any) -> None:
            self._ray_dcp_failure: BaseException | None = None
            try:
                self._ray_dcp_group = RankGroup.join(
                    place.group,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout_s=_START_TIMEOUT_S,
                    incarnation=place.incarnation,
                    limits=place.limits,
                )
                super().__init__(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - told by ray_dcp_ready: Ray turns it into a dead actor
                self._ray_dcp_failure = error

        def ray_dcp_ready(self) -> int:
            """The generation joined; raises what the constructor raised, as it is."""
            if self._ray_dcp_failure is not None:
                raise self._ray_dcp_failure
            return self._ray_dcp_group.generation

        def ray_dcp_finish_saves(self, timeout_s: float) -> Finished:
            """Return how the asynchronous saves of this process have ended, after at most ``timeout_s`` seconds."""
            return end_saves(timeout_s)

    Rank.__name__ = Rank.__qualname__ = user_class.__name__
    return Rank
