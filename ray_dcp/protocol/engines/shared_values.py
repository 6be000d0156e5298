"""Whether what a checkpoint holds for names that share memory in the template is the same, before any is filled.

Tied weights are one tensor under two names, and saved as such have equal values. Where the checkpoint cannot tell that
without a look (by its place, or the checksums of all blocks), the values are read into memory of their own, on CPU, one
group of names at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ray_dcp.planning.template.overlaps import SharedMemory, reach
from ray_dcp.torch_private import neg_view
from ray_dcp.wording import joined


class ReadsAside(Protocol):
    """A reader, asked before anything is loaded."""

    def are_stored_alike(self, fqns: Sequence[str]) -> bool:
        """Whether these stored tensors have the same values for certain."""
        ...

    def read_aside(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read ``plan`` into what ``planner`` gives, which is not a part of the template."""
        ...


def differing_values(
    groups: Sequence[SharedMemory], plan: LoadPlan, planner: LoadPlanner, reader: ReadsAside
) -> list[str]:
    """A line for each of ``groups`` for whose names the checkpoint has different values."""
    items: Mapping[str, list[ReadItem]] = defaultdict(list)
    wanted = {fqn for group in groups for fqn in group.fqns}
    for item in plan.items:
        if item.type == LoadItemType.TENSOR and item.dest_index.fqn in wanted:
            items[item.dest_index.fqn].append(item)
    return [
        f"{joined(group.fqns)}: {'its chunks ' if len(group.fqns) == 1 else ''}share memory in the template, "
        "and the checkpoint has different values for them; "
        "give each a tensor of its own, or leave some out with skip="
        for group in groups
        if not _agree(group, items, planner, reader)
    ]


def _agree(
    group: SharedMemory, items: Mapping[str, Sequence[ReadItem]], planner: LoadPlanner, reader: ReadsAside
) -> bool:
    if group.is_tied:
        stored = [items[fqn][0].storage_index.fqn for fqn in group.fqns if items[fqn]]
        if reader.are_stored_alike(stored):
            return True
    aside = _Aside(planner)
    reader.read_aside(LoadPlan([item for fqn in group.fqns for item in items[fqn]]), aside)
    return aside.agrees()


class _Aside(DefaultLoadPlanner):
    """Takes what is read for a planner's tensors into memory beside them."""

    def __init__(self, planner: LoadPlanner) -> None:
        super().__init__()
        self._planner = planner
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(where it belongs, what was read)."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._planner.resolve_tensor(read_item).detach()
        read = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._read.append((target, read))
        return read

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: what was read stays where it is."""

    def agrees(self) -> bool:
        """Whether all that was read can be where it belongs at once: put there in turn, none changes another."""
        read = [(target, values) for target, values in self._read if target.numel()]
        if any(target.is_meta for target, _ in read):
            return _agree_on_meta(read)
        start = min((target.data_ptr() for target, _ in read), default=0)
        end = max((target.data_ptr() + reach(target) for target, _ in read), default=0)
        memory = torch.empty(end - start, dtype=torch.uint8, device="cpu")
        places = []
        for target, values in read:
            offset, odd = divmod(target.data_ptr() - start, target.itemsize)
            if odd:
                return False
            typed = memory[: len(memory) // target.itemsize * target.itemsize].view(target.dtype)
            place = typed.as_strided(target.shape, target.stride(), offset)
            place = place.conj() if target.is_conj() else place
            places.append(neg_view(place) if target.is_neg() else place)
            places[-1].copy_(values)
        return all(_same_bits(place, values) for place, (_, values) in zip(places, read, strict=True))


def _agree_on_meta(read: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether, for a tensor that has no memory yet, what goes to one place of it is the same each time."""
    held: dict[Any, torch.Tensor] = {}
    return all(
        _same_bits(held.setdefault((target.storage_offset(), target.shape, target.stride()), values), values)
        for target, values in read
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in plain))


__all__ = ["ReadsAside", "differing_values"]
