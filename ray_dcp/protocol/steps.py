"""The seam between a save or load and whoever does its work: ray_dcp's own planner, writer and reader, or anybody's.

What a call asks of them stands here, in DCP's words, and who answers is chosen here, once for a rank and once for its
coordinator. ``engines.own_save`` and ``engines.own_load`` do it by tables and columns, without an object for each item;
``engines.plugin_save`` and ``engines.plugin_load`` by any planner, writer and reader that DCP takes, in any mixture.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ray_dcp.errors import ConfigError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.planning.template.comparison import TemplateCheck
from ray_dcp.planning.template.stored_names import EVERYTHING, NameChoice, SeenNames
from ray_dcp.planning.template.template_planner import TemplatePlanner
from ray_dcp.planning.values.collect import CollectedTemplate
from ray_dcp.planning.values.containers import Containers
from ray_dcp.protocol.call import Call
from ray_dcp.protocol.deputy import SealedPart
from ray_dcp.protocol.engines.own_load import OwnReader, OwnTemplate
from ray_dcp.protocol.engines.own_save import OwnGlobalSave, OwnSave, OwnWriter
from ray_dcp.protocol.engines.plugin_load import (
    EachRanksOwn,
    LoadOnRankZero,
    PluginGlobalLoad,
    PluginLoad,
    Template,
    UsersReader,
    UsersTemplate,
)
from ray_dcp.protocol.engines.plugin_save import Planner, PluginGlobalSave, PluginSave, SaveOnRankZero, UsersWriter
from ray_dcp.protocol.messages import (
    Asked,
    CommittedWithReplicas,
    FinalTable,
    LoadAnswer,
    LoadPart,
    Message,
    NoGlobalStep,
    Paced,
    PlanLoadHere,
    PlanSaveHere,
    Results,
    ResultsWithReplicas,
    SavePart,
    ShowReplicas,
)
from ray_dcp.protocol.node_agent import StagedPart
from ray_dcp.reads.checkpoint import FromMemory, OpenedCheckpoint
from ray_dcp.reads.reader import StoreReader
from ray_dcp.settings import ReplicaCheck
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.write.writer import StoreWriter


class SaveSteps(Protocol):
    """A rank's half of a save, step by step in this order; each runs once, on every rank, in one thread at a time."""

    @property
    def in_memory(self) -> bool:
        """Whether it is kept in memory alone."""
        ...

    final_plan: SavePlan
    """The final plan, once ``finish_plan`` has run."""

    def planning(self) -> AbstractContextManager[None]:
        """A context for all of the planning."""
        ...

    def plan(self, state: dict[str, Any], checkpoint_id: str, check: ReplicaCheck) -> SavePart:
        """Plan by ``set_up_planner``, ``create_local_plan``, ``set_up_storage_writer``, ``prepare_local_plan``."""
        ...

    def asked(self, asked: Asked) -> Message:
        """Do what rank 0 is asked where planner and writer stay there: ``create_global_plan``, later ``finish``."""
        ...

    def finish_plan(self, answer: FinalTable | SavePlan | ShowReplicas | Paced) -> None:
        """Take the answer to the plan, by ``finish_plan``."""
        ...

    def stage(self, buffers: BufferPool) -> None:
        """Copy what is to be written (``resolve_data``), and only that: afterwards the state may change."""
        ...

    def begin_staging(self, buffers: BufferPool) -> bool:
        """Do of ``stage`` what needs the caller, and return whether ``end_staging`` is to do the rest.

        Another thread may do that; tensors must keep their values until then.
        """
        ...

    def end_staging(self) -> None:
        """Copy. Raises ``TornStagingError`` where the state was changed meanwhile."""
        ...

    def nbytes_to_stage(self) -> int:
        """So many bytes of a buffer ``stage`` needs; 0 where it needs none."""
        ...

    def staged_part(self) -> StagedPart | None:
        """What another process can write, where all is staged in shared memory; else None."""
        ...

    def write(self, *, again: bool = False) -> Results | ResultsWithReplicas | SealedPart:
        """Write, by ``write_data``; returns what to send of its results.

        ``again``: a deputy may have written the same before.
        """
        ...

    def release(self, *, to_others: bool) -> None:
        """Let go of the memory in which it is staged: the save is over.

        It is not used again where it is left ``to_others``: a deputy that this rank has lost sight of may write there.
        """
        ...

    def committed_by_then(self) -> Metadata | None:
        """The metadata, where a coordinator that has died had committed the save before others could fail it."""
        ...

    def abandon(self) -> None:
        """Remove what this rank has written: the save has failed, and certainly nothing was committed."""
        ...

    def end(self, committed: Metadata | CommittedWithReplicas) -> Metadata:
        """The metadata, which the user's planner gets, too. Warns of replicas that differed."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether this rank has planned nothing."""
        ...


class GlobalSaveSteps(Protocol):
    """The coordinator's half of a save. Lists are in rank order. What is raised fails the save for all ranks."""

    stays_on_rank_zero: bool
    """Whether its steps are rank 0's, which is ``Asked`` for them in phases of their own."""
    attempt: str | None
    """The name of the attempt, which its files in storage carry; None where it has no such name, or not yet."""

    @property
    def kept(self) -> OpenedCheckpoint | None:
        """The checkpoint that is committed, where it is kept in memory alone."""
        ...

    @property
    def may_have_committed(self) -> bool:
        """Whether ``.metadata`` may have been put, whatever became of the call."""
        ...

    def give_up(self) -> None:
        """The call has failed: a ``commit`` that still runs must not go through. Called from another thread."""
        ...

    def plan(
        self, parts: Sequence[SavePart], on_lowest_rank: Collection[Key]
    ) -> Sequence[FinalTable | SavePlan | PlanSaveHere]:
        """Plan by ``create_global_plan``, ``prepare_global_plan``.

        At least what ``on_lowest_rank`` names is written by the lowest rank that has it.
        """
        ...

    def commit(
        self, results: Sequence[Results], containers: Containers, differing: Sequence[DifferingReplicas]
    ) -> Sequence[Metadata | Asked]:
        """Commit by ``finish``, once all planned items are known to be written."""
        ...


class LoadSteps(Protocol):
    """A rank's half of a load, step by step in this order; each runs once, on every rank."""

    @property
    def opened_for_all(self) -> bool:
        """Whether the coordinator opens the checkpoint, once for all ranks."""
        ...

    @property
    def from_memory(self) -> FromMemory | None:
        """Where the checkpoint is in memory alone, what this rank has of it."""
        ...

    def open(self, opened: OpenedCheckpoint | None) -> Metadata:
        """The metadata, by ``read_metadata``; of what the coordinator has opened, where it has."""
        ...

    @property
    def of_other_libraries(self) -> bool:
        """Whether what is open names tensors as another library does."""
        ...

    def plan(self, template: CollectedTemplate, metadata: Metadata, seen: SeenNames) -> None:
        """Plan by ``set_up_planner``, ``set_up_storage_reader``, ``create_local_plan``, ``prepare_local_plan``."""
        ...

    def check(self, *, strict: bool) -> TemplateCheck | None:
        """How the template fits; None where a user's planner decides that."""
        ...

    def part(self, check: TemplateCheck | None, problems: Sequence[str], strict: bool | str) -> LoadPart:
        """What to send: the plan, and all that keeps it from being loaded, ``check`` and ``problems`` first.

        Where there are no problems, and planner and reader let it, Python values are read and decoded to find more.
        """
        ...

    def asked(self, asked: Asked) -> Message:
        """The plan that was kept back; on rank 0, where planner and reader stay there, ``create_global_plan``'s."""
        ...

    def finish_plan(self, answer: LoadAnswer) -> None:
        """Take the answer to the plan, by ``finish_plan``."""
        ...

    def read(self) -> None:
        """Read, by ``read_data`` and with it ``resolve_tensor`` and ``commit_tensor``, what has not been read yet."""
        ...

    def leave(self) -> None:
        """Let go of what was opened to read from: all is read, or the load has failed."""
        ...

    @property
    def may_fail_to_put(self) -> bool:
        """Whether ``put`` runs code, which may fail."""
        ...

    def put(self) -> None:
        """Put in place what is not filled there, by ``load_bytes`` for one: every rank has read all of its own."""
        ...

    @property
    def on_meta(self) -> frozenset[str]:
        """The names of the template's tensors that had no memory, and were given some."""
        ...

    def asks_below(self, fqn: str) -> bool:
        """Whether anything below this name is asked for."""
        ...

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The names that were loaded, those that are missing, and those that are unexpected."""
        ...

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes read from storage, and bytes loaded into the template."""
        ...

    @property
    def nbytes_by_place(self) -> Mapping[str, int]:
        """Bytes read, by where they came from; empty where the reader does not say."""
        ...


class GlobalLoadSteps(Protocol):
    """The coordinator's half of a load."""

    needs_plans: bool
    """Whether it wants to see the ranks' plans, which are kept back where nobody does."""
    stays_on_rank_zero: bool
    """Whether it is rank 0 that is ``Asked`` to plan."""

    def plan(self, local_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan | None] | Sequence[PlanLoadHere]:
        """The final plans, by ``create_global_plan`` and ``prepare_global_plan``; None for a rank's own."""
        ...


KnownWriter = OwnWriter | UsersWriter
KnownReader = OwnReader | UsersReader


def known_writer(writer: StorageWriter) -> KnownWriter:
    """``writer`` with answers to all that a save asks of it."""
    return OwnWriter(writer) if isinstance(writer, StoreWriter) else UsersWriter(writer)


def known_reader(reader: StorageReader) -> KnownReader:
    """``reader`` with answers to all that a load asks of it."""
    return OwnReader(reader) if isinstance(reader, StoreReader) else UsersReader(reader)


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


def save_steps(planner: SavePlanner, writer: StorageWriter, call: Call) -> SaveSteps:
    """Choose who does a rank's half of a save: by tables, where planner and writer are ray_dcp's, not subclasses."""
    users = planner.stands_for if isinstance(planner, StatePlanner) else planner
    known = Planner(planner, users, has_looked=type(planner) is StatePlanner)
    if type(planner) is StatePlanner and type(writer) is StoreWriter:
        return OwnSave(known, OwnWriter(writer), call)
    return PluginSave(known, known_writer(writer), call)


def global_save_steps(parts: Sequence[SavePart]) -> GlobalSaveSteps:
    """Choose who does the coordinator's half of a save: by tables, where all ranks have sent such to ray_dcp's pair."""
    carried = parts[0].carried
    if carried is None:
        return SaveOnRankZero(reports_results=parts[0].reports_results)
    planner, writer = carried.unpack()
    in_tables = all(isinstance(part.plan, PlanTable) for part in parts)
    if in_tables and type(planner) is StatePlanner and type(writer) is StoreWriter:
        return OwnGlobalSave(planner, writer)
    return PluginGlobalSave(planner, known_writer(writer), reports_results=parts[0].reports_results)


def default_load_planner(
    planner: LoadPlanner | None, *, cast: bool, trusted: bool, checkpoint_id: str, choice: NameChoice = EVERYTHING
) -> LoadPlanner:
    """The planner to use: the user's own, or ray_dcp's in place of torch's plain default."""

    def load_python(content: io.BytesIO, fqn: str) -> Any:
        file = getattr(content, "name", checkpoint_id)
        return decode_python(content, file=file, fqn=fqn, trusted=trusted)

    if planner is None:
        return TemplatePlanner(load_python=load_python, cast=cast, choice=choice)
    if type(planner) is DefaultLoadPlanner:
        return TemplatePlanner(
            load_python=load_python,
            cast=cast,
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            stands_for=planner,
            choice=choice,
        )
    if choice.only or choice.skip:
        setting = "only" if choice.only else "skip"
        raise ConfigError(setting, f"a {type(planner).__name__} chooses by itself what is loaded; pass no planner")
    return planner


def load_steps(
    planner: LoadPlanner, reader: StorageReader, call: Call, *, trusted: bool, checkpoint_id: str, share_reads: bool
) -> LoadSteps:
    """Choose who does a rank's half of a load: always the same, which asks ray_dcp's planner and reader for more."""
    template: Template = UsersTemplate(planner, trusted=trusted)
    if isinstance(planner, TemplatePlanner):
        template = OwnTemplate(planner)
    return PluginLoad(template, known_reader(reader), call, checkpoint_id=checkpoint_id, share_reads=share_reads)


def global_load_steps(parts: Sequence[LoadPart]) -> GlobalLoadSteps:
    """Choose who does the coordinator's half of a load."""
    carried = parts[0].carried
    if carried is None:
        return LoadOnRankZero()
    if isinstance(carried, NoGlobalStep):
        return EachRanksOwn()
    return PluginGlobalLoad(*carried.unpack())
