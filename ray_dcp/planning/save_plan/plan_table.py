"""A rank's save plan in columns, as it is sent: what many items have in common is there once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Key = tuple[str, torch.Size | None]
"""A name and the place of a chunk in its tensor."""

Ties = Mapping[Key, Key]
"""Maps items of one rank that are one and the same memory to the first of them by name, which is not a key itself."""


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """A ``WriteItem`` without its name."""

    type: WriteItemType
    offset: torch.Size | None
    index: int | None
    bytes_io_data: Any
    tensor_data: TensorWriteData | None

    def item(self, fqn: str) -> WriteItem:
        return WriteItem(MetadataIndex(fqn, self.offset, self.index), self.type, self.bytes_io_data, self.tensor_data)

    @property
    def nbytes(self) -> int:
        """Size of the chunk, in bytes; 0 for an item that is not a tensor."""
        if self.tensor_data is None:
            return 0
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A ``SavePlan``: item ``i`` has the name ``fqns[i]`` and the layout ``layouts[layout_of[i]]``."""

    fqns: Sequence[str]
    layout_of: array[int]
    layouts: Sequence[ItemLayout]
    storage_data: Any
    planner_data: Any
    usable: bool
    ties: Ties = field(default_factory=dict)

    @classmethod
    def of(cls, plan: SavePlan, *, ties: Ties | None = None) -> PlanTable:
        """``plan`` as a table. Items share a layout where they share their ``tensor_data``."""
        numbers: dict[Hashable, int] = {}
        layouts: list[ItemLayout] = []
        layout_of = array("I")
        for item in plan.items:
            index = item.index
            key = (
                id(item.tensor_data) if item.tensor_data is not None else None,
                id(item.bytes_io_data) if item.bytes_io_data is not None else None,
                item.type,
                index.offset,
                index.index,
            )
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(layouts)
                layouts.append(ItemLayout(item.type, index.offset, index.index, item.bytes_io_data, item.tensor_data))
            layout_of.append(number)
        return cls(
            [item.index.fqn for item in plan.items],
            layout_of,
            layouts,
            plan.storage_data,
            plan.planner_data,
            plan.usable,
            ties or {},
        )

    def plan(self) -> SavePlan:
        """The plan that this table was made from."""
        items = [self.layouts[number].item(fqn) for fqn, number in zip(self.fqns, self.layout_of, strict=True)]
        return SavePlan(items, self.storage_data, self.planner_data, self.usable)
