"""The coordinator's half of a save."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ray_dcp.errors import StateDictError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.planning.save_plan.check_save import require_agreeing_plans, require_valid_plans, require_whole_tensors
from ray_dcp.planning.save_plan.global_plan import GlobalTable
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.replicas import (
    Differing,
    ShownReplicas,
    describe_differing,
    find_differing,
    keys_to_show,
    refusals,
)
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.planning.values.containers import Containers, merged_containers
from ray_dcp.protocol.coordinator.session import OnRankZero, Session, for_rank_zero, one_checkpoint_id
from ray_dcp.protocol.messages import Carried
from ray_dcp.settings import DEFAULT_REPLICA_CHECK, ReplicaCheck
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.lazy_metadata import CommittedMetadata
from ray_dcp.write.results import WrittenColumns, WrittenItems
from ray_dcp.write.writer import StoreWriter


@dataclass(frozen=True, slots=True)
class SaveContribution:
    """What a rank sends to plan a save. ``carried``, of rank 0 alone: its (planner, writer), None where they stay."""

    checkpoint_id: str
    plan: SavePlan | PlanTable
    carried: Carried | tuple[SavePlanner, StorageWriter] | None = None
    reports_results: bool = True
    """False for a user's writer, which may keep books of its own."""
    replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK
    replica_digests: array[int] | None = None
    """One for each item of the plan; None where there is nothing to compare."""
    containers: Containers = ()
    """Of this rank's state dict."""


@dataclass(frozen=True, slots=True)
class ShowReplicas:
    """Around the answer to a plan where ranks hold different values: which of this rank's to send with its results."""

    answer: Any
    keys: Collection[Key]
    lowest_rank: bool
    """For rank 0, where the global step is its own: the lowest rank is to write what several have."""


@dataclass(frozen=True, slots=True)
class ResultsWithReplicas:
    """A rank's write results, and the values that it was to show."""

    results: Any
    shown: ShownReplicas


@dataclass(frozen=True, slots=True)
class CommittedWithReplicas:
    """Around rank 0's last answer: which values differed, for the warning."""

    metadata: Any
    differing: Sequence[DifferingReplicas]


@dataclass(frozen=True, slots=True)
class FinalTable:
    """A rank's final plan, of what it has planned itself: the positions it keeps (None: all), and where it writes."""

    kept: Sequence[int] | None
    storage_data: Any

    def plan(self, local: SavePlan) -> SavePlan:
        items = local.items if self.kept is None else [local.items[position] for position in self.kept]
        return replace(local, items=items, storage_data=self.storage_data)


def are_own(planner: SavePlanner, writer: StorageWriter) -> bool:
    """Whether both are ray_dcp's, and no subclass of a user's: their steps are known then."""
    return type(planner) is StatePlanner and type(writer) is StoreWriter


class SaveSession(Session):
    """plan: local plans to final plans. write: write results to the committed ``Metadata``.

    With what stays on rank 0, "global plan" follows the one and "commit" the other.
    """

    first_phase: ClassVar[str] = "plan"

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._writer: StorageWriter | None = None
        self._reports_results = True
        self._metadata: Metadata | None = None
        self._planned: set[MetadataIndex] = set()
        self._table: GlobalTable | None = None
        self._differing: Sequence[Differing] = ()
        self._described: Sequence[DifferingReplicas] = ()

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        steps: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
            "plan": self._plan_looking_at_replicas,
            "global plan": self._planned_on_rank_zero,
            "write": self._write_telling_of_replicas,
            "commit": lambda parts: self._told([parts[0]] * len(parts)),
        }
        return steps[phase](contributions)

    @property
    def may_have_committed(self) -> bool:
        return isinstance(self._writer, StoreWriter) and self._writer.may_have_committed

    def give_up(self) -> None:
        if isinstance(self._writer, StoreWriter):
            self._writer.give_up()

    def next_phase(self, phase: str) -> str | None:
        stays = self._writer is None
        following = {"plan": "global plan" if stays else "write", "global plan": "write"}
        return following.get(phase, "commit" if stays and phase == "write" else None)

    def _plan_looking_at_replicas(self, contributions: Sequence[SaveContribution]) -> Sequence[Any]:
        plans = [part.plan for part in contributions]
        self._differing = find_differing(plans, [part.replica_digests for part in contributions])
        if self._differing and any(part.replica_check.mode == "error" for part in contributions):
            # Other shapes or kinds are another error.
            require_agreeing_plans([plan.plan() if isinstance(plan, PlanTable) else plan for plan in plans])
            raise StateDictError(
                'ranks hold different values under one name (replica_check="error"). Give values that belong to one '
                "rank as PerRank, and different tensors different names; nothing was written",
                refusals(self._differing),
            )
        answers = self._plan(contributions)
        if isinstance(self._writer, StoreWriter):
            self._writer.containers = merged_containers(part.containers for part in contributions)
        if not self._differing:
            return answers
        shown_by = keys_to_show(self._differing)
        return [ShowReplicas(answer, shown_by.get(rank, ()), rank == 0) for rank, answer in enumerate(answers)]

    def _write_telling_of_replicas(self, results: Sequence[Any]) -> Sequence[Any]:
        if not self._differing:
            return self._write(results)
        with_shown: Sequence[ResultsWithReplicas] = results
        self._described = describe_differing(self._differing, [of_rank.shown for of_rank in with_shown])
        if isinstance(self._writer, StoreWriter):
            self._writer.differing = self._described
        answers = self._write([of_rank.results for of_rank in with_shown])
        return answers if self.next_phase("write") else self._told(answers)

    def _told(self, answers: Sequence[Any]) -> Sequence[Any]:
        """The last answers; rank 0's with what it is to warn of."""
        return [CommittedWithReplicas(answers[0], self._described), *answers[1:]] if self._described else answers

    def _plan(self, contributions: Sequence[SaveContribution]) -> Sequence[SavePlan | FinalTable | OnRankZero]:
        self.checkpoint_id = one_checkpoint_id([part.checkpoint_id for part in contributions])
        carried = contributions[0].carried
        tables = [part.plan for part in contributions if isinstance(part.plan, PlanTable)]
        own = carried.unpack() if isinstance(carried, Carried) else carried
        if own is not None and len(tables) == len(contributions) and are_own(*own):
            return self._plan_tables(tables, *own)
        local_plans = [part.plan.plan() if isinstance(part.plan, PlanTable) else part.plan for part in contributions]
        require_agreeing_plans(local_plans)
        self._reports_results = contributions[0].reports_results
        if own is None:
            return for_rank_zero(local_plans)
        planner, self._writer = own
        reached(Point.GLOBAL_PLAN)
        if self._differing:
            write_on_lowest_rank(planner)
        planned = plan_globally(planner, self._writer, local_plans)
        self.attempt = self._writer.attempt if isinstance(self._writer, StoreWriter) else None
        return self._accept(*planned)

    def _plan_tables(
        self, tables: Sequence[PlanTable], planner: SavePlanner, writer: StorageWriter
    ) -> Sequence[FinalTable]:
        """What the generic steps do, for ray_dcp's own planner and writer: without an object for each item."""
        assert isinstance(planner, StatePlanner)
        assert isinstance(writer, StoreWriter)
        self._writer = writer
        reached(Point.GLOBAL_PLAN)
        self._table = planner.create_global_table(tables, on_lowest_rank={one.key for one in self._differing})
        self._metadata = self._table.metadata
        targets = writer.begin_attempt(len(tables))
        self.attempt = writer.attempt
        return [FinalTable(kept, target) for kept, target in zip(self._table.kept, targets, strict=True)]

    def _planned_on_rank_zero(self, parts: Sequence[Any]) -> Sequence[SavePlan]:
        return self._accept(*parts[0])

    def _accept(self, plans: Sequence[SavePlan], metadata: Metadata) -> Sequence[SavePlan]:
        require_whole_tensors(metadata, plans)
        self._metadata = metadata
        self._planned = {item.index for plan in plans for item in plan.items}
        return plans

    def _write(self, results: Sequence[Any]) -> Sequence[Metadata | OnRankZero]:
        assert self._metadata is not None
        if self._table is not None:
            return self._write_table(self._table, results)
        self._require_all_written(results)
        if self._writer is None:
            return for_rank_zero(results, self._metadata)
        self._writer.finish(self._metadata, list(results))
        return [self._metadata] * len(results)

    def _write_table(self, table: GlobalTable, results: Sequence[WrittenColumns | None]) -> Sequence[CommittedMetadata]:
        assert isinstance(self._writer, StoreWriter)
        written = []
        problems = []
        for rank, (indexes, columns) in enumerate(zip(table.indexes(), results, strict=True)):
            num_written = columns.num_written if columns is not None and len(columns) == len(indexes) else 0
            if num_written < len(indexes):
                problems.append(f"rank {rank}: {num_written} of {len(indexes)}")
            elif columns is not None:
                written.append(WrittenItems(indexes, columns))
        if problems:
            raise StateDictError("not all planned items were written; nothing was committed", problems)
        committed = self._writer.finish_columns(table.metadata, written)
        return [committed] * len(results)

    def _require_all_written(self, results: Sequence[list[WriteResult]]) -> None:
        """Count what came back: torch's own writer loses the errors of its helper threads.

        A user's writer that reports nothing at all keeps its own books and is believed.
        """
        written = {result.index for of_rank in results for result in of_rank}
        lacking = self._planned - written
        if lacking and (written or self._reports_results):
            raise StateDictError(
                f"{len(lacking)} of {len(self._planned)} planned items were never written; nothing was committed",
                sorted(f"{index.fqn} at {index.offset}" for index in lacking),
            )


def write_on_lowest_rank(planner: SavePlanner) -> None:
    """Of what several ranks have, let the lowest one's be written; a planner that cannot is left as it is."""
    if isinstance(planner, DefaultSavePlanner):
        planner.dedup_save_to_lowest_rank = True


def plan_globally(
    planner: SavePlanner, writer: StorageWriter, local_plans: Sequence[SavePlan]
) -> tuple[Sequence[SavePlan], Metadata]:
    """A save's global step, wherever planner and writer are."""
    try:
        plans, metadata = planner.create_global_plan(list(local_plans))
    except ValueError as error:
        if "validate global plan" in str(error):
            require_valid_plans(local_plans)  # torch's words for it are two numbers
        raise
    return writer.prepare_global_plan(plans), metadata
