"""The bytes of a tensor in host memory, piece by piece: where they are, or through memory of a bounded size.

A contiguous CPU tensor is not copied at all. Another one passes through one small buffer, one on a GPU through a ring
of pinned buffers on a stream of its own, so that the next pieces travel while one is being used.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ray_dcp.format.names import BLOCK_NBYTES

_DEVICE_PIECE_NBYTES = 8 * BLOCK_NBYTES
_MAX_COPIED_NBYTES = 1 << 15
_NUM_PINNED = 3
"""Pieces of one tensor that are under way or in use at once: with the piece size, all the memory that is taken."""


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The values of a strided tensor in row-major order, as flat bytes; a piece is good until the next one is taken.

    Pieces of a contiguous tensor end at multiples of the block size.
    """
    if tensor.device.type == "cuda":
        yield from _device_pieces(tensor, _pinned_ring(tensor.device))
    elif tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        content = tensor_memory(tensor)
        for start in range(0, len(content), BLOCK_NBYTES):
            yield content[start : start + BLOCK_NBYTES]
    else:
        for part in _parts(tensor, BLOCK_NBYTES):
            yield tensor_memory(part.cpu().resolve_conj().resolve_neg().contiguous())


def small_content(tensor: torch.Tensor) -> bytes | memoryview:
    """All of a tensor's bytes at once."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        nbytes = tensor.nbytes
        # A view takes several times as long to make as such a small tensor to copy.
        return ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes <= _MAX_COPIED_NBYTES else tensor_memory(tensor)
    return b"".join(host_pieces(tensor))


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as flat bytes, writable; it stays alive as long as the view does."""
    array: Any = flat(tensor).view(torch.uint8).numpy()
    return memoryview(array)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in one dimension, also where one element has any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _parts(tensor: torch.Tensor, max_nbytes: int) -> Iterator[torch.Tensor]:
    """``tensor`` in parts of at most ``max_nbytes``, or of one element, in row-major order; an empty one has none."""
    if tensor.nbytes <= max_nbytes or tensor.dim() == 0:
        if tensor.numel():
            yield tensor
        return
    row_nbytes = tensor.nbytes // tensor.shape[0]
    if row_nbytes > max_nbytes:
        for row in tensor:
            yield from _parts(row, max_nbytes)
        return
    yield from tensor.split(max(1, max_nbytes // row_nbytes))


# From a GPU.

Arrived = Callable[[], Any]
"""Waits for a copy that was started: returns when it is there."""


class Ring:
    """A few buffers that are filled ahead of whoever uses them."""

    def __init__(
        self, buffers: list[torch.Tensor], start_copy: Callable[[torch.Tensor, torch.Tensor], Arrived]
    ) -> None:
        self.buffers = buffers
        """Flat uint8 tensors, all of one size."""
        self.start_copy = start_copy
        """Starts a copy: (to a part of a buffer, from a tensor of as many bytes) -> what waits for it."""
        self.lock = threading.Lock()
        """Held by the one thread that uses the ring."""


def _device_pieces(tensor: torch.Tensor, ring: Ring) -> Iterator[memoryview]:
    with ring.lock:
        free = deque(ring.buffers)
        under_way: deque[tuple[torch.Tensor, torch.Tensor, Arrived]] = deque()
        parts = _parts(tensor, len(ring.buffers[0]))
        while True:
            while free and (part := next(parts, None)) is not None:
                buffer = free.popleft()
                held = buffer[: part.nbytes].view(part.dtype).view(part.shape)
                under_way.append((buffer, held, ring.start_copy(held, part)))
            if not under_way:
                return
            buffer, held, arrived = under_way.popleft()
            arrived()
            yield tensor_memory(held)
            free.append(buffer)


_rings: dict[torch.device, Ring] = {}
_rings_lock = threading.Lock()


def _pinned_ring(device: torch.device) -> Ring:
    """This process's ring for ``device``, pinned once and kept."""
    with _rings_lock:
        if device not in _rings:
            stream = torch.cuda.Stream(device)

            def start_copy(held: torch.Tensor, part: torch.Tensor) -> Arrived:
                # Whatever the caller's stream still does to the tensor comes first.
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    held.copy_(part.resolve_conj().resolve_neg(), non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(stream)
                part.record_stream(stream)
                return event.synchronize

            buffers = [
                torch.empty(_DEVICE_PIECE_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_PINNED)
            ]
            _rings[device] = Ring(buffers, start_copy)
        return _rings[device]


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU copy of ``tensor`` with a storage of its own: later changes of ``tensor`` do not reach it."""
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    staged.copy_(tensor.detach())
    return staged
