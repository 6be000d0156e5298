"""Finds tensors of a template that share memory: a load is right only where the values stored for them agree.

Tied weights are one tensor under two names; views of one buffer may overlap. Whichever is filled last would win.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ray_dcp.planning.layouts import local_part
from ray_dcp.planning.template.template_memory import is_meta, local_tensors


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Names whose tensors share some memory, or may do so."""

    fqns: tuple[str, ...]
    is_tied: bool
    """Whether all of them are one tensor, whole and in one layout."""


def memory_identity(value: torch.Tensor) -> Hashable:
    """A key that is equal for tensors that are the same elements at the same place, also where neither has memory."""
    local = local_part(value)
    if local is None:
        return id(value)
    place = local.untyped_storage()._cdata if local.is_meta else local.data_ptr()
    layout = local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg()
    return place, local.storage_offset() if local.is_meta else 0, layout, local.device


def shared_memory(values: Mapping[str, torch.Tensor]) -> list[SharedMemory]:
    """The names in ``values``, all to be filled, that share memory on this rank; quick where none do.

    Tensors on meta are told of only where several names have one tensor.
    """
    fqns, tensors = list(values), list(map(local_part, values.values()))
    if any(tensor is None for tensor in tensors):
        parts = [(fqn, part) for fqn, value in values.items() for part in local_tensors(value)]
        fqns, tensors = [fqn for fqn, _ in parts], [part for _, part in parts]
    held: Any = tensors
    starts = np.array(list(map(torch.Tensor.data_ptr, held)), dtype=np.int64)  # 0 on meta
    ends = starts + np.array(list(map(torch.Tensor.numel, held)), dtype=np.int64) * np.array(
        list(map(torch.Tensor.element_size, held)), dtype=np.int64
    )
    for number in np.flatnonzero(~np.array(list(map(torch.Tensor.is_contiguous, held)), dtype=bool)).tolist():
        ends[number] = starts[number] + reach(held[number])
    ends[starts == 0] = 0
    order = np.lexsort((ends, starts))
    order = order[ends[order] > starts[order]]
    reached = np.maximum.accumulate(ends[order]) if len(order) else ends[order]
    meets_former = np.flatnonzero(starts[order][1:] < reached[:-1]) + 1
    tied_on_meta = _tied_on_meta(values) if not starts.all() else []
    if not len(meets_former):
        return tied_on_meta
    groups: list[list[int]] = []
    for number in meets_former.tolist():
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number - 1, number])
    found = [group for meeting in groups for group in _touching([int(order[number]) for number in meeting], held)]
    return [_described(group, fqns, values) for group in found] + tied_on_meta


def tied_to(values: Mapping[str, Any], wanted: Collection[str], lacking: Iterable[str]) -> set[str]:
    """Those of ``lacking``, which the checkpoint does not fill, that are the tensor of a name that it does fill."""
    tensors = {fqn: value for fqn in lacking if isinstance(value := values[fqn], torch.Tensor)}
    if not tensors:
        return set()
    filled = {memory_identity(value) for fqn in wanted if isinstance(value := values[fqn], torch.Tensor)}
    return {fqn for fqn, value in tensors.items() if math.prod(value.shape) and memory_identity(value) in filled}


def _described(group: Sequence[int], fqns: Sequence[str], values: Mapping[str, torch.Tensor]) -> SharedMemory:
    names = tuple(sorted({fqns[number] for number in group}))
    # Two parts of one value that share memory are at two places of it.
    is_tied = len(names) == len(group) and len({memory_identity(values[fqn]) for fqn in names}) == 1
    return SharedMemory(names, is_tied)


def _tied_on_meta(values: Mapping[str, torch.Tensor]) -> list[SharedMemory]:
    tied: dict[Hashable, list[str]] = {}
    for fqn, value in values.items():
        if is_meta(value):
            tied.setdefault(memory_identity(value), []).append(fqn)
    return [SharedMemory(tuple(sorted(fqns)), is_tied=True) for fqns in tied.values() if len(fqns) > 1]


def reach(tensor: torch.Tensor) -> int:
    """Number of bytes from the tensor's first element to behind its last one."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.itemsize


def _touching(numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Split ``numbers``, whose ranges of memory meet, into groups whose elements meet too; lone ones are left out."""
    groups: list[list[int]] = []
    for number in numbers:
        met = [group for group in groups if any(_may_share(tensors[number], tensors[other]) for other in group)]
        groups = [group for group in groups if group not in met]
        groups.append([number, *(other for group in met for other in group)])
    return [group for group in groups if len(group) > 1]


def _may_share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element in common; True also where that is not easily told."""
    if one.device != other.device:
        return False
    first, second = sorted((one, other), key=lambda tensor: tensor.data_ptr())
    if second.data_ptr() >= first.data_ptr() + reach(first):
        return False
    if first.stride() != second.stride() or first.itemsize != second.itemsize:
        return True
    return _boxes_meet(first, second)


def _boxes_meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views with the same strides meet, seen as cuts of one larger tensor.

    True also where they cannot be seen so.
    """
    between, odd = divmod(second.data_ptr() - first.data_ptr(), first.itemsize)
    dims = sorted(range(first.dim()), key=first.stride, reverse=True)
    strides = [first.stride(dim) for dim in dims]
    if odd or not strides or strides[-1] < 1 or any(a % b for a, b in pairwise(strides)):
        return True
    starts = []
    for stride in strides:
        start, between = divmod(between, stride)
        starts.append(start)
    if between:
        return False  # they lie on two grids
    for place in range(1, len(dims)):
        width = strides[place - 1] // strides[place]
        dim = dims[place]
        if starts[place] + second.shape[dim] > width or first.shape[dim] > width:
            return True  # a row of one goes beyond the end of a row
    return all(start < first.shape[dim] for start, dim in zip(starts, dims, strict=True))


__all__ = ["SharedMemory", "memory_identity", "reach", "shared_memory", "tied_to"]
