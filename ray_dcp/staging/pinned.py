"""Staging buffers pinned for CUDA: copies from a GPU then run beside the program, at the speed of the bus."""

from __future__ import annotations

import torch

from ray_dcp.staging.shared_buffer import SharedBuffer


def pin(buffer: SharedBuffer) -> bool:
    """Pin the buffer's memory until it is closed; return whether it is pinned.

    Does nothing where this process does not use CUDA by now: it has no tensors there, and a context of CUDA takes
    hundreds of MiB of a GPU. Raises ``torch.cuda.CudaError`` where CUDA refuses.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    address = torch.frombuffer(buffer.memory, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()
    _require_done(runtime.cudaHostRegister(address, buffer.nbytes, 0))

    def unpin() -> None:
        _require_done(runtime.cudaHostUnregister(address))

    buffer.before_close(unpin)
    return True


def _require_done(code: object) -> None:
    torch.cuda.check_error(int(code))  # type: ignore[call-overload]  # an enum of CUDA's


__all__ = ["pin"]
