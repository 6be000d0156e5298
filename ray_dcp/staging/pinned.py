"""Staging buffers pinned for CUDA, and side streams: copies from a GPU then run beside the program."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

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


class BehindNow:
    """What was asked of these devices' current streams by now; in the block what is asked comes behind that alone.

    Another thread may enter it. Without CUDA devices it does nothing.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        cuda = {device for device in devices if device.type == "cuda"}
        self._asked = [(device, torch.cuda.current_stream(device).record_event()) for device in cuda]
        self._streams = ExitStack()

    def __enter__(self) -> None:
        for device, event in self._asked:
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            self._streams.enter_context(torch.cuda.stream(stream))

    def __exit__(self, *_: object) -> None:
        self._streams.close()


def _require_done(code: object) -> None:
    torch.cuda.check_error(int(code))  # type: ignore[call-overload]  # an enum of CUDA's


__all__ = ["BehindNow", "pin"]
