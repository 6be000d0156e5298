"""Filling a template: the load planner that ray_dcp uses where the user gives none.

It differs from torch's default in three ways, each a fault users have met: it checks everything before anything is
copied and names all of it at once; it puts a Python value back under the key it came from (torch's writes the value
of an integer key beside it, as a string); it unpickles with an allow-list.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from ray_dcp.planning.flat import flat_state, is_empty_dict
from ray_dcp.planning.layouts import ReadLayouts, is_freed, local_part
from ray_dcp.planning.local_shards import LocalShards
from ray_dcp.planning.per_rank import is_per_rank_name

_AT_ZERO = torch.Size((0,))
"""What torch's planner gives as place and length of a Python object."""

_LEFT_BY_TORCH = ("original_state_dict", "state_dict", "mappings", "metadata", "is_coordinator")

LoadPython = Callable[[io.BytesIO, str], Any]
"""(stored bytes, fqn) -> the value, or an error of ray_dcp."""


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """How a rank's template compares with a checkpoint. All lists are sorted."""

    wanted: tuple[str, ...]
    """Names that are in both."""
    missing: tuple[str, ...]
    """Names that the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """Names that this rank's template lacks."""
    problems: tuple[str, ...]
    """One line for each shape, kind or dtype that differs, and each region that no stored chunk covers."""


def without_names(check: TemplateCheck | None) -> TemplateCheck | None:
    """``check`` as the coordinator needs it: the names that are right are of no interest there."""
    return None if check is None else replace(check, wanted=())


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
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load=True)
        self._load_python = load_python
        self._cast = cast
        self._stands_for = stands_for
        """torch's default planner that the user passed: it has afterwards what torch leaves on it."""
        self._problems: tuple[str, ...] = ()

    @property
    def resolves_in_place(self) -> bool:
        """Whether ``resolve_tensor`` makes nothing: it may be called long before its tensor is filled."""
        return type(self).resolve_tensor is TemplatePlanner.resolve_tensor

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.state_dict, self.mappings = self._flatten(state_dict, metadata)
        if self.flatten_sharded_tensors and any(isinstance(value, ShardedTensor) for value in self.state_dict.values()):
            self.state_dict = _flatten_sharded_tensors(self.state_dict)
        if self._stands_for is not None:
            vars(self._stands_for).update({name: getattr(self, name) for name in _LEFT_BY_TORCH})

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of all values that are of the kind and shape of the stored ones; ``check`` tells the rest."""
        assert self.metadata is not None
        saved_values = self.metadata.state_dict_metadata
        layouts = ReadLayouts()
        items: list[ReadItem] = []
        problems: list[str] = []
        for fqn, value in self.state_dict.items():
            saved = saved_values.get(fqn)
            if saved is None:
                continue
            if isinstance(saved, BytesStorageMetadata):
                if isinstance(value, torch.Tensor):
                    problems.append(f"{fqn}: the checkpoint holds a Python object, the template a tensor")
                else:
                    index = MetadataIndex(fqn)
                    items.append(ReadItem(LoadItemType.BYTE_IO, index, _AT_ZERO, index, _AT_ZERO, _AT_ZERO))
                continue
            unfit = _unfit(fqn, value, saved)
            problems += unfit
            if not unfit:
                planned = layouts.reads_of(value, saved)
                items += planned.of(fqn)
                problems += [f"{fqn}: {problem}" for problem in planned.problems]
            if isinstance(value, torch.Tensor) and value.dtype != saved.properties.dtype and not self._cast:
                problems.append(
                    f"{fqn}: the checkpoint has dtype {saved.properties.dtype}, the template {value.dtype} "
                    "(cast=True converts)"
                )
        self._problems = tuple(sorted(problems))
        return LoadPlan(items)

    def check(self) -> TemplateCheck:
        """Compare the template with the checkpoint, once the local plan is made."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        return TemplateCheck(
            wanted=tuple(sorted(self.state_dict.keys() & saved.keys())),
            missing=tuple(sorted(self.state_dict.keys() - saved.keys())),
            unexpected=tuple(sorted(fqn for fqn in saved.keys() - self.state_dict.keys() if not is_per_rank_name(fqn))),
            problems=self._problems,
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory to fill; the whole of a tensor, which most reads are for, is found without slicing it."""
        local = local_part(self.state_dict.get(read_item.dest_index.fqn))
        if local is not None and local.shape == read_item.lengths:
            return local
        resolved: torch.Tensor = super().resolve_tensor(read_item)
        return resolved

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Give memory to the meta tensors that will be filled: only now, when all checks have passed."""
        for fqn in {item.dest_index.fqn for item in new_plan.items}:
            value = self.state_dict.get(fqn)
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                self._replace(fqn, _with_memory(value))
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.put_python(read_item, self.decode_python(read_item, value))

    def decode_python(self, read_item: ReadItem, value: io.BytesIO) -> Any:
        """The Python value in ``value``; the template is untouched."""
        return self._load_python(value, read_item.dest_index.fqn)

    def put_python(self, read_item: ReadItem, value: Any) -> None:
        """Put a decoded value into the template."""
        self._replace(read_item.dest_index.fqn, value)

    def _replace(self, fqn: str, value: Any) -> None:
        self.state_dict[fqn] = value
        if self.flatten_state_dict:
            set_at(self.original_state_dict, self.mappings[fqn], value)

    def _flatten(self, state_dict: dict[str, Any], metadata: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self.flatten_state_dict:
            return state_dict, {}
        flat, paths = flat_state(state_dict)
        lacking = flat.keys() - metadata.state_dict_metadata.keys()
        for fqn in [fqn for fqn in lacking if is_empty_dict(flat[fqn])]:
            # Nothing is stored for an empty dict by torch.
            lacking.remove(fqn)
            del flat[fqn], paths[fqn]
        if lacking and not metadata.version:
            # torch before 2.4 kept containers without tensors whole, under the container's own name.
            old_flat: dict[str, Any] = {}
            old_paths: dict[str, Any] = {}

            def visit(path: tuple[str | int, ...], value: object) -> None:
                fqn = ".".join(map(str, path))
                old_flat[fqn], old_paths[fqn] = value, path

            traverse_state_dict_v_2_3(state_dict, visit)
            if (old_flat.keys() - flat.keys()) & metadata.state_dict_metadata.keys():
                return old_flat, old_paths
        return flat, paths


def set_at(container: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put ``value`` at ``path`` of nested dicts and lists; a string names the key that prints as it."""
    for part in path[:-1]:
        container = container[_own_key(container, part)]
    container[_own_key(container, path[-1])] = value


def _own_key(container: Any, part: str | int) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor.to_local(), device=tensor.device_mesh.device_type)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.size(), stride=tensor.stride(), run_check=False
    )


def _unfit(fqn: str, value: Any, saved: TensorStorageMetadata) -> list[str]:
    """Why no read of a stored tensor can be planned into ``value``."""
    if not isinstance(value, torch.Tensor):
        return [f"{fqn}: the checkpoint holds a tensor, the template a {type(value).__name__}"]
    problems = []
    if value.shape != saved.size:
        problems.append(f"{fqn}: the checkpoint has shape {tuple(saved.size)}, the template {tuple(value.shape)}")
    local = local_part(value)
    in_order = local is not None and local.is_contiguous()
    if not in_order and any(_repeats_memory(part) for part in _local_tensors(value)):
        problems.append(f"{fqn}: the template is a view whose elements share memory; fill a .clone() of it")
    if any(map(is_freed, _local_tensors(value) if local is None else (local,))):
        problems.append(f"{fqn}: the template's memory has been freed; load while it has some")
    return problems


def _local_tensors(value: torch.Tensor) -> Iterable[torch.Tensor]:
    if isinstance(value, LocalShards):
        return value.chunks.values()
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    local = local_part(value)
    return [local if local is not None else value.to_local() if isinstance(value, DTensor) else value]


def _repeats_memory(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie at one place, as in what ``expand`` and ``unfold`` make."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or tensor.device.type == "meta":
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


__all__ = ["TemplateCheck", "TemplatePlanner", "set_at", "without_names"]
