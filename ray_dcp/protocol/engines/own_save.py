"""A save by ray_dcp's own planner and writer, without an object for each item::

    rank:         local plan -> PlanTable ==plan==> FinalTable -> shard file -> WrittenColumns ==write==>
    coordinator:  tables -> GlobalTable -> what each rank keeps;   columns -> manifest and .metadata

Where another rank has a plug-in the coordinator answers with DCP's plans, and is sent DCP's results.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from ray_dcp.errors import StateDictError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.gc_pause import collector_paused
from ray_dcp.pace.interval import Figures, Interval
from ray_dcp.planning.save_plan.global_plan import GlobalTable
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.planning.values.containers import Containers
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.protocol.call import phase
from ray_dcp.protocol.deputy import SealedPart
from ray_dcp.protocol.engines.locations import OwnLocation
from ray_dcp.protocol.engines.plugin_save import PluginSave
from ray_dcp.protocol.messages import CommittedWithReplicas, FinalTable, Results, ResultsWithReplicas, SavePart, encode
from ray_dcp.protocol.node_agent import FileJob, StagedPart
from ray_dcp.reads.checkpoint import OpenedCheckpoint
from ray_dcp.settings import Phase, staging_nbytes_from
from ray_dcp.staging.buffer_errors import StagingMemoryError, StepNotKeptError
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.staging.pinned import BehindNow
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.lazy_metadata import CommittedMetadata
from ray_dcp.write.results import WrittenColumns, WrittenItems
from ray_dcp.write.staged_file import FileToStage, StagedFile
from ray_dcp.write.writer import ShardTarget, StoreWriter, shard_key

logger = logging.getLogger(__name__)


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
        if self.writer.in_memory or not isinstance(plan.storage_data, ShardTarget):
            return None
        try:
            return self.writer.committed(plan.storage_data.attempt)
        except OSError:
            return None  # nobody knows; what the save has failed with is to be told


@dataclass(frozen=True, slots=True)
class _Staged:
    """What a rank has staged; nothing in it where the rank writes nothing."""

    file: StagedFile | None
    buffer: SharedBuffer | None
    pool: BufferPool
    """The pool that the buffer is from."""


@dataclass(frozen=True, slots=True)
class _ToCopy:
    """What is laid out, and the buffer that is taken for it."""

    file: FileToStage
    buffer: SharedBuffer
    pool: BufferPool


class OwnSave(PluginSave):
    """A rank's half of such a save."""

    _by_columns = False
    _to_copy: _ToCopy | None = None
    _behind: BehindNow | None = None
    _staged: _Staged | None = None
    _is_committed = False
    _written: Results | ResultsWithReplicas | SealedPart = None
    """What was written in place of being staged."""
    _is_written = False

    @property
    def in_memory(self) -> bool:  # type: ignore[override]
        return bool(self._writer.writer.in_memory)

    def _plan_to_send(self, local: SavePlan) -> PlanTable:
        return PlanTable.of(local, ties=ties_of(self._planner))

    def _final_plan(self, answer: FinalTable | SavePlan) -> SavePlan:
        if not isinstance(answer, FinalTable):
            return super()._final_plan(answer)
        self._by_columns = True
        return answer.plan(self._local)

    def stage(self, buffers: BufferPool) -> None:
        """Lay this rank's file out in shared memory.

        Where there is no room for that it is written, at once and by this thread: a copy in memory of the process would
        find no more room, and the kernel would kill somebody.
        """
        if self._laid_out(buffers, watches=False):
            with collector_paused():
                self.end_staging()

    def begin_staging(self, buffers: BufferPool) -> bool:
        if not self._laid_out(buffers, watches=True):
            return False
        assert self._to_copy is not None
        self._behind = BehindNow(self._to_copy.file.devices)
        return True

    def end_staging(self) -> None:
        assert self._to_copy is not None, "it is laid out, and not copied yet"
        to_copy, self._to_copy = self._to_copy, None
        try:
            with self._behind or nullcontext():
                file = to_copy.file.copy_to(to_copy.buffer.memory)
        except BaseException:
            to_copy.pool.give_back(to_copy.buffer, is_newest=False)
            raise
        self._staged = _Staged(file, to_copy.buffer, to_copy.pool)

    def _laid_out(self, buffers: BufferPool, *, watches: bool) -> bool:
        """Whether there is something to copy, and a buffer for it."""
        if not self._by_columns:
            super().stage(buffers)
            return False
        with collector_paused():  # an object or two for each item, all of which stay
            file = self._file_to_stage(watches=watches)
        if file is None:
            self._staged = _Staged(None, None, buffers)
            return False
        try:
            max_nbytes = staging_nbytes_from(os.environ)
            buffer = buffers.take(file.nbytes, look=self._call.progress.advance, max_nbytes=max_nbytes)
        except StagingMemoryError as error:
            if self.in_memory:
                raise
            logger.warning("%s; this rank writes its part before async_save returns", error)
            with phase(self._call, Phase.WRITE):
                self._written = super().write()
            self._is_written = True
            return False
        self._to_copy = _ToCopy(file, buffer, buffers)
        return True

    def nbytes_to_stage(self) -> int:
        file = self._file_to_stage() if self._by_columns else None
        return 0 if file is None else file.nbytes

    def _file_to_stage(self, *, watches: bool = False) -> FileToStage | None:
        target, items = cast(ShardTarget, self.final_plan.storage_data), self.final_plan.items
        return FileToStage(shard_key(target), target.rank, items, self._planner, watches=watches) if items else None

    def staged_part(self) -> StagedPart | None:
        if self._is_written:
            return StagedPart(encode(self._written), None)
        if self._staged is None:
            return None
        if self._staged.buffer is None or self._staged.file is None:
            return StagedPart(encode(self._with_shown(None)), None)
        file, writer = self._staged.file, cast(StoreWriter, self._writer.writer)
        buffer = self._staged.buffer
        job = FileJob(
            buffer.name,
            buffer.version,
            file.nbytes,
            file.open_ends,
            writer.checkpoint_id,
            file.key,
            writer.sync_files,
            stays_in_memory=writer.in_memory,
        )
        return StagedPart(encode(self._with_shown(file.columns)), job)

    def write(self, *, again: bool = False) -> Results | ResultsWithReplicas | SealedPart:
        if self._is_written:
            return self._written
        if self._staged is None:
            return super().write()
        if self.in_memory and self._staged.file is not None:
            raise StepNotKeptError(reason="no agent of its node has taken it (the log of its rank may say why)")
        if self._staged.buffer is None or self._staged.file is None:
            return self._with_shown(None)
        file, writer = self._staged.file, cast(StoreWriter, self._writer.writer)
        crcs = writer.write_staged(file, self._staged.buffer.memory, again=again)
        # The very bytes that a deputy sends: it may have sent them before it died.
        return SealedPart(encode(self._with_shown(file.columns)), crcs.tobytes())

    def release(self, *, to_others: bool) -> None:
        if self._to_copy is not None:
            self._to_copy.pool.give_back(self._to_copy.buffer, is_newest=False)
            self._to_copy = None
        if self._staged is not None and self._staged.buffer is not None:
            if to_others:
                self._staged.pool.leave(self._staged.buffer)
            else:  # where nothing was committed the file before is of more use in memory
                self._staged.pool.give_back(self._staged.buffer, is_newest=self._is_committed)
        self._staged = None

    def end(self, committed: Metadata | CommittedWithReplicas) -> Metadata:
        metadata = super().end(committed)
        self._is_committed = True
        return metadata

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

    @property
    def kept(self) -> OpenedCheckpoint | None:
        kept = self._writer.kept
        return None if kept is None else OpenedCheckpoint(self._writer.checkpoint_id, *kept)

    def give_up(self) -> None:
        self._writer.give_up()

    def plan(self, parts: Sequence[SavePart], on_lowest_rank: Collection[Key]) -> Sequence[FinalTable]:
        tables = [part.plan for part in parts if isinstance(part.plan, PlanTable)]
        reached(Point.GLOBAL_PLAN)
        self._table = self._planner.create_global_table(tables, on_lowest_rank=on_lowest_rank)
        targets = self._writer.begin_attempt(len(tables))
        self.attempt = None if self._writer.in_memory else self._writer.attempt
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
