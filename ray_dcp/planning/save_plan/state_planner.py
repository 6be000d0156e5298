"""Plans the save of what a rank hands over, with Python values pickled once.

``StatePlanner`` is the save planner where the user gives none. It pickles the Python objects of the local plan
while planning, so that a value that cannot be pickled is found before any rank writes a byte.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ray_dcp.errors import StateDictError
from ray_dcp.format.scalar_record import PYTHON_SCALARS
from ray_dcp.planning.layouts import WriteLayouts, is_freed, local_part
from ray_dcp.planning.local_shards import LocalShards
from ray_dcp.planning.per_rank import OneRanksValue, PerRank, is_per_rank_name, per_rank_fqn
from ray_dcp.planning.save_plan.global_plan import GlobalTable, plan_tables
from ray_dcp.planning.save_plan.plan_table import PlanTable, Ties
from ray_dcp.planning.values.flat import LEAVES, flat_state, unstorable_names
from ray_dcp.planning.values.foreign_classes import warn_of_foreign
from ray_dcp.planning.values.python_record import python_record
from ray_dcp.planning.values.survey import IN_ONE_RANK, HiddenPartError, Survey
from ray_dcp.planning.values.ties import SeenMemory
from ray_dcp.torch_private import (
    AsyncCollectiveTensor,
    ShardedTensor,
    create_write_items,
    dtype_to_storage_type,
    flatten_sharded_tensors,
    new_dtypes,
    wraps_other_tensors,
)


class StatePlanner(DefaultSavePlanner):
    """Torch's default planner, but Python objects are pickled (and so frozen) when the local plan is made."""

    def __init__(self, *, stands_for: DefaultSavePlanner | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._pickled: dict[str, bytes] = {}
        self._foreign: dict[str, set[str]] = {}
        self.ties: Ties = {}
        """The ties of the local plan."""
        self.stands_for = stands_for
        """torch's default planner that the user passed, if any: it gets what torch would leave on it."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Keep the final plan, as torch's method does, and warn of classes that a load will refuse.

        For a value that every rank has, the rank that writes it warns. The planner that the user passed gets what torch
        leaves on it, on every rank.
        """
        self.plan = new_plan
        if self._foreign:
            written = {item.index.fqn for item in new_plan.items}
            warn_of_foreign({fqn: classes for fqn, classes in self._foreign.items() if fqn in written})
        if self.stands_for is not None:
            for name in ("state_dict", "mappings", "is_coordinator", "plan"):
                setattr(self.stands_for, name, getattr(self, name))
        return new_plan

    @property
    def resolves_in_place(self) -> bool:
        """Whether ``resolve_data`` makes nothing large, so that it may be called long before the data is written."""
        return type(self).resolve_data is StatePlanner.resolve_data

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._pickled, self._foreign, self.ties = {}, {}, {}
        self.mappings = {}
        if self.flatten_state_dict:
            state_dict, self.mappings = flat_state(state_dict)
        if self.flatten_sharded_tensors and _holds_sharded_tensor(state_dict, walked=not self.flatten_state_dict):
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan as torch's method does; raises ``StateDictError`` that names everything that cannot be saved at once."""
        layouts, memory = WriteLayouts(), SeenMemory()
        items: list[WriteItem] = []
        problems = unstorable_names(self.state_dict)
        for fqn, value in self.state_dict.items():
            if type(value) in PYTHON_SCALARS:  # it can be pickled, and cannot change until then
                items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
                continue
            local = local_part(value)
            if local is None:
                try:
                    found = self._other_items(fqn, value)
                except Exception as error:  # noqa: BLE001  # asks the value's own class
                    problems.append(f"{fqn}: {_no_items(value, error)}")
                    continue
                items += found
                problems += [problem for item in found for problem in self._item_problems(item)]
                if isinstance(value, LocalShards):
                    for item in found:
                        memory.note(item, value.chunks[tuple(item.index.offset or ())])
            elif type(value) is not DTensor or value.device_mesh.get_coordinate() is not None:
                problem = tensor_problem(local)
                if problem:
                    problems.append(f"{fqn}: {problem}")
                else:
                    item = layouts.item_of(fqn, value, local)
                    items.append(item)
                    memory.note(item, local)
        if problems:
            raise StateDictError(_CANNOT_BE_SAVED, problems)
        self.ties = memory.ties()
        self.plan = SavePlan(items, planner_data=self.mappings if self.flatten_state_dict else None)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan as torch's method does, but name every tensor that fails a check.

        torch tells of its own checks in 500 characters.
        """
        planned = self.create_global_table([PlanTable.of(plan) for plan in all_plans])
        self.global_plan, self.metadata = planned.plans(), planned.metadata
        return self.global_plan, self.metadata

    def create_global_table(
        self, tables: Sequence[PlanTable], on_lowest_rank: Collection[tuple[str, torch.Size | None]] = ()
    ) -> GlobalTable:
        """Plan like ``create_global_plan``, in tables; items ``on_lowest_rank`` go to the lowest rank that has them."""
        return plan_tables(
            tables,
            lowest_rank=self.dedup_save_to_lowest_rank,
            on_lowest_rank=on_lowest_rank,
            with_planner_data=self.flatten_state_dict,
        )

    def _other_items(self, fqn: str, value: Any) -> list[WriteItem]:
        """The write items of a value that is neither a plain tensor nor a plain DTensor."""
        if type(value) in _PYTHON:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            return []
        return list(create_write_items(fqn, value))

    def _item_problems(self, item: WriteItem) -> Iterator[str]:
        """Yield a line where an item cannot be saved; a Python object that can be saved is pickled on the way."""
        fqn, value = item.index.fqn, self.lookup_object(item.index)
        if item.type != WriteItemType.BYTE_IO:
            problem = tensor_problem(value)
            if problem:
                yield f"{fqn}: {problem}"
            return
        try:
            foreign: set[str] = set()
            self._pickled[fqn] = python_record(value, foreign)
            if foreign:
                self._foreign[fqn] = foreign
        except Exception as error:  # noqa: BLE001  # pickling runs the code of the value's own classes
            yield _python_problem(fqn, value, error)

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            fqn = write_item.index.fqn
            pickled = self._pickled.get(fqn)
            return io.BytesIO(pickled if pickled is not None else python_record(self.state_dict[fqn]))
        local = local_part(self.state_dict.get(write_item.index.fqn))
        return local if local is not None else super().resolve_data(write_item)


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """The reason why the bytes of ``tensor`` are not its values; None where they are."""
    if tensor.device.type == "meta":
        return "a meta tensor has no values to save"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout} has no rectangular values; save its parts, or a dense copy"
    if tensor.is_quantized:
        return "a quantized tensor; save its int_repr(), scale and zero point"
    if tensor.dtype not in _STORABLE_DTYPES:
        return f"torch.save has no record for {tensor.dtype}; save a view as another dtype"
    if wraps_other_tensors(tensor) and not isinstance(tensor, AsyncCollectiveTensor):
        return f"a {type(tensor).__name__} wraps other tensors; save those"
    if is_freed(tensor):
        return "its memory has been freed (FSDP does so between uses); save it while it has values"
    return None


_CANNOT_BE_SAVED = "the state dict holds values that cannot be saved"
_PYTHON = frozenset((int, float, str, bytes, bool, type(None), dict, list, tuple))
"""Types that no planner makes anything but a Python object of."""
_STORABLE_DTYPES = dtype_to_storage_type().keys() | new_dtypes()


def _holds_sharded_tensor(state: Any, *, walked: bool) -> bool:
    """Whether a dict holds a ``ShardedTensor``; if ``walked``, also in the dicts and lists within it."""
    return any(
        isinstance(value, ShardedTensor)
        or (walked and isinstance(value, Mapping | list) and _holds_sharded_tensor(value, walked=True))
        for value in (state.values() if isinstance(state, Mapping) else state)
        if type(value) not in LEAVES
    )


def _no_items(value: Any, error: Exception) -> str:
    if _is_uninitialized(value):
        return f"a {type(value).__name__} has no values before its module's first forward pass"
    return f"a {type(value).__name__} that cannot be saved: {error}"


def _python_problem(fqn: str, value: Any, error: Exception) -> str:
    """The line of the list of problems for a Python value; ``error`` is what pickling it raised."""
    if is_per_rank_name(fqn) and type(value) is tuple and len(value) == 1:
        fqn, value = per_rank_fqn(fqn), value[0]
    if isinstance(error, HiddenPartError):
        return f"{fqn}: {error.within(value)}"
    return f"{fqn}: a {type(value).__name__} that cannot be pickled: {error}"


def require_storable(planner: SavePlanner, plan: SavePlan, state: Mapping[str, Any]) -> None:
    """Raise ``StateDictError`` naming everything that can be told to be wrong in any planner's local plan.

    That is names that are not valid text, and what would be lost in a Python value, as far as it is known what the
    planner pickles.
    """
    problems = unstorable_names(item.index.fqn for item in plan.items)
    if not isinstance(planner, DefaultSavePlanner):
        problems += _per_rank_in_tuples(state, "")
    elif not planner.flatten_state_dict:
        problems += [f"{fqn}: a PerRank {IN_ONE_RANK}" for fqn in _one_ranks_values(state, "")]
    if isinstance(planner, DefaultSavePlanner) and _pickles_as_torch(planner):
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                value = planner.lookup_object(item.index)
                try:
                    Survey(value) if type(value) not in PYTHON_SCALARS else None
                except Exception as error:  # noqa: BLE001  # pickling runs the code of the value's own classes
                    problems.append(_python_problem(item.index.fqn, value, error))
    if problems:
        raise StateDictError(_CANNOT_BE_SAVED, problems)


def require_initialized(planner: SavePlanner) -> None:
    """Raise ``StateDictError`` naming the parameters of lazy modules that have no shape yet."""
    state = planner.state_dict if isinstance(planner, DefaultSavePlanner) else {}
    problems = [f"{fqn}: {_no_items(value, ValueError())}" for fqn, value in state.items() if _is_uninitialized(value)]
    if problems:
        raise StateDictError(_CANNOT_BE_SAVED, problems)


def _is_uninitialized(value: Any) -> bool:
    return isinstance(value, UninitializedParameter | UninitializedBuffer)


def _pickles_as_torch(planner: DefaultSavePlanner) -> bool:
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def _per_rank_in_tuples(value: Any, fqn: str) -> list[str]:
    """The problems of ``PerRank`` values in tuples: no planner looks for values there."""
    if type(value) in LEAVES or not isinstance(value, Mapping | list | tuple):
        return []
    if isinstance(value, tuple):
        lost = next((entry for entry in value if isinstance(entry, PerRank)), None)
        if lost is not None:
            return [f"{fqn}: {HiddenPartError(lost, IN_ONE_RANK).within(value)}"]
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    prefix = f"{fqn}." if fqn else ""
    return [problem for key, entry in entries for problem in _per_rank_in_tuples(entry, f"{prefix}{key}")]


def _one_ranks_values(value: Any, fqn: str) -> Iterator[str]:
    if isinstance(value, OneRanksValue):
        yield fqn
    elif type(value) not in LEAVES and isinstance(value, Mapping | list):
        prefix = f"{fqn}." if fqn else ""
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _one_ranks_values(entry, f"{prefix}{key}")


@contextmanager
def plan_cache_off(planner: Any) -> Iterator[None]:
    """Turn torch's plan cache off for ``planner``, within the block.

    That cache lives in class attributes of one process and ignores dtypes; here the global plan is made in another
    process, so a cached plan would mean nothing. Correctness first: every save plans anew.
    """
    enabled = getattr(planner, "_enable_plan_caching", False)
    if enabled:
        planner._enable_plan_caching = False
    try:
        yield
    finally:
        if enabled:
            planner._enable_plan_caching = True


def for_global_step(planner: Any) -> Any:
    """What the coordinator needs of ``planner``: a user's planner as it is, but only the settings of ray_dcp's own."""
    if type(planner) is not StatePlanner:
        return planner
    return StatePlanner(
        flatten_state_dict=planner.flatten_state_dict,
        flatten_sharded_tensors=planner.flatten_sharded_tensors,
        dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
    )


__all__ = ["StatePlanner", "for_global_step", "plan_cache_off", "tensor_problem"]
