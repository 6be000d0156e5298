"""Copies of tensors in host memory, for saves that go on while training does."""

from __future__ import annotations

import torch


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU copy of ``tensor`` with a storage of its own: later changes of ``tensor`` do not reach it."""
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    staged.copy_(tensor.detach())
    return staged
