"""``data.pkl`` of a tensor's record: what ``torch.save`` pickles for a contiguous CPU tensor in a storage of its own.

What pickle remembers and never asks for again is left out of what is written.

Equal dtypes and shapes have equal pickles, whatever the values; so each is made once, and no tensor is pickled.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from ray_dcp.torch_private import dtype_to_storage_type, new_dtypes, rebuild_tensor, rebuild_tensor_of_late_dtype

_NAME, _LOCATION = "0", "cpu"


class _Storage:
    """Stands for a tensor's storage, which a pickle only names."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        self.dtype = dtype
        self.numel = numel


class _StoredTensor:
    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._sizes = sizes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce as ``torch.Tensor.__reduce_ex__``: dtypes that came late have a rebuild function of their own."""
        storage = _Storage(self._dtype, math.prod(self._sizes))
        arguments: tuple[Any, ...] = (storage, 0, self._sizes, _strides(self._sizes), False, OrderedDict())
        if self._dtype in new_dtypes():
            return rebuild_tensor_of_late_dtype, (*arguments, self._dtype)
        return rebuild_tensor, arguments


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives these sizes; not asked of a tensor, since sizes may come from a damaged file."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides)) if sizes else ()


class _RecordPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        if obj.dtype in new_dtypes():
            nbytes = obj.numel * obj.dtype.itemsize
            return "storage", torch.UntypedStorage, _NAME, _LOCATION, nbytes
        name = dtype_to_storage_type()[obj.dtype]
        return "storage", getattr(torch, name), _NAME, _LOCATION, obj.numel


@functools.lru_cache(maxsize=16384)
def torchs_pickle(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """What ``torch.save`` pickles for any contiguous CPU tensor of this dtype and shape that needs no gradient.

    Raises ``KeyError`` for a dtype that ``torch.save`` has no storage for.
    """
    buffer = io.BytesIO()
    _RecordPickler(buffer, protocol=DEFAULT_PROTOCOL).dump(_StoredTensor(dtype, tuple(sizes)))
    return buffer.getvalue()


@functools.lru_cache(maxsize=16384)
def tensor_pickle(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """What ``torchs_pickle`` makes, as short as can be; raises ``KeyError`` as it does."""
    return pickletools.optimize(torchs_pickle(dtype, sizes))
