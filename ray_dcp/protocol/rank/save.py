"""A rank's half of a save::

    state_dict -> collect -> local plan ==plan==> final plan -> [stage] -> write -> results ==write==> Metadata

``==`` are the two exchanges with the coordinator. ``save`` does all of it; an asynchronous save does ``plan_save`` and
``stage_save`` in the caller and ``write_save`` behind its back.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ray_dcp.errors import without_keys
from ray_dcp.gc_pause import collector_paused
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.replicas import ShownReplicas, replica_digests, shown_replicas
from ray_dcp.planning.save_plan.state_planner import (
    StatePlanner,
    for_global_step,
    plan_cache_off,
    require_initialized,
    require_storable,
)
from ray_dcp.planning.values.collect import collect_state
from ray_dcp.planning.values.containers import containers_of
from ray_dcp.planning.values.flat import flat_state
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.protocol.coordinator.save_session import (
    CommittedWithReplicas,
    FinalTable,
    ResultsWithReplicas,
    SaveContribution,
    ShowReplicas,
    are_own,
    plan_globally,
    write_on_lowest_rank,
)
from ray_dcp.protocol.coordinator.session import OnRankZero
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException
from ray_dcp.protocol.rank.call import Call, phase
from ray_dcp.protocol.rank.plugin_progress import CountingPlanner
from ray_dcp.protocol.rank.plugin_set_up import accepted
from ray_dcp.protocol.replica_warnings import warn_of_differing
from ray_dcp.settings import DEFAULT_REPLICA_CHECK, ReplicaCheck
from ray_dcp.staging.host_pieces import copy_to_host
from ray_dcp.torch_private import TorchsFileWriter
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.results import WrittenColumns, WrittenItems
from ray_dcp.write.writer import ShardTarget, StoreWriter

logger = logging.getLogger("ray_dcp")


@dataclasses.dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the user asks of this rank."""

    state_dict: Mapping[str, Any]
    checkpoint_id: str
    writer: StorageWriter
    planner: SavePlanner
    replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save whose final plan is known; nothing is written yet."""

    plan: SavePlan
    planner: SavePlanner
    writer: StorageWriter
    by_columns: bool = False
    """Whether the coordinator takes what was written by columns, since planner and writer are ray_dcp's."""
    shown: ShownReplicas | None = None
    """What other ranks hold otherwise; None where nothing was found."""
    users_planner: SavePlanner | None = None
    """The planner that the user passed, on the rank where torch leaves the metadata on it."""
    may_be_empty: bool = False
    """Whether this is rank 0 and has no values: it warns if no other rank has any."""


@runtime_checkable
class Abandons(Protocol):
    """A writer that can take back what it wrote in a failed attempt."""

    def abandon(self) -> None: ...


def default_save_planner(planner: SavePlanner | None) -> SavePlanner:
    """The planner to use: the user's own, or ray_dcp's in place of torch's plain default."""
    if planner is None:
        return StatePlanner()
    if type(planner) is DefaultSavePlanner:
        return StatePlanner(
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
            stands_for=planner,
        )
    return planner


def save(request: SaveRequest, call: Call) -> Metadata:
    """Save this rank's part; returns when the checkpoint is committed and durable.

    Raises ``CheckpointException``; what this rank wrote is then removed.
    """
    planned = plan_save(request, call)
    return write_save(planned, call)


def plan_save(request: SaveRequest, call: Call) -> PlannedSave:
    """Collect the state and agree with all ranks on who writes what."""
    with phase(call, "collect"):
        state = collect_state(request.state_dict, call.rank)
    with phase(call, "plan"), plan_cache_off(request.planner):
        reached(Point.BEFORE_PLAN)
        with collector_paused(), torch.no_grad():
            local = _plan_locally(state, request, call)
            contribution = _contribution(local, state, request, call)
        # After the local step, as torch's coordinator rank uses the same objects for both.
        final = call.exchange("plan", contribution)
        shown = None
        if isinstance(final, ShowReplicas):
            shown = shown_replicas(local, request.planner, final.keys)
            if final.lowest_rank and isinstance(final.answer, OnRankZero):
                write_on_lowest_rank(request.planner)
            final = final.answer
        if isinstance(final, OnRankZero):
            final = call.exchange("global plan", _plan_globally_here(request, final))
        by_columns = isinstance(final, FinalTable)
        plan = request.planner.finish_plan(final.plan(local) if isinstance(final, FinalTable) else final)
        reached(Point.AFTER_PLAN)
    users = _users_planner(request, plan, call)
    may_be_empty = call.rank == 0 and not local.items
    return PlannedSave(plan, request.planner, request.writer, by_columns, shown, users, may_be_empty)


def _users_planner(request: SaveRequest, plan: SavePlan, call: Call) -> SavePlanner | None:
    """The one that is to have the metadata: rank 0's, as under torch. Alone it has the global plan too, its own."""
    planner = request.planner
    users = planner.stands_for if isinstance(planner, StatePlanner) else planner
    if call.rank != 0 or not isinstance(users, DefaultSavePlanner) or "metadata" in vars(type(users)):
        return None
    if users is not planner and call.world_size == 1:
        users.global_plan = [plan]
    return users


def stage_save(planned: PlannedSave, call: Call) -> PlannedSave:
    """Copy what this rank will write, and only that: afterwards the state dict may change."""
    with phase(call, "stage"):
        staged = _stage(planned, call)
    return dataclasses.replace(planned, planner=_StagedPlanner(planned.planner, planned.plan, staged))


def _stage(planned: PlannedSave, call: Call) -> dict[int, torch.Tensor | io.BytesIO]:
    """Copies by the ``id`` of their items; items of one memory share one."""
    ties = ties_of(planned.planner)
    if not ties:
        return {id(item): _staged(planned.planner.resolve_data(item), call) for item in planned.plan.items}
    copies: dict[Key, torch.Tensor | io.BytesIO] = {}
    staged = {}
    for item in planned.plan.items:
        key = item.index.fqn, item.index.offset
        key = ties.get(key, key)
        if key not in copies:
            copies[key] = _staged(planned.planner.resolve_data(item), call)
        staged[id(item)] = copies[key]
    return staged


def stager_of(writer: StorageWriter) -> AsyncStager | None:
    """``writer``, where it stages in a way of its own, as under torch.

    Torch's own way copies all of the state into host memory, on every rank; ours what this rank will write.
    """
    if isinstance(writer, StoreWriter) or not isinstance(writer, AsyncStager):
        return None
    hooks = (getattr(writer, name, None) for name in ("stage", "synchronize_staging"))
    own = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("torch.distributed.checkpoint.")]
    return writer if own else None


def staged_by(stager: AsyncStager, request: SaveRequest, call: Call) -> SaveRequest | Future[dict[str, Any]]:
    """``request`` with its whole state dict staged by the user's stager; what the stager gave where it still stages."""
    with phase(call, "collect"):
        state = collect_state(request.state_dict, call.rank)
    with phase(call, "stage"):
        staged = stager.stage(state)
        if isinstance(staged, Future):
            return staged
        # Torch asks for it when the save has begun in its thread, which may then find nothing staged yet.
        if stager.should_synchronize_after_execute:
            stager.synchronize_staging()
    return dataclasses.replace(request, state_dict=staged)


def when_staged(staging: Future[dict[str, Any]], request: SaveRequest, call: Call) -> SaveRequest:
    """``request`` with what a user's stager has staged, once it has."""
    with phase(call, "stage"):
        return dataclasses.replace(request, state_dict=staging.result())


def write_save(planned: PlannedSave, call: Call) -> Metadata:
    """Write this rank's items and wait for the commit."""
    try:
        metadata = _write_and_wait(planned, call)
    except CheckpointException as error:
        committed = _committed_by_then(planned) if call.started_over else None
        if committed is None:
            if not call.started_over and _never_began_to_commit(error):
                _abandon(planned.writer)
            raise
        metadata = committed
    if isinstance(planned.users_planner, DefaultSavePlanner):
        planned.users_planner.metadata = metadata  # its global step was the coordinator's, on a copy
    if planned.may_be_empty and not metadata.state_dict_metadata:
        logger.warning("%s: the state dict is empty on every rank", without_keys(call.checkpoint_id))
    return metadata


def _write_and_wait(planned: PlannedSave, call: Call) -> Metadata:
    with phase(call, "write"):
        with torch.no_grad():
            results: Any = _write(planned, call)
        reached(Point.BEFORE_RESULT)
    if planned.shown is not None:
        results = ResultsWithReplicas(results, planned.shown)
    metadata = call.exchange("write", results)
    if isinstance(metadata, OnRankZero):
        with phase(call, "commit"):
            committed = _commit_here(planned, metadata)
        metadata = call.exchange("commit", committed)
    if isinstance(metadata, CommittedWithReplicas):
        warn_of_differing(metadata.differing, call.checkpoint_id)
        metadata = metadata.metadata
    found: Metadata = metadata
    return found


def _plan_locally(state: dict[str, Any], request: SaveRequest, call: Call) -> SavePlan:
    is_coordinator = call.rank == 0
    planner, writer = request.planner, request.writer
    storage_meta = writer.storage_meta()
    try:
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            planner.set_up_planner(state_dict=state, storage_meta=storage_meta, is_coordinator=is_coordinator)
        else:
            set_up: Any = planner.set_up_planner  # planners from before torch 2.3 know no storage_meta
            set_up(state, is_coordinator)
    except ValueError:
        flat_state(state)  # says which, where two values have one name
        raise
    writer.set_up_storage_writer(is_coordinator, **accepted(writer.set_up_storage_writer, call.rank))
    try:
        plan = planner.create_local_plan()
    except Exception:
        require_initialized(planner)  # torch's error has no name
        raise
    if type(planner) is not StatePlanner:  # that one has looked
        require_storable(planner, plan, state)
    return writer.prepare_local_plan(plan)


def _contribution(local: SavePlan, state: dict[str, Any], request: SaveRequest, call: Call) -> SaveContribution:
    planner, writer = request.planner, request.writer
    carried = call.carry(for_global_step(planner), writer) if call.rank == 0 and _may_travel(writer) else None
    reports_results = isinstance(writer, StoreWriter | TorchsFileWriter)
    plan: SavePlan | PlanTable = local
    if are_own(planner, writer):
        assert isinstance(planner, StatePlanner)
        plan = PlanTable.of(local, ties=planner.ties)
    check = request.replica_check
    digests = replica_digests(local, planner, check) if call.world_size > 1 else None
    # Without names made of keys each value is stored with the keys that it has.
    containers = containers_of(state) if getattr(planner, "flatten_state_dict", True) else []
    return SaveContribution(request.checkpoint_id, plan, carried, reports_results, check, digests, containers)


def _may_travel(writer: StorageWriter) -> bool:
    """Whether the coordinator may commit with a copy of rank 0's ``writer``.

    Not with a user's: its ``finish`` may rely on what its ``write_data`` left on the object, as under torch.
    """
    return isinstance(writer, StoreWriter) or type(writer).__module__.startswith("torch.distributed.checkpoint.")


def _plan_globally_here(request: SaveRequest, order: OnRankZero) -> tuple[Sequence[SavePlan], Metadata] | None:
    return None if order.parts is None else plan_globally(request.planner, request.writer, order.parts)


def _commit_here(planned: PlannedSave, order: OnRankZero) -> Metadata | None:
    """On rank 0 the metadata as the writer has completed it; None elsewhere."""
    if order.parts is not None:
        assert order.metadata is not None
        planned.writer.finish(order.metadata, list(order.parts))
    return order.metadata


def _write(planned: PlannedSave, call: Call) -> Sequence[WriteResult] | WrittenColumns | None:
    planner: Any = planned.planner
    if not isinstance(planned.writer, StoreWriter):
        planner = CountingPlanner(planner, call.progress)
    written = planned.writer.write_data(planned.plan, planner)
    written.wait()
    results: Sequence[WriteResult] = written.value()
    if not planned.by_columns:
        return results
    return results.columns if isinstance(results, WrittenItems) else None


def _never_began_to_commit(error: CheckpointException) -> bool:
    """Whether the failure is some rank's own: then its results never arrived, and without them nothing is committed.

    Where the coordinator failed or is gone or has started over, or a commit on rank 0 had begun, ``.metadata`` may
    have been put: the files must stay.
    """
    return error.phase != "commit" and all(failure.rank != COORDINATOR for failure in error.rank_failures)


def _committed_by_then(planned: PlannedSave) -> Metadata | None:
    """The metadata, where a coordinator that has died since had committed this save before others could fail it."""
    if not isinstance(planned.writer, StoreWriter) or not isinstance(planned.plan.storage_data, ShardTarget):
        return None
    try:
        return planned.writer.committed(planned.plan.storage_data.attempt)
    except OSError:
        return None  # nobody knows; what the save has failed with is to be told


def _abandon(writer: StorageWriter) -> None:
    if isinstance(writer, Abandons):
        try:
            writer.abandon()
        except OSError:
            # The save has failed for a reason of its own, and that is the one to tell. What stays behind is not
            # part of any checkpoint.
            return


def _staged(value: torch.Tensor | io.BytesIO, call: Call) -> torch.Tensor | io.BytesIO:
    call.progress.advance()
    return copy_to_host(value) if isinstance(value, torch.Tensor) else value


class _StagedPlanner(SavePlanner):
    """The planner of a staged save: resolves the copies, and is otherwise the user's."""

    def __init__(self, planner: SavePlanner, plan: SavePlan, staged: Mapping[int, torch.Tensor | io.BytesIO]) -> None:
        self._planner = planner
        self._plan = plan  # keeps the items alive, by whose identity the copies are found
        self._staged = staged

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a staged save is planned already")

    def create_local_plan(self) -> SavePlan:
        raise AssertionError("a staged save is planned already")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("a staged save is planned already")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        staged = self._staged.get(id(write_item))
        return staged if staged is not None else self._planner.resolve_data(write_item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)
