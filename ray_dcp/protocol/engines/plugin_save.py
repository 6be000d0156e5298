"""A save by any of DCP's planners and writers, ray_dcp's among them: each step is what DCP calls it.

The coordinator's half takes the global steps of rank 0's planner and writer, which have travelled there
(``PluginGlobalSave``), or hands rank 0 what all ranks have sent, where they stay (``SaveOnRankZero``). The writer
stands behind a ``Writer``: what DCP's interface does not ask for, a user's does not have (``UsersWriter``).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ray_dcp.errors import StateDictError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.pace.interval import Figures, Interval
from ray_dcp.planning.save_plan.check_save import require_agreeing_plans, require_valid_plans, require_whole_tensors
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.replicas import ShownReplicas, replica_digests, shown_replicas
from ray_dcp.planning.save_plan.state_planner import (
    for_global_step,
    plan_cache_off,
    require_initialized,
    require_storable,
)
from ray_dcp.planning.values.containers import Containers, containers_of
from ray_dcp.planning.values.flat import flat_state
from ray_dcp.protocol.call import Call
from ray_dcp.protocol.deputy import SealedPart
from ray_dcp.protocol.engines.locations import UsersLocation
from ray_dcp.protocol.engines.plugin_calls import CountingPlanner, StagedPlanner, accepted, staged_copies
from ray_dcp.protocol.messages import (
    Asked,
    CommitHere,
    CommittedWithReplicas,
    FinalTable,
    GlobalSavePlan,
    Message,
    Paced,
    PlanSaveHere,
    Results,
    ResultsWithReplicas,
    SavePart,
    ShowReplicas,
)
from ray_dcp.protocol.node_agent import StagedPart
from ray_dcp.protocol.replica_warnings import warn_of_differing
from ray_dcp.settings import ReplicaCheck
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.torch_private import TorchsFileWriter
from ray_dcp.trace_points import Point, reached

_TORCHS = "torch.distributed.checkpoint."
"""The beginning of the names of torch's own modules."""


@dataclass(frozen=True, slots=True)
class Planner:
    """A save planner, and what is known of it."""

    planner: SavePlanner
    users: SavePlanner | None
    """The planner that the user passed, if any, mostly the same; it has afterwards what torch leaves on it."""
    has_looked: bool
    """Whether the planner itself has checked its local plan, as ray_dcp's does."""


class Writer(Protocol):
    """A storage writer, and what a save asks beside DCP's own steps."""

    writer: Any
    """DCP's ``StorageWriter``."""
    travels: bool
    """Whether the coordinator may commit with a copy of rank 0's."""
    reports_results: bool
    """Whether every item that it writes has a result; a writer without may keep books of its own."""
    counts_progress: bool
    """Whether it tells how far it is while it writes."""

    @property
    def attempt(self) -> str | None:
        """The name of the attempt under way, which its files carry; None where it has no such name."""
        ...

    @property
    def may_have_committed(self) -> bool: ...

    def give_up(self) -> None:
        """Refuse to commit from now on. Called from another thread than ``finish``."""
        ...

    def note(self, containers: Containers, differing: Sequence[DifferingReplicas]) -> None:
        """Take what to keep with the checkpoint. Called before ``finish``."""
        ...

    @property
    def figures(self) -> Figures | None:
        """What the rank has measured of steps and saves, where the writer was given that."""
        ...

    def note_interval(self, interval: Interval) -> None:
        """Take the interval to the next save that all ranks have agreed on. Called when the plan is answered."""
        ...

    def committed_by_then(self, plan: SavePlan) -> Metadata | None:
        """The metadata, where a coordinator that has died since had committed the save of ``plan``; else None."""
        ...


class UsersWriter(UsersLocation):
    """A writer that is not ray_dcp's."""

    attempt: str | None = None
    may_have_committed = counts_progress = False
    figures: Figures | None = None

    def __init__(self, writer: StorageWriter) -> None:
        super().__init__(writer)
        self.writer = writer
        # Not a user's: its ``finish`` may rely on what its ``write_data`` left on the object, as under torch.
        self.travels = type(writer).__module__.startswith(_TORCHS)
        self.reports_results = isinstance(writer, TorchsFileWriter)

    @property
    def stager(self) -> AsyncStager | None:
        """The writer, where it stages in a way of its own, as under torch.

        Torch's own way copies all of the state into host memory, on every rank; ours what this rank will write.
        """
        if not isinstance(self.writer, AsyncStager):
            return None
        hooks = (getattr(self.writer, name, None) for name in ("stage", "synchronize_staging"))
        own = [
            hook for hook in hooks if not getattr(hook, "__module__", "").startswith("torch.distributed.checkpoint.")
        ]
        return self.writer if own else None

    def give_up(self) -> None:
        """Do nothing: nobody can stop the writer."""

    def note(self, containers: Containers, differing: Sequence[DifferingReplicas]) -> None:
        """Do nothing: the writer has no place for either."""

    def note_interval(self, interval: Interval) -> None:
        """Do nothing: nobody asks this writer."""

    def committed_by_then(self, plan: SavePlan) -> Metadata | None:
        return None


@runtime_checkable
class Abandons(Protocol):
    """A writer that can take back what it wrote in a failed attempt."""

    def abandon(self) -> None: ...


class PluginSave:
    """A rank's half of a save: see ``steps.SaveSteps``."""

    in_memory = False

    def __init__(self, planner: Planner, writer: Writer, call: Call) -> None:
        self._known = planner
        self._planner: Any = planner.planner
        self._writer = writer
        self._call = call
        self._shown: ShownReplicas | None = None

    def planning(self) -> AbstractContextManager[None]:
        return plan_cache_off(self._planner)

    def plan(self, state: dict[str, Any], checkpoint_id: str, check: ReplicaCheck) -> SavePart:
        self._local = self._plan_locally(state)
        may_travel = self._call.rank == 0 and self._writer.travels
        # After the local step, as torch's coordinator rank uses the same objects for both.
        carried = self._call.carry(for_global_step(self._planner), self._writer.writer) if may_travel else None
        to_send = self._plan_to_send(self._local)
        digests = replica_digests(self._local, self._planner, check) if self._call.world_size > 1 else None
        # Without names made of keys each value is stored with the keys that it has.
        containers = containers_of(state) if getattr(self._planner, "flatten_state_dict", True) else []
        reports, figures = self._writer.reports_results, self._writer.figures
        return SavePart(checkpoint_id, to_send, carried, reports, check, digests, containers, figures)

    def asked(self, asked: Asked) -> Message:
        match asked:
            case PlanSaveHere(plans=plans) if plans is not None:
                if asked.lowest_rank:
                    write_on_lowest_rank(self._planner)
                return plan_globally(self._planner, self._writer.writer, plans)
            case CommitHere(results=results) if results is not None:
                self._writer.writer.finish(asked.metadata, list(results))
                return asked.metadata  # as the writer has completed it
        return None  # it is rank 0 that is asked

    def finish_plan(self, answer: FinalTable | SavePlan | ShowReplicas | Paced) -> None:
        if isinstance(answer, Paced):
            self._writer.note_interval(answer.interval)
            answer = answer.answer
        if isinstance(answer, ShowReplicas):
            self._shown = shown_replicas(self._local, self._planner, answer.keys)
            answer = answer.answer
        self.final_plan: SavePlan = self._planner.finish_plan(self._final_plan(answer))
        users = self._users_planner
        if users is not None and users is not self._planner and self._call.world_size == 1:
            users.global_plan = [self.final_plan]  # torch's has it, too, where there is one rank

    def stage(self, buffers: BufferPool) -> None:
        staged = staged_copies(self._planner, self.final_plan, self._call.progress)
        self._planner = StagedPlanner(self._planner, self.final_plan, staged)

    def begin_staging(self, buffers: BufferPool) -> bool:
        self.stage(buffers)
        return False

    def end_staging(self) -> None:
        """Do nothing: all is staged."""

    def nbytes_to_stage(self) -> int:
        return 0

    def staged_part(self) -> StagedPart | None:
        return None

    def release(self, *, to_others: bool) -> None:
        """Do nothing: what is staged goes with the object."""

    def write(self, *, again: bool = False) -> Results | ResultsWithReplicas | SealedPart:
        planner = self._planner
        if not self._writer.counts_progress:
            planner = CountingPlanner(planner, self._call.progress)
        written = self._writer.writer.write_data(self.final_plan, planner)
        written.wait()
        return self._with_shown(self._results_to_send(written.value()))

    def _with_shown(self, results: Results) -> Results | ResultsWithReplicas:
        return results if self._shown is None else ResultsWithReplicas(results, self._shown)

    def committed_by_then(self) -> Metadata | None:
        return self._writer.committed_by_then(self.final_plan)

    def abandon(self) -> None:
        if isinstance(self._writer.writer, Abandons):
            try:
                self._writer.writer.abandon()
            except OSError:
                # The save has failed for a reason of its own, and that is the one to tell. What stays behind is not
                # part of any checkpoint.
                return

    def end(self, committed: Metadata | CommittedWithReplicas) -> Metadata:
        if isinstance(committed, CommittedWithReplicas):
            warn_of_differing(committed.differing, self._call.checkpoint_id)
            committed = committed.metadata
        if self._users_planner is not None:
            self._users_planner.metadata = committed
        return committed

    @property
    def is_empty(self) -> bool:
        return not self._local.items

    @property
    def _users_planner(self) -> DefaultSavePlanner | None:
        """The user's planner that is to have the metadata: rank 0's, as under torch. A copy did the global step."""
        users = self._known.users
        if self._call.rank != 0 or not isinstance(users, DefaultSavePlanner) or "metadata" in vars(type(users)):
            return None
        return users

    def _plan_locally(self, state: dict[str, Any]) -> SavePlan:
        is_coordinator = self._call.rank == 0
        planner, writer = self._planner, self._writer.writer
        storage_meta = writer.storage_meta()
        try:
            if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
                planner.set_up_planner(state_dict=state, storage_meta=storage_meta, is_coordinator=is_coordinator)
            else:  # planners from before torch 2.3 know no storage_meta
                planner.set_up_planner(state, is_coordinator)
        except ValueError:
            flat_state(state)  # says which, where two values have one name
            raise
        writer.set_up_storage_writer(is_coordinator, **accepted(writer.set_up_storage_writer, self._call.rank))
        try:
            plan = planner.create_local_plan()
        except Exception:
            require_initialized(planner)  # torch's error has no name
            raise
        if not self._known.has_looked:
            require_storable(planner, plan, state)
        prepared: SavePlan = writer.prepare_local_plan(plan)
        return prepared

    # What ray_dcp's own does by tables.

    def _plan_to_send(self, local: SavePlan) -> SavePlan | PlanTable:
        return local

    def _final_plan(self, answer: FinalTable | SavePlan) -> SavePlan:
        assert isinstance(answer, SavePlan), "only whoever has sent a table gets one"
        return answer

    def _results_to_send(self, results: Sequence[WriteResult]) -> Results:
        return results


class PluginGlobalSave:
    """The coordinator's half, by copies of rank 0's planner and writer."""

    stays_on_rank_zero = False
    kept = None

    def __init__(self, planner: SavePlanner, writer: Writer, *, reports_results: bool) -> None:
        self._planner = planner
        self._writer = writer
        self._written = _Count(reports_results)
        self.attempt: str | None = None

    @property
    def may_have_committed(self) -> bool:
        return self._writer.may_have_committed

    def give_up(self) -> None:
        self._writer.give_up()

    def plan(self, parts: Sequence[SavePart], on_lowest_rank: Collection[Key]) -> Sequence[SavePlan]:
        local_plans = _agreeing(parts)
        reached(Point.GLOBAL_PLAN)
        if on_lowest_rank:
            write_on_lowest_rank(self._planner)
        plans, self._metadata = plan_globally(self._planner, self._writer.writer, local_plans)
        self.attempt = self._writer.attempt
        self._written.expect(plans, self._metadata)
        return plans

    def commit(
        self, results: Sequence[Results], containers: Containers, differing: Sequence[DifferingReplicas]
    ) -> Sequence[Metadata]:
        self._written.require_all(results)
        self._writer.note(containers, differing)
        self._writer.writer.finish(self._metadata, list(results))
        return [self._metadata] * len(results)


class SaveOnRankZero:
    """The coordinator's half where planner and writer stay on rank 0: it hands that on, and checks what comes back."""

    stays_on_rank_zero = True
    attempt: str | None = None
    kept = None
    may_have_committed = False

    def __init__(self, *, reports_results: bool) -> None:
        self._written = _Count(reports_results)

    def give_up(self) -> None:
        """Do nothing: the writer is out of reach."""

    def plan(self, parts: Sequence[SavePart], on_lowest_rank: Collection[Key]) -> Sequence[PlanSaveHere]:
        asked = PlanSaveHere(_agreeing(parts), bool(on_lowest_rank))
        return [asked, *[PlanSaveHere(None)] * (len(parts) - 1)]

    def planned(self, planned: GlobalSavePlan) -> Sequence[SavePlan]:
        """What rank 0 has made of all plans."""
        plans, self._metadata = planned
        self._written.expect(plans, self._metadata)
        return plans

    def commit(
        self, results: Sequence[Results], containers: Containers, differing: Sequence[DifferingReplicas]
    ) -> Sequence[CommitHere]:
        self._written.require_all(results)
        return [CommitHere(results, self._metadata), *[CommitHere(None, None)] * (len(results) - 1)]


class _Count:
    """What is to be written, and whether it was: torch's own writer loses the errors of its helper threads."""

    def __init__(self, reports_results: bool) -> None:
        self._reports_results = reports_results

    def expect(self, plans: Sequence[SavePlan], metadata: Metadata) -> None:
        require_whole_tensors(metadata, plans)
        self._planned = {item.index for plan in plans for item in plan.items}

    def require_all(self, results: Sequence[Any]) -> None:
        """Count what came back. A user's writer that reports nothing at all keeps its own books and is believed."""
        written = {result.index for of_rank in results for result in of_rank}
        lacking = self._planned - written
        if lacking and (written or self._reports_results):
            raise StateDictError(
                f"{len(lacking)} of {len(self._planned)} planned items were never written; nothing was committed",
                sorted(f"{index.fqn} at {index.offset}" for index in lacking),
            )


def _agreeing(parts: Sequence[SavePart]) -> list[SavePlan]:
    """The local plans of all ranks, which mean the same by each name."""
    local_plans = [part.dcp_plan() for part in parts]
    require_agreeing_plans(local_plans)
    return local_plans


def write_on_lowest_rank(planner: SavePlanner) -> None:
    """Let the lowest rank write what several ranks have; a planner that cannot do that is left as it is."""
    if isinstance(planner, DefaultSavePlanner):
        planner.dedup_save_to_lowest_rank = True


def plan_globally(planner: SavePlanner, writer: StorageWriter, local_plans: Sequence[SavePlan]) -> GlobalSavePlan:
    """A save's global step, wherever planner and writer are."""
    try:
        plans, metadata = planner.create_global_plan(list(local_plans))
    except ValueError as error:
        if "validate global plan" in str(error):
            require_valid_plans(local_plans)  # torch's words for it are two numbers
        raise
    return writer.prepare_global_plan(plans), metadata


__all__ = ["Planner", "PluginGlobalSave", "PluginSave", "SaveOnRankZero", "UsersWriter", "Writer"]
