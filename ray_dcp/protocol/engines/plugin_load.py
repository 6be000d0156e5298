"""A load by any of DCP's planners and readers, ray_dcp's among them, in any mixture: each step is what DCP calls it.

The planner stands behind a ``Template``, the reader behind a ``Reader``: what DCP's interfaces do not ask for,
ray_dcp's have (``own_load``), and a user's do not (``UsersTemplate``, ``UsersReader``).

The coordinator's half leaves every rank its own plan where planner and reader have no global step (``EachRanksOwn``),
takes the steps of copies of rank 0's (``PluginGlobalLoad``), or hands rank 0 all plans, where they stay
(``LoadOnRankZero``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer
from ray_dcp.planning.per_rank import per_rank_fqn
from ray_dcp.planning.template.comparison import TemplateCheck, without_names
from ray_dcp.planning.template.stored_names import SeenNames
from ray_dcp.planning.values.collect import CollectedTemplate
from ray_dcp.planning.values.containers import Containers
from ray_dcp.protocol.call import Call
from ray_dcp.protocol.engines.locations import UsersLocation
from ray_dcp.protocol.engines.plugin_calls import accepted
from ray_dcp.protocol.engines.python_values import Kept, PythonValues, Reads, TakesPython
from ray_dcp.protocol.engines.shared_values import ReadsAside
from ray_dcp.protocol.messages import (
    NO_GLOBAL_STEP,
    Asked,
    Carries,
    LoadAnswer,
    LoadPart,
    Message,
    NoGlobalStep,
    PlanLoadHere,
    SendPlan,
)
from ray_dcp.protocol.replica_warnings import warn_of_loading_differing
from ray_dcp.reads.checkpoint import FromMemory, OpenedCheckpoint
from ray_dcp.reads.nearby import Neighbours
from ray_dcp.reads.reader import StoreReader


class Reader(Reads, ReadsAside, Protocol):
    """A storage reader, and what a load asks beside DCP's own steps."""

    opened_for_all: bool
    """Whether the coordinator opens the checkpoint, once for all ranks."""
    reads_parts: bool
    """Whether a plan may be read in parts."""
    has_global_step: bool
    """Whether ``prepare_global_plan`` does anything."""
    hands_over_no_code: bool
    """Whether nothing that it hands over, but for the known Python values, can fail when it is put in place."""

    @property
    def from_memory(self) -> FromMemory | None:
        """Where the checkpoint is in memory alone, what this rank has of it."""
        ...

    def open(self, opened: OpenedCheckpoint | None, rank: int) -> Metadata:
        """The metadata, by ``read_metadata``; of what the coordinator has opened, where it has."""
        ...

    @property
    def of_other_libraries(self) -> bool:
        """Whether what it has opened names tensors as another library does."""
        ...

    @property
    def containers(self) -> Containers | None:
        """The containers of the saved state dict, once the reader is set up; None where nobody knows."""
        ...

    def look_nearby(self, neighbours: Neighbours) -> None:
        """Read from memory what ``neighbours`` have of the checkpoint's place, once the reader is set up."""
        ...

    def leave_nearby(self) -> None:
        """Let go of what was opened there: all is read."""
        ...

    def offer(self, plan: LoadPlan, planner: LoadPlanner, world_size: int) -> ShareOffer | None:
        """What other ranks of this node could read for this one; None for nothing."""
        ...

    def share(self, share: NodeShare | None, rank: int) -> None:
        """Take part in ``share`` when it reads next."""
        ...

    def differing(self, plan: LoadPlan) -> Sequence[DifferingReplicas]:
        """What of ``plan`` differed between ranks when it was saved."""
        ...

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes read from storage, and bytes loaded into the template."""
        ...

    @property
    def nbytes_by_place(self) -> Mapping[str, int]:
        """Bytes read, by where they came from; empty where the reader does not say."""
        ...


class Template(TakesPython, Protocol):
    """A load planner, and what a load asks beside DCP's own steps."""

    shares_reads: bool
    """Whether others may read for it."""
    has_global_step: bool
    """Whether ``create_global_plan`` does anything."""

    def begin(self, template: CollectedTemplate, rank: int, world_size: int) -> None:
        """Prepare for ``template``. Called before ``set_up_planner``."""
        ...

    def know(self, containers: Containers | None) -> None:
        """Take what the reader says of containers. Called before ``create_local_plan``."""
        ...

    def check(self, *, strict: bool) -> TemplateCheck | None:
        """How the template fits, once the local plan is made; None where the planner itself decides that."""
        ...

    def problems(self, plan: LoadPlan, reader: ReadsAside, *, strict: bool) -> list[str]:
        """What else keeps ``plan`` from being loaded, once its Python values are read; a line for each."""
        ...

    @property
    def has_python(self) -> bool:
        """Whether any Python value waits to be put in place."""
        ...

    def put(self) -> None:
        """Put in place what is not filled there, when all is read."""
        ...

    @property
    def on_meta(self) -> frozenset[str]:
        """The names of the template's tensors that had no memory, and were given some."""
        ...

    def asks_below(self, fqn: str) -> bool:
        """Whether anything below this name is asked for."""
        ...


class UsersReader(UsersLocation):
    """A reader that is not ray_dcp's."""

    opened_for_all = counts_progress = of_other_libraries = hands_over_no_code = False
    containers: Containers | None = None
    from_memory: FromMemory | None = None
    nbytes = (0, 0)
    nbytes_by_place: Mapping[str, int] = {}

    def __init__(self, reader: StorageReader) -> None:
        super().__init__(reader)
        self.reader = reader
        # What is not a reader at all fails where it is asked to read: then all ranks are told.
        read_data = getattr(type(reader), "read_data", None)
        self.reads_parts = self.can_keep_python_back = read_data is FileSystemReader.read_data
        prepare = getattr(type(reader), "prepare_global_plan", None)
        self.has_global_step = prepare is not FileSystemReader.prepare_global_plan

    def open(self, opened: OpenedCheckpoint | None, rank: int) -> Metadata:
        """The metadata of all ranks, else what this one has written alone, as torch reads it."""
        try:
            return self.reader.read_metadata()
        except Exception:
            if "kwargs" not in inspect.signature(self.reader.read_metadata).parameters:
                raise
            with suppress(Exception):
                return self.reader.read_metadata(rank=rank)
            raise

    def look_nearby(self, neighbours: Neighbours) -> None:
        """Do nothing: it reads where it reads."""

    def leave_nearby(self) -> None:
        """Do nothing, as before."""

    def offer(self, plan: LoadPlan, planner: LoadPlanner, world_size: int) -> ShareOffer | None:
        return None

    def share(self, share: NodeShare | None, rank: int) -> None:
        """Do nothing: it has offered nothing."""

    def differing(self, plan: LoadPlan) -> Sequence[DifferingReplicas]:
        return ()

    def are_stored_alike(self, fqns: Sequence[str]) -> bool:
        return False  # nobody knows: a look tells

    def read_aside(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self.reader.read_data(plan, planner).wait()


class UsersTemplate:
    """A planner that is not ray_dcp's: what fits is for it to say, and it takes Python values by ``load_bytes``."""

    shares_reads = False
    on_meta: frozenset[str] = frozenset()

    def __init__(self, planner: LoadPlanner, *, trusted: bool) -> None:
        self.planner = planner
        create = getattr(type(planner), "create_global_plan", None)
        self.has_global_step = create is not DefaultLoadPlanner.create_global_plan
        self._trusted = trusted
        self._puts: list[Callable[[], None]] = []

    def begin(self, template: CollectedTemplate, rank: int, world_size: int) -> None:
        """Do nothing: ``set_up_planner`` tells the planner."""

    def know(self, containers: Containers | None) -> None:
        """Do nothing: the planner has no use for them."""

    def check(self, *, strict: bool) -> TemplateCheck | None:
        return None

    def problems(self, plan: LoadPlan, reader: ReadsAside, *, strict: bool) -> list[str]:
        return []

    def take(self, kept: Kept) -> None:
        if not self._trusted:
            decode_python(kept.content, file=kept.file, fqn=kept.item.dest_index.fqn, trusted=False)
        self._puts.append(functools.partial(self.planner.load_bytes, kept.item, kept.content))

    @property
    def has_python(self) -> bool:
        return bool(self._puts)

    def put(self) -> None:
        for put in self._puts:
            put()

    def asks_below(self, fqn: str) -> bool:
        return True


class PluginLoad:
    """A rank's half of a load: see ``steps.LoadSteps``."""

    def __init__(
        self, template: Template, reader: Reader, call: Call, *, checkpoint_id: str, share_reads: bool
    ) -> None:
        self._template = template
        self._reader = reader
        self._call = call
        self._shares_reads = share_reads and call.world_size > 1 and template.shares_reads and reader.reads_parts
        self._has_global_step = template.has_global_step or reader.has_global_step
        self._python = PythonValues(template, reader, call.progress, checkpoint_id)

    @property
    def opened_for_all(self) -> bool:
        return self._reader.opened_for_all

    @property
    def from_memory(self) -> FromMemory | None:
        return self._reader.from_memory

    def open(self, opened: OpenedCheckpoint | None) -> Metadata:
        return self._reader.open(opened, self._call.rank)

    @property
    def of_other_libraries(self) -> bool:
        return self._reader.of_other_libraries

    def plan(self, template: CollectedTemplate, metadata: Metadata, seen: SeenNames) -> None:
        planner, reader, rank = self._template.planner, self._reader.reader, self._call.rank
        self._template.begin(template, rank, self._call.world_size)
        planner.set_up_planner(template.values, seen.metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, **accepted(reader.set_up_storage_reader, rank))
        self._reader.look_nearby(self._call)
        self._template.know(self._reader.containers)
        self._local: LoadPlan = reader.prepare_local_plan(seen.stored_plan(planner.create_local_plan()))

    def check(self, *, strict: bool) -> TemplateCheck | None:
        return self._template.check(strict=strict)

    def part(self, check: TemplateCheck | None, problems: Sequence[str], strict: bool | str) -> LoadPart:
        self._check = check
        carried = self._carried() if self._call.rank == 0 else None
        refused = check is not None and bool(check.problems or (check.lacking and strict))
        if not problems and not refused and not self._has_global_step and self._reader.reads_parts:
            self._python.read_first(self._local)
            problems = self._template.problems(self._local, self._reader, strict=bool(strict))
        offer = None
        if self._shares_reads:
            rest = self._python.rest_of(self._local)
            offer = self._reader.offer(rest, self._template.planner, self._call.world_size)
        sent = self._local if self._has_global_step else None
        return LoadPart(sent, without_names(check), strict, tuple(problems), carried, offer)

    def asked(self, asked: Asked) -> Message:
        match asked:
            case SendPlan():
                return self._local
            case PlanLoadHere(plans=plans) if plans is not None:
                return plan_load_globally(self._template.planner, self._reader.reader, plans)
        return None  # it is rank 0 that is asked

    def finish_plan(self, answer: LoadAnswer) -> None:
        final, self._unexpected, share = answer
        self._plan: LoadPlan = self._template.planner.finish_plan(self._local if final is None else final)
        self._reader.share(share, self._call.rank)
        if self._call.rank == 0:
            warn_of_loading_differing(self._reader.differing(self._plan), self._call.checkpoint_id)

    def read(self) -> None:
        self._python.fill(self._python.rest_of(self._plan))

    def leave(self) -> None:
        self._reader.leave_nearby()

    @property
    def may_fail_to_put(self) -> bool:
        return self._template.has_python or not self._reader.hands_over_no_code

    def put(self) -> None:
        self._template.put()

    @property
    def on_meta(self) -> frozenset[str]:
        return self._template.on_meta

    def asks_below(self, fqn: str) -> bool:
        return self._template.asks_below(fqn)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        if self._check is None:
            return _as_known(item.dest_index.fqn for item in self._plan.items), (), self._unexpected
        return _as_known(self._check.wanted), self._check.missing, self._unexpected

    @property
    def nbytes(self) -> tuple[int, int]:
        return self._reader.nbytes

    @property
    def nbytes_by_place(self) -> Mapping[str, int]:
        return self._reader.nbytes_by_place

    def _carried(self) -> Carries | NoGlobalStep | None:
        """Planner and reader for the coordinator, after their local step, as torch's coordinator rank uses them."""
        if not self._has_global_step:
            return NO_GLOBAL_STEP
        planner = self._template.planner if self._template.has_global_step else DefaultLoadPlanner()
        reader = self._reader.reader if self._reader.has_global_step else StoreReader()
        return self._call.carry(planner, reader)


def _as_known(fqns: Iterable[str]) -> tuple[str, ...]:
    """Names as the user knows them, sorted: that of a ``PerRank``, not those of the ranks' values in it."""
    return tuple(sorted(set(map(per_rank_fqn, fqns))))


class EachRanksOwn:
    """The coordinator's half where planner and reader have no global step: each rank's plan stays as it is."""

    needs_plans = stays_on_rank_zero = False

    def plan(self, local_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan | None]:
        raise AssertionError("it needs no plans")


class PluginGlobalLoad:
    """The coordinator's half, by copies of rank 0's planner and reader."""

    needs_plans = True
    stays_on_rank_zero = False

    def __init__(self, planner: LoadPlanner, reader: StorageReader) -> None:
        self._planner = planner
        self._reader = reader

    def plan(self, local_plans: Sequence[LoadPlan]) -> Sequence[LoadPlan]:
        return plan_load_globally(self._planner, self._reader, local_plans)


class LoadOnRankZero:
    """The coordinator's half where planner and reader stay on rank 0, which is handed all plans."""

    needs_plans = stays_on_rank_zero = True

    def plan(self, local_plans: Sequence[LoadPlan]) -> Sequence[PlanLoadHere]:
        return [PlanLoadHere(local_plans), *[PlanLoadHere(None)] * (len(local_plans) - 1)]


def plan_load_globally(
    planner: LoadPlanner, reader: StorageReader, local_plans: Sequence[LoadPlan]
) -> Sequence[LoadPlan]:
    """A load's global step, wherever planner and reader are."""
    return reader.prepare_global_plan(planner.create_global_plan(list(local_plans)))


__all__ = [
    "EachRanksOwn",
    "LoadOnRankZero",
    "PluginGlobalLoad",
    "PluginLoad",
    "Reader",
    "Template",
    "UsersReader",
    "UsersTemplate",
]
