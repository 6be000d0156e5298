"""The memory of a template's tensors: which of them cannot be filled, and which have no memory yet."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ray_dcp.planning.layouts import is_freed, local_part
from ray_dcp.planning.local_shards import LocalShards
from ray_dcp.torch_private import ShardedTensor


class TemplateMemory:
    """The tensors of one load that have no memory yet: those on meta, and those that the template has no place for."""

    def __init__(self) -> None:
        self._on_meta: dict[str, torch.Tensor] = {}
        self._to_make: dict[str, torch.Tensor] = {}

    def to_make(self, fqn: str, saved: Any) -> torch.Tensor:
        """Note a stored tensor that the template has no place for, and return a meta tensor that stands for it.

        It will be made on the CPU, as a whole.
        """
        self._to_make[fqn] = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        return self._to_make[fqn]

    def lacks(self, fqn: str, tensor: torch.Tensor) -> None:
        """Note that ``tensor``, which is on meta, will be filled."""
        self._on_meta[fqn] = tensor

    @property
    def on_meta(self) -> frozenset[str]:
        """The names of those that are the template's own tensors."""
        return frozenset(self._on_meta.keys() - self._to_make.keys())

    def made(self) -> dict[str, torch.Tensor]:
        """New tensors with memory for those noted by ``lacks``, by name; names of one meta tensor get the same one."""
        made: dict[str, torch.Tensor] = {}
        known: dict[Hashable, torch.Tensor] = {}
        for fqn, tensor in self._on_meta.items():
            if fqn in self._to_make:
                made[fqn] = torch.empty_like(tensor, device="cpu")
                continue
            key = _identity(tensor)
            if key not in known:
                known[key] = _with_memory(tensor)
            made[fqn] = known[key]
        return made


def _identity(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for names of one tensor, also where each has its own view, as in ``Module.state_dict()``."""
    local = local_part(tensor)
    if local is None:
        return id(tensor)
    return local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), local.dtype


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor like ``tensor``, with memory: a parameter stays one. On the GPU if there is one, as torch does."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(_with_memory(tensor.detach()), requires_grad=tensor.requires_grad)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor.to_local(), device=tensor.device_mesh.device_type)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.size(), stride=tensor.stride(), run_check=False
    )


def is_meta(value: torch.Tensor) -> bool:
    """Whether ``value`` gets memory before it is filled. A ``ShardedTensor`` cannot: ``unfit`` says so."""
    local = local_part(value)  # most are plain, and asking a class with an abstract base takes long
    return local.is_meta if local is not None else not isinstance(value, ShardedTensor) and value.is_meta


def can_be_filled(value: Any) -> bool:
    """Whether ``value`` is a plain tensor or DTensor with contiguous memory, as most are."""
    local = local_part(value)
    return (
        local is not None and _is_plain(local) and local.is_contiguous() and not local.is_meta and not is_freed(local)
    )


def unfit(fqn: str, value: Any, saved: TensorStorageMetadata) -> list[str]:
    """A line for each reason why no read of a stored tensor can be planned into ``value``."""
    local = local_part(value)
    if local is not None and _is_plain(local) and value.shape == saved.size and local.is_contiguous():
        return [_freed(fqn)] if is_freed(local) else []
    if not isinstance(value, torch.Tensor):
        return [f"{fqn}: the checkpoint holds a tensor, the template a {type(value).__name__}"]
    problems = []
    if value.shape != saved.size:
        problems.append(
            f"{fqn}: Size mismatch: the checkpoint has shape {tuple(saved.size)}, the template {tuple(value.shape)}"
        )
    if not isinstance(value, ShardedTensor) and not _is_plain(value):  # which answers no such question
        kind = "a quantized" if value.is_quantized else "a nested" if value.is_nested else f"a {value.layout}"
        return [*problems, f"{fqn}: the template is {kind} tensor, which is not filled in place; fill a plain one"]
    if isinstance(value, ShardedTensor) and any(part.is_meta for part in local_tensors(value)):
        return [*problems, f"{fqn}: the template is a ShardedTensor on meta, which has no memory to fill"]
    parts = list(local_tensors(value))
    if any(map(_repeats_memory, parts)):
        problems.append(f"{fqn}: the template is a view whose elements share memory; fill a .clone() of it")
    if any(map(is_freed, parts)):
        problems.append(_freed(fqn))
    return problems


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _freed(fqn: str) -> str:
    return f"{fqn}: the template's memory has been freed; load while it has some"


def local_tensors(value: torch.Tensor) -> Iterable[torch.Tensor]:
    """The plain tensors that this rank holds of ``value``."""
    if isinstance(value, LocalShards):
        return value.chunks.values()
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    local = local_part(value)
    return [local if local is not None else value.to_local() if isinstance(value, DTensor) else value]


def _repeats_memory(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as in what ``expand`` and ``unfold`` make."""
    if tensor.layout != torch.strided or tensor.is_contiguous() or tensor.device.type == "meta":
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
