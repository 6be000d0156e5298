"""The bytes of a tensor, piece by piece: right, in order, and through no more memory than said."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.staging import host_pieces as module
from ray_dcp.staging.host_pieces import Ring, host_pieces, tensor_memory


def joined(pieces) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


def expected(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().resolve_neg().numpy().tobytes()


def test_a_contiguous_tensor_is_where_it_is():
    tensor = torch.arange(3 * BLOCK_NBYTES // 4 + 5, dtype=torch.float32)
    pieces = list(host_pieces(tensor))
    assert [len(piece) for piece in pieces] == [BLOCK_NBYTES] * 3 + [20]
    tensor.fill_(7)
    assert joined(pieces) == expected(tensor)


VIEWS = {
    "transposed": lambda: torch.randn(700, 900).t(),
    "columns": lambda: torch.randn(3000, 900)[:, 100:500],
    "long rows": lambda: torch.randn(3, 2, 600_000)[:, :, ::2],
    "expanded": lambda: torch.randn(1, 500).expand(2000, 500),
    "conjugate": lambda: torch.randn(300_000, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(300_000, dtype=torch.complex64).conj().imag,
    "one element of a column": lambda: torch.randn(1, 2)[:, 1],
    "no rows of a column": lambda: torch.randn(0, 2)[:, 1],
    "no elements": lambda: torch.randn(4, 0, 3).transpose(0, 2),
    "no dimensions": lambda: torch.tensor(5.0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_passes_in_order_and_in_small_pieces(view):
    tensor = VIEWS[view]()
    assert joined(host_pieces(tensor)) == expected(tensor)
    assert max((len(piece) for piece in host_pieces(tensor)), default=0) <= BLOCK_NBYTES


class LateRing(Ring):
    """A ring as of a device: a copy is there only when it has been waited for, and not a moment before."""

    def __init__(self, nbytes: int, num_buffers: int) -> None:
        super().__init__([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(num_buffers)], self._start)
        self.under_way = 0
        self.most_under_way = 0

    def _start(self, held, part):
        copied = part.clone()
        held.view(-1).view(torch.uint8).fill_(255)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)

        def arrived():
            held.copy_(copied)
            self.under_way -= 1

        return arrived


@given(
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(8, 64),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.int16, torch.uint8]),
)
def test_a_tensor_on_a_device_passes_through_the_ring(sizes, nbytes, num_buffers, dtype):
    tensor = torch.arange(torch.Size(sizes).numel()).to(dtype).reshape(sizes)
    ring = LateRing(nbytes, num_buffers)
    assert joined(module._device_pieces(tensor, ring)) == expected(tensor)
    assert ring.most_under_way <= num_buffers
    assert not ring.lock.locked()


def test_copies_run_ahead_of_their_use():
    ring = LateRing(16, 3)
    pieces = module._device_pieces(torch.arange(100, dtype=torch.uint8), ring)
    next(pieces)
    assert ring.under_way == 2


def test_whoever_stops_early_leaves_the_ring_to_others():
    ring = LateRing(16, 2)
    pieces = module._device_pieces(torch.arange(100, dtype=torch.uint8), ring)
    next(pieces)
    pieces.close()
    assert joined(module._device_pieces(torch.arange(5, dtype=torch.uint8), ring)) == bytes(range(5))


def test_memory_is_shared_with_the_tensor():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    tensor_memory(tensor)[:] = bytes([0x80, 0x3F] * 4)
    assert tensor.tolist() == [1.0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_on_a_gpu_arrives(view):
    tensor = VIEWS[view]()
    on_gpu = tensor.cuda()
    assert joined(host_pieces(on_gpu)) == expected(tensor)
    assert joined(host_pieces(on_gpu.expand(2, *on_gpu.shape))) == expected(tensor) * 2
