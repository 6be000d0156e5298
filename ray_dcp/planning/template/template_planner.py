"""Filling a template: the load planner that ray_dcp uses where the user gives none.

It differs from torch's default planner in some ways, each of which mends a fault that users have met: it checks
everything before anything is copied, and names all problems at once; it puts a Python value back under the key it came
from (torch's planner writes the value of an integer key beside it, as a string); it fills what is still empty; it
unpickles with an allow-list.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from ray_dcp.planning.assignable import Assignments, own_key
from ray_dcp.planning.layouts import NO_READS, PlannedReads, ReadLayouts, layout_key, local_part
from ray_dcp.planning.template.comparison import TemplateCheck, compare, without_names
from ray_dcp.planning.template.empty_places import Growth, empty_places, saved_empty_names
from ray_dcp.planning.template.overlaps import SharedMemory, shared_memory, tied_to
from ray_dcp.planning.template.stored_names import EVERYTHING, NameChoice
from ray_dcp.planning.template.template_memory import TemplateMemory, can_be_filled, is_meta, unfit
from ray_dcp.planning.values.containers import Containers
from ray_dcp.planning.values.flat import LEAVES, NO_WORD, flat_state
from ray_dcp.torch_private import ShardedTensor, flatten_sharded_tensors, walk_as_before_2_4

_AT_ZERO = torch.Size((0,))
"""The place and length that torch's planner gives for a Python object."""

_LEFT_BY_TORCH = ("original_state_dict", "state_dict", "mappings", "metadata", "is_coordinator")

LoadPython = Callable[[io.BytesIO, str], Any]
"""A function (stored bytes, fqn) -> the value; raises an error of ray_dcp."""


class TemplatePlanner(DefaultLoadPlanner):
    """Plans reads into a template and checks it; ``create_local_plan`` leaves out what the checkpoint lacks."""

    def __init__(
        self,
        *,
        load_python: LoadPython,
        cast: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        stands_for: DefaultLoadPlanner | None = None,
        choice: NameChoice = EVERYTHING,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load=True)
        self._load_python = load_python
        self._cast = cast
        self._stands_for = stands_for
        """torch's default planner that the user passed, if any: it gets what torch would leave on it."""
        self._choice = choice
        self._problems: list[str] = []
        self._empty: set[str] = set()
        self._growth: Growth | None = None
        self._memory = TemplateMemory()
        self._to_put: list[str] = []
        """Names of the values that are put into the template when everything is read."""
        self.rank, self.world_size = 0, 1
        self.containers: Containers | None = None
        """What the manifest says of mappings; None where it does not say, or there is no manifest."""
        self.originals: Mapping[int, Any] = {}
        """The user's own container by the id of its copy, for each copy in the template."""
        self._python: list[str] = []
        """The names of the Python values that are planned to be read."""

    @property
    def resolves_in_place(self) -> bool:
        """Whether ``resolve_tensor`` makes nothing, so that it may be called long before its tensor is filled."""
        return type(self).resolve_tensor is TemplatePlanner.resolve_tensor

    @property
    def on_meta(self) -> frozenset[str]:
        """The names of the template's tensors that had no memory, and were given some to be filled."""
        return self._memory.on_meta

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._memory, self._to_put, self._growth, self._empty = TemplateMemory(), [], None, set()
        self.state_dict, self.mappings = self._flatten(state_dict, metadata)
        if not self._choice.is_everything:
            self.state_dict = {fqn: value for fqn, value in self.state_dict.items() if self._choice.takes(fqn)}
        others = [value for value in self.state_dict.values() if type(value) not in LEAVES]
        if self.flatten_sharded_tensors and any(isinstance(value, ShardedTensor) for value in others):
            self.state_dict = flatten_sharded_tensors(self.state_dict)
        if self._stands_for is not None:
            vars(self._stands_for).update({name: getattr(self, name) for name in _LEFT_BY_TORCH})

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of all values that are of the kind and shape of the stored ones; ``check`` tells the rest."""
        assert self.metadata is not None
        if self.flatten_state_dict:
            self._grow(self.metadata)
        saved_values = self.metadata.state_dict_metadata
        layouts = ReadLayouts()
        items: list[ReadItem] = []
        self._problems = []
        fitting: dict[Hashable, PlannedReads] = {}
        """The reads by the layout of a value that can be filled and by the object that describes the saved one."""
        for fqn, value in self.state_dict.items():
            saved = saved_values.get(fqn)
            if saved is None:
                continue
            if isinstance(saved, BytesStorageMetadata):
                if isinstance(value, torch.Tensor):
                    self._problems.append(f"{fqn}: the checkpoint holds a Python object, the template a tensor")
                else:
                    index = MetadataIndex(fqn)
                    items.append(ReadItem(LoadItemType.BYTE_IO, index, _AT_ZERO, index, _AT_ZERO, _AT_ZERO))
                continue
            layout = (id(saved), layout_key(value), value.dtype) if can_be_filled(value) else None
            planned = fitting.get(layout)
            if planned is None:
                num_problems = len(self._problems)
                planned = self._plan_reads(fqn, value, saved, layouts)
                if layout is not None and len(self._problems) == num_problems:
                    fitting[layout] = planned
            items += planned.of(fqn)
        self._python = [item.dest_index.fqn for item in items if item.type == LoadItemType.BYTE_IO]
        return LoadPlan(items)

    def _plan_reads(self, fqn: str, value: Any, saved: TensorStorageMetadata, layouts: ReadLayouts) -> PlannedReads:
        """Plan the reads of one tensor, and note why it cannot be filled, or not as it is."""
        problems = self._problems
        if saved.properties.dtype is NO_WORD:
            problems.append(
                f"{fqn}: its dtype is one that torch has no word for, as `ray-dcp show` tells: "
                "leave it out (skip= does)"
            )
            return NO_READS
        if value is None:
            value = self.state_dict[fqn] = self._memory.to_make(fqn, saved)
        planned = NO_READS
        not_fitting = unfit(fqn, value, saved)
        problems += not_fitting
        if not not_fitting:
            planned = layouts.reads_of(value, saved)
            problems += [f"{fqn}: {problem}" for problem in planned.problems]
            if is_meta(value):
                self._memory.lacks(fqn, value)
        if isinstance(value, torch.Tensor) and value.dtype != saved.properties.dtype and not self._cast:
            problems.append(
                f"{fqn}: the checkpoint has dtype {saved.properties.dtype}, the template {value.dtype} "
                "(cast=True converts)"
            )
        return planned

    def check(self, *, strict: bool = True) -> TemplateCheck:
        """Compare the template with the checkpoint, after the local plan is made; ``strict`` refuses missing names."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        lacking = self.state_dict.keys() - saved.keys()
        tied = tied_to(self.state_dict, self.state_dict.keys() & saved.keys(), lacking) if lacking else set[str]()
        for fqn in tied:
            if is_meta(self.state_dict[fqn]):
                self._memory.lacks(fqn, self.state_dict[fqn])
        return compare(
            self.state_dict,
            self.metadata,
            [*self._problems, *self._assign_problems()],
            tied=tied,
            empty=self._empty,
            # torch's checkpoints do not tell whether there was an empty mapping.
            knows_empty=self.containers is not None,
            strict=strict,
        )

    def _assign_problems(self) -> list[str]:
        """A line for each value that is put into the template, and that its container there does not take."""
        if not self.flatten_state_dict:
            return []
        grown = self._growth.names if self._growth is not None else frozenset[str]()
        to_put = [fqn for fqn in (*self._python, *self._memory.on_meta) if fqn not in grown]
        assignments = Assignments(self.original_state_dict, self.originals)
        problems = assignments.problems(self.mappings, to_put)
        return problems + (self._growth.problems(assignments) if self._growth is not None else [])

    def shared_memory(self) -> list[SharedMemory]:
        """The names of tensors that will be filled and that share memory."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        return shared_memory(
            {fqn: value for fqn, value in self.state_dict.items() if isinstance(value, torch.Tensor) and fqn in saved}
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory to fill; a whole tensor, which most reads are for, is found without slicing it."""
        local = local_part(self.state_dict.get(read_item.dest_index.fqn))
        if local is not None and local.shape == read_item.lengths:
            return local
        resolved: torch.Tensor = super().resolve_tensor(read_item)
        return resolved

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Give memory to the tensors that will be filled and have none: only now, when all checks have passed.

        ``put_loaded`` puts them into the template.
        """
        made = self._memory.made()
        self.state_dict.update(made)
        self._to_put += made
        # Whoever fills their local parts counts those as changed.
        saved = self.metadata.state_dict_metadata if self.metadata is not None else {}
        changed = [value for fqn, value in self.state_dict.items() if type(value) is DTensor and fqn in saved]
        torch.autograd.graph.increment_version(changed)
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put_python({read_item.dest_index.fqn: self.decode_python(read_item, value)})

    def decode_python(self, read_item: ReadItem, value: io.BytesIO) -> Any:
        """Decode the Python value in ``value``; leave the template as it is."""
        return self._load_python(value, read_item.dest_index.fqn)

    def put_python(self, decoded: Mapping[str, Any]) -> None:
        """Keep decoded values, by name, for ``put_loaded``."""
        self.state_dict.update(decoded)
        self._to_put += decoded

    def put_loaded(self) -> None:
        """Put the values that are not filled in place into the template, when everything has been read."""
        if not self.flatten_state_dict:
            return
        grown = self._growth.names if self._growth is not None else frozenset[str]()
        template = self.original_state_dict
        for fqn in self._to_put:
            if fqn in template and self.mappings.get(fqn) == (fqn,):
                template[fqn] = self.state_dict[fqn]
            elif fqn not in grown:
                set_at(template, self.mappings[fqn], self.state_dict[fqn])
        if self._growth is not None:
            self._growth.put(self.state_dict)

    def _grow(self, metadata: Metadata) -> None:
        """Ask for what the checkpoint has in the empty places of the template, too."""
        saved = metadata.state_dict_metadata
        lacking = saved.keys() - self.state_dict.keys()
        known_empty = set(map(self._choice.renamed, saved_empty_names(self.containers or ())))
        places = empty_places(self.original_state_dict, "")
        empty = [one for one in places if one.fqn not in saved and not _is_in_a_value(one.fqn, self.state_dict)]
        growth = Growth(
            empty,
            lacking,
            metadata,
            containers=self.containers or (),
            saved_empty=known_empty,
            rank=self.rank,
            world_size=self.world_size,
        )
        if growth.places:
            self._growth = growth
        for fqn in growth.names:
            stored = saved[fqn]
            is_tensor = isinstance(stored, TensorStorageMetadata)
            self.state_dict[fqn] = self._memory.to_make(fqn, stored) if is_tensor else None
        for fqn in growth.places:
            self.state_dict.pop(fqn, None)
        stays = {place.fqn for place in empty if place.value is not None} - growth.places - known_empty
        self._empty = {fqn for fqn in stays if self._choice.takes(fqn)}

    def _flatten(self, state_dict: dict[str, Any], metadata: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.flatten_state_dict:
            return state_dict, {}
        flat, paths = flat_state(state_dict)
        lacking = flat.keys() - metadata.state_dict_metadata.keys()
        if lacking and not metadata.version:
            # torch before 2.4 kept containers without tensors whole, under the container's own name.
            old_flat: dict[str, Any] = {}
            old_paths: dict[str, Any] = {}

            def visit(path: tuple[str | int, ...], value: object) -> None:
                fqn = ".".join(map(str, path))
                old_flat[fqn], old_paths[fqn] = value, path

            walk_as_before_2_4(state_dict, visit)
            if (old_flat.keys() - flat.keys()) & metadata.state_dict_metadata.keys():
                return old_flat, old_paths
        return flat, paths


def _is_in_a_value(fqn: str, flat: Mapping[str, Any]) -> bool:
    """Whether what would be called ``fqn`` lies in a list that is one value of the template, and is loaded as one."""
    parts = fqn.split(".")
    return any(isinstance(flat.get(".".join(parts[:length])), list) for length in range(1, len(parts)))


def set_at(container: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put ``value`` at ``path`` of nested dicts and lists; a string names the key that prints as it."""
    for part in path[:-1]:
        container = container[own_key(container, part)]
    container[own_key(container, path[-1])] = value


__all__ = ["TemplateCheck", "TemplatePlanner", "set_at", "without_names"]
