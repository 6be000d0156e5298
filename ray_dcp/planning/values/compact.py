"""Tensors in Python values without the rest of the memory that they are views of.

``torch.save`` stores the whole storage of each tensor, even for one number out of a large one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ray_dcp.torch_private import AsyncCollectiveTensor

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def compacted(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensors to store in place of those whose storage holds more than they do, by the ``id`` of these.

    Tensors that share memory go on doing so where the memory they span is not more than they have together.
    """
    replaced = {id(one): one.wait() for one in tensors if isinstance(one, AsyncCollectiveTensor)}
    views: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if (
            type(tensor) in _PLAIN_TENSORS
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized)
        ):
            views.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for sharing in views.values():
        replaced |= _compact(sharing)
    return replaced


def _compact(sharing: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Like ``compacted``, for the tensors of one storage."""
    storage = sharing[0].untyped_storage()
    distinct = {_place(tensor): tensor for tensor in sharing}
    own_nbytes = sum(tensor.nbytes for tensor in distinct.values())
    itemsize = sharing[0].dtype.itemsize
    start = min(int(tensor.storage_offset()) * tensor.dtype.itemsize for tensor in distinct.values())
    nbytes = max(_end(tensor) for tensor in distinct.values()) - start
    as_they_lie = not any(tensor.is_conj() or tensor.is_neg() for tensor in sharing)
    together = len({tensor.dtype for tensor in sharing}) == 1 and as_they_lie and nbytes <= own_nbytes
    if together and nbytes == storage.nbytes():
        return {}
    if not together:
        copies = {place: _copy(tensor.detach()) for place, tensor in distinct.items()}
        return {id(tensor): _like(tensor, copies[_place(tensor)]) for tensor in sharing}
    first = start // itemsize
    spanned = sharing[0].detach().as_strided((nbytes // itemsize,), (1,), first).clone()
    return {
        id(tensor): _like(
            tensor, spanned.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()) - first)
        )
        for tensor in sharing
    }


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _end(tensor: torch.Tensor) -> int:
    """The end of the tensor's last element in the storage, in bytes."""
    if not tensor.numel():
        return int(tensor.storage_offset()) * tensor.dtype.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + reach + 1) * tensor.dtype.itemsize


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """``copy`` as a tensor or parameter like ``tensor``, with its attributes."""
    if type(tensor) is torch.nn.Parameter:
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    elif tensor.requires_grad:
        copy.requires_grad_()
    copy.__dict__.update(vars(tensor))
    return copy
