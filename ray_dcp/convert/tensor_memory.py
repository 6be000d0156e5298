"""Memory for one tensor at a time, which goes back to the system when the tensor is gone."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_MIN_MAPPED_NBYTES = 1 << 20


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor in a storage of its own, its values not said.

    Torch's own come from malloc, and glibc keeps many of those up to 32 MiB that are made and dropped one by one: an
    aligned allocation does not fit into the gap that the one before has left.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MIN_MAPPED_NBYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(tuple(shape))
