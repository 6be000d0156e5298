"""The place of a rank's part in the whole value, worked out once for all values of one layout.

A model has thousands of tensors and a dozen layouts. Torch works out each tensor's place anew, which is most of what
planning costs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)
from torch.distributed.tensor import DTensor

from ray_dcp.planning.disjoint import overlapping
from ray_dcp.torch_private import create_chunk_list, create_write_items

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def local_part(value: Any) -> torch.Tensor | None:
    """This rank's memory of a plain tensor or a DTensor; None for every other kind of value."""
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        whole: torch.Tensor = value
        return whole
    if kind is DTensor and type(value._local_tensor) in _PLAIN_TENSORS:
        local: torch.Tensor = value._local_tensor
        return local
    return None


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor that has elements has no memory any more; torch itself then reads and writes at address 0."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def layout_key(value: Any) -> Hashable | None:
    """A key that is equal for values of which this rank holds equal chunks.

    None for a kind of value that must be asked each time. The key is valid as long as the values live, since a mesh is
    known by its identity.
    """
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        shape: torch.Size = value.shape
        return shape
    if kind is DTensor and type(value._local_tensor) in _PLAIN_TENSORS:
        return id(value.device_mesh), value.placements, value.shape
    return None


@dataclass(frozen=True, slots=True)
class PlannedReads:
    """The reads that fill values of one layout from tensors that were saved in one way, whatever their names."""

    reads: tuple[ReadItem, ...]
    """The reads of a value without a name. Most are for a chunk that is stored as it is here: then both indexes are one
    object."""
    problems: tuple[str, ...]
    """A line for each region that stored chunks do not fill exactly once."""

    def of(self, fqn: str) -> list[ReadItem]:
        """The reads for the value ``fqn``."""
        items = []
        for read in self.reads:
            dest, stored = read.dest_index, read.storage_index
            index = MetadataIndex(fqn, dest.offset, dest.index)
            stored = index if stored is dest else MetadataIndex(fqn, stored.offset, stored.index)
            offsets = read.dest_offsets, read.storage_offsets
            items.append(ReadItem(LoadItemType.TENSOR, index, offsets[0], stored, offsets[1], read.lengths))
        return items


NO_READS = PlannedReads((), ())


class WriteLayouts:
    """The parts that write items of values of one layout and dtype have in common, for one save."""

    def __init__(self) -> None:
        self._known: dict[Hashable, WriteItem] = {}

    def item_of(self, fqn: str, value: torch.Tensor, local: torch.Tensor) -> WriteItem:
        """The item that torch's planner makes; ``local`` is ``local_part(value)``.

        Raises whatever the value's class does when asked for it.
        """
        key = (
            layout_key(value),
            type(value) is DTensor,
            local.dtype,
            local.layout,
            local.requires_grad,
            local.is_pinned(),
        )
        known = self._known.get(key)
        if known is None:
            (known,) = create_write_items(fqn, value)
            self._known[key] = known
        return WriteItem(MetadataIndex(fqn, known.index.offset), known.type, None, known.tensor_data)


class ReadLayouts:
    """``PlannedReads`` by layout, for one load."""

    def __init__(self) -> None:
        self._known: dict[Hashable, PlannedReads] = {}

    def reads_of(self, value: torch.Tensor, saved: TensorStorageMetadata) -> PlannedReads:
        """How ``value`` is filled from what was saved. Raises whatever its class does when asked for its chunks."""
        own = layout_key(value)
        if own is None:
            return _planned_reads(value, saved)
        key = own, tuple([(chunk.offsets, chunk.sizes) for chunk in saved.chunks])
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _planned_reads(value, saved)
        return known


def _planned_reads(value: torch.Tensor, saved: TensorStorageMetadata) -> PlannedReads:
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return NO_READS  # this rank is not in its mesh
    chunks = create_chunk_list(value)
    reads = create_read_items_for_chunk_list("", saved, chunks)
    problems = _uncovered_regions(chunks, reads)
    return PlannedReads(tuple(map(_with_one_index, reads)), tuple(problems))


def _with_one_index(read: ReadItem) -> ReadItem:
    """``read`` with one object for both indexes where they are equal, hints included."""
    same = read.dest_index == read.storage_index and read.dest_index.index == read.storage_index.index
    return replace(read, storage_index=read.dest_index) if same else read


def _uncovered_regions(chunks: Sequence[ChunkStorageMetadata], reads: Sequence[ReadItem]) -> list[str]:
    """A line for each region that ``reads`` do not fill exactly once."""
    boxes_of: dict[torch.Size | None, list[ChunkStorageMetadata]] = {}
    for read in reads:
        boxes_of.setdefault(read.dest_index.offset, []).append(ChunkStorageMetadata(read.dest_offsets, read.lengths))
    problems = []
    for chunk in chunks:
        boxes = boxes_of.get(chunk.offsets, [])
        region = f"region of shape {tuple(chunk.sizes)} at offsets {tuple(chunk.offsets)}"
        if any(overlapping([(box.offsets, box.sizes) for box in boxes])):
            problems.append(f"stored chunks overlap within the {region}, so its values are ambiguous")
            continue
        whole = math.prod(chunk.sizes)
        missing = whole - sum(math.prod(box.sizes) for box in boxes)
        if missing:
            problems.append(f"no stored chunk covers {missing} of {whole} elements of the {region}")
    return problems
