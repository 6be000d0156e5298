"""Writing a DCP checkpoint from a source, one tensor at a time."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ray_dcp.planning.values.containers import Containers
from ray_dcp.torch_private import create_write_item_for_tensor
from ray_dcp.write.writer import StoreWriter


@dataclasses.dataclass(frozen=True, slots=True)
class LazyItem:
    """One value to be stored. ``read`` makes it: a tensor, or the ``torch.save``d bytes of a Python value."""

    name: str
    path: tuple[str | int, ...]
    """The keys that lead to it in the state dict that torch's tools make of the checkpoint."""
    dtype: str | None
    """Name of the tensor's dtype without the prefix ``torch.``; None for a Python value."""
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor | bytes]


def write_checkpoint(checkpoint_id: str, items: Sequence[LazyItem], containers: Containers = ()) -> int:
    """Commit a checkpoint of ``items``, all or nothing, as one rank; return the bytes of its records."""
    writer = StoreWriter(checkpoint_id)
    planner = _LazyPlanner(items)
    writer.set_up_storage_writer(True)
    writer.containers = containers
    try:
        (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        (plan,) = writer.prepare_global_plan([plan])
        written = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [written])
    except BaseException:
        if not writer.may_have_committed:
            writer.abandon()
        raise
    return sum(result.size_in_bytes for result in written)


class _LazyPlanner(SavePlanner):
    def __init__(self, items: Sequence[LazyItem]) -> None:
        self._items: Mapping[str, LazyItem] = {item.name: item for item in items}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """There is no state dict: each value is read when the writer asks for it."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(item) for item in self._items.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {item.name: item.path for item in self._items.values()}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._items[write_item.index.fqn].read()
        return io.BytesIO(value) if isinstance(value, bytes) else value


def _write_item(item: LazyItem) -> WriteItem:
    if item.dtype is None:
        return WriteItem(MetadataIndex(item.name), WriteItemType.BYTE_IO)
    return create_write_item_for_tensor(
        item.name, torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta")
    )
