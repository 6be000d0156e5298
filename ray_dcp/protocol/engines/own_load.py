"""What a load asks beside DCP's own steps, of ray_dcp's planner (``OwnTemplate``) and reader (``OwnReader``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful

from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.format.scalar_record import NotAScalarError, scalar_of
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer
from ray_dcp.planning.template.comparison import TemplateCheck
from ray_dcp.planning.template.optimizer_check import optimizer_problems
from ray_dcp.planning.template.template_hook import value_problems
from ray_dcp.planning.template.template_planner import TemplatePlanner
from ray_dcp.planning.values.collect import CollectedTemplate
from ray_dcp.planning.values.containers import Containers
from ray_dcp.protocol.engines.locations import OwnLocation
from ray_dcp.protocol.engines.python_values import Kept
from ray_dcp.protocol.engines.shared_values import ReadsAside, differing_values
from ray_dcp.reads.checkpoint import FromMemory, OpenedCheckpoint
from ray_dcp.reads.nearby import Neighbours
from ray_dcp.reads.reader import StoreReader


class OwnReader(OwnLocation):
    """A ``StoreReader``, or a user's subclass of it."""

    opened_for_all = counts_progress = can_keep_python_back = hands_over_no_code = True

    def __init__(self, reader: StoreReader) -> None:
        super().__init__(reader)
        self.reader = reader
        # A subclass may read in its own way, and would then leave others waiting.
        self.reads_parts = type(reader).read_data is StoreReader.read_data
        self.has_global_step = type(reader).prepare_global_plan is not StoreReader.prepare_global_plan

    def open(self, opened: OpenedCheckpoint | None, rank: int) -> Metadata:
        if opened is not None:
            self.reader.adopt(opened)
        return self.reader.read_metadata()

    @property
    def from_memory(self) -> FromMemory | None:
        return self.reader.from_memory

    @property
    def of_other_libraries(self) -> bool:
        return self.reader.of_other_libraries

    @property
    def containers(self) -> Containers | None:
        return self.reader.containers

    def look_nearby(self, neighbours: Neighbours) -> None:
        self.reader.look_nearby(neighbours)

    def leave_nearby(self) -> None:
        self.reader.leave_nearby()

    def offer(self, plan: LoadPlan, planner: LoadPlanner, world_size: int) -> ShareOffer | None:
        return self.reader.offer_shared_reads(plan, planner, world_size)

    def share(self, share: NodeShare | None, rank: int) -> None:
        self.reader.share_reads(share, rank)

    def differing(self, plan: LoadPlan) -> Sequence[DifferingReplicas]:
        wanted = {item.storage_index.fqn for item in plan.items} if self.reader.differing else ()
        return [one for one in self.reader.differing if one.fqn in wanted]

    def are_stored_alike(self, fqns: Sequence[str]) -> bool:
        return self.reader.are_stored_alike(fqns)

    def read_aside(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        nbytes_loaded = self.reader.nbytes_loaded
        self.reader.read_data(plan, planner).wait()
        self.reader.nbytes_loaded = nbytes_loaded  # nothing has come to the template

    @property
    def nbytes(self) -> tuple[int, int]:
        return self.reader.nbytes_read, self.reader.nbytes_loaded

    @property
    def nbytes_by_place(self) -> Mapping[str, int]:
        return self.reader.nbytes_by_place


class OwnTemplate:
    """A ``TemplatePlanner``: it checks the template, and keeps Python values decoded."""

    def __init__(self, planner: TemplatePlanner) -> None:
        self.planner = planner
        # A subclass may look at what is read, and would then miss what others have read for it.
        self.shares_reads = type(planner) is TemplatePlanner
        self.has_global_step = type(planner).create_global_plan is not TemplatePlanner.create_global_plan
        self._decoded: dict[str, Any] = {}
        self._statefuls: Sequence[tuple[str, Stateful]] = ()

    def begin(self, template: CollectedTemplate, rank: int, world_size: int) -> None:
        self.planner.rank, self.planner.world_size = rank, world_size
        self.planner.originals = template.originals
        self._statefuls = template.statefuls

    def know(self, containers: Containers | None) -> None:
        self.planner.containers = containers

    def check(self, *, strict: bool) -> TemplateCheck | None:
        return self.planner.check(strict=strict)

    def take(self, kept: Kept) -> None:
        try:  # most are numbers and strings, of which nothing but the record is needed
            value = scalar_of(kept.record)
        except NotAScalarError:
            value = self.planner.decode_python(kept.item, kept.content)
        self._decoded[kept.item.dest_index.fqn] = value

    def problems(self, plan: LoadPlan, reader: ReadsAside, *, strict: bool) -> list[str]:
        assert self.planner.metadata is not None
        names = self.planner.metadata.state_dict_metadata
        problems = optimizer_problems(self._statefuls, names, self._decoded, strict=strict)
        problems += value_problems(self._statefuls, self._decoded)
        return problems + differing_values(self.planner.shared_memory(), plan, self.planner, reader)

    @property
    def has_python(self) -> bool:
        return bool(self._decoded)

    def put(self) -> None:
        self.planner.put_python(self._decoded)
        self.planner.put_loaded()

    @property
    def on_meta(self) -> frozenset[str]:
        return self.planner.on_meta

    def asks_below(self, fqn: str) -> bool:
        return any(name.startswith(f"{fqn}.") for name in self.planner.state_dict)


__all__ = ["OwnReader", "OwnTemplate"]
