"""A save by ray_dcp's own planner and writer, without an object for each item::

    rank:         local plan -> PlanTable ==plan==> FinalTable -> shard file -> WrittenColumns ==write==>
    coordinator:  tables -> GlobalTable -> what each rank keeps;   columns -> manifest and .metadata

Where another rank has a plug-in the coordinator answers with DCP's plans, and is sent DCP's results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from ray_dcp.errors import StateDictError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.pace.interval import Figures, Interval
from ray_dcp.planning.save_plan.global_plan import GlobalTable
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.planning.values.containers import Containers
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.protocol.engines.locations import OwnLocation
from ray_dcp.protocol.engines.plugin_save import PluginSave
from ray_dcp.protocol.messages import FinalTable, Results, SavePart
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.lazy_metadata import CommittedMetadata
from ray_dcp.write.results import WrittenColumns, WrittenItems
from ray_dcp.write.writer import ShardTarget, StoreWriter


class OwnWriter(OwnLocation):
    """A ``StoreWriter``, or a user's subclass of it, in either half of a save."""

    travels = reports_results = counts_progress = True
    stager: AsyncStager | None = None

    def __init__(self, writer: StoreWriter) -> None:
        super().__init__(writer)
        self.writer = writer

    @property
    def attempt(self) -> str | None:
        return self.writer.attempt

    @property
    def may_have_committed(self) -> bool:
        return self.writer.may_have_committed

    def give_up(self) -> None:
        self.writer.give_up()

    def note(self, containers: Containers, differing: Sequence[DifferingReplicas]) -> None:
        self.writer.containers, self.writer.differing = containers, differing

    @property
    def figures(self) -> Figures | None:
        return self.writer.figures

    def note_interval(self, interval: Interval) -> None:
        self.writer.interval = interval

    def committed_by_then(self, plan: SavePlan) -> Metadata | None:
        if not isinstance(plan.storage_data, ShardTarget):
            return None
        try:
            return self.writer.committed(plan.storage_data.attempt)
        except OSError:
            return None  # nobody knows; what the save has failed with is to be told


class OwnSave(PluginSave):
    """A rank's half of such a save."""

    _by_columns = False

    def _plan_to_send(self, local: SavePlan) -> PlanTable:
        return PlanTable.of(local, ties=ties_of(self._planner))

    def _final_plan(self, answer: FinalTable | SavePlan) -> SavePlan:
        if not isinstance(answer, FinalTable):
            return super()._final_plan(answer)
        self._by_columns = True
        return answer.plan(self._local)

    def _results_to_send(self, results: Sequence[WriteResult]) -> Results:
        if not self._by_columns:
            return results
        return results.columns if isinstance(results, WrittenItems) else None


class OwnGlobalSave:
    """The coordinator's half of such a save."""

    stays_on_rank_zero = False

    def __init__(self, planner: StatePlanner, writer: StoreWriter) -> None:
        self._planner = planner
        self._writer = writer
        self._table: GlobalTable | None = None
        self.attempt: str | None = None

    @property
    def may_have_committed(self) -> bool:
        return self._writer.may_have_committed

    def give_up(self) -> None:
        self._writer.give_up()

    def plan(self, parts: Sequence[SavePart], on_lowest_rank: Collection[Key]) -> Sequence[FinalTable]:
        tables = [part.plan for part in parts if isinstance(part.plan, PlanTable)]
        reached(Point.GLOBAL_PLAN)
        self._table = self._planner.create_global_table(tables, on_lowest_rank=on_lowest_rank)
        targets = self._writer.begin_attempt(len(tables))
        self.attempt = self._writer.attempt
        return [FinalTable(kept, target) for kept, target in zip(self._table.kept, targets, strict=True)]

    def commit(
        self, results: Sequence[Results], containers: Containers, differing: Sequence[DifferingReplicas]
    ) -> Sequence[CommittedMetadata]:
        assert self._table is not None
        written = []
        problems = []
        for rank, (indexes, of_rank) in enumerate(zip(self._table.indexes(), results, strict=True)):
            columns = of_rank if isinstance(of_rank, WrittenColumns) else None
            num_written = columns.num_written if columns is not None and len(columns) == len(indexes) else 0
            if num_written < len(indexes):
                problems.append(f"rank {rank}: {num_written} of {len(indexes)}")
            elif columns is not None:
                written.append(WrittenItems(indexes, columns))
        if problems:
            raise StateDictError("not all planned items were written; nothing was committed", problems)
        self._writer.containers, self._writer.differing = containers, differing
        committed = self._writer.finish_columns(self._table.metadata, written)
        return [committed] * len(results)


__all__ = ["OwnGlobalSave", "OwnSave", "OwnWriter"]
