"""What a save and a load take on top of the state: measured in real rank processes, by the kernel's own counter."""

from __future__ import annotations

import ctypes
import gc
import shutil
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does"),
]

MIB = 2**20
MAX_EXTRA_NBYTES = int(0.3 * 2**30)
MANY = {f"layer.{number}": 16 * MIB for number in range(16)} | {"embedding": 256 * MIB}
"""512 MiB a rank."""
TURNED = {f"layer.{number}": 64 * MIB for number in range(8)}


class ExtraMemory:
    """The most memory that this process held at once within the block, less what it held before."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before would be taken again without being counted
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._nbytes("VmRSS")
        return self

    def __exit__(self, *_):
        self.nbytes = self._nbytes("VmHWM") - self._before

    @staticmethod
    def _nbytes(name):
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name))


def local_tensors(sizes, turned, fill):
    """Each in memory of its own, all of it touched; ``turned`` ones are transposed, so not contiguous."""
    tensors = {name: torch.empty(512, nbytes // 4 // 512) for name, nbytes in sizes.items()}
    for number, tensor in enumerate(tensors.values()):
        fill(number, tensor)
    return {name: tensor.t() if turned else tensor for name, tensor in tensors.items()}


def sharded(tensors, rank, world_size):
    return {
        name: dcp.LocalShards((t.shape[0] * world_size, t.shape[1]), {(t.shape[0] * rank, 0): t})
        for name, t in tensors.items()
    }


def count_up(rank):
    """A filler; all values are whole numbers that float32 holds exactly."""

    def fill(number, tensor):
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), MIB):
            part = flat[start : start + MIB]
            torch.arange(part.numel(), out=part).add_((start // MIB) * 1000 + 10 * number + rank)

    return fill


def fill_with_nan(number, tensor):
    tensor.fill_(torch.nan)


def try_out(rank, world_size, place):
    """Import what is imported at the first use."""
    dcp.save({"x": torch.zeros(2), "y": 1}, checkpoint_id=place)
    dcp.load({"x": torch.ones(2), "y": 2}, checkpoint_id=place)


def save_counting(rank, world_size, place, sizes, turned):
    state = sharded(local_tensors(sizes, turned, count_up(rank)), rank, world_size)
    with ExtraMemory() as extra:
        dcp.save(state, checkpoint_id=place)
    return extra.nbytes


def load_counting(rank, world_size, place, sizes, turned):
    tensors = local_tensors(sizes, turned, fill_with_nan)
    template = sharded(tensors, rank, world_size)
    with ExtraMemory() as extra:
        dcp.load(template, checkpoint_id=place)
    wrong = []
    for number, (name, tensor) in enumerate(tensors.items()):
        loaded = tensor.t() if turned else tensor
        expected = torch.empty_like(loaded)
        count_up(rank)(number, expected)
        if not torch.equal(loaded, expected):
            wrong.append(name)
    return extra.nbytes, wrong


@pytest.fixture
def place(tmp_path):
    """Deleted at once: pytest would keep the last three runs."""
    yield tmp_path / "checkpoint"
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "turned"),
    [pytest.param(MANY, False, marks=pytest.mark.soak), (TURNED, True)],  # the harder one by day
    ids=["contiguous", "transposed"],
)
def test_1_gib_on_2_ranks_saves_and_loads_with_at_most_0_3_gib_more_a_process(ranks, place, sizes, turned):
    ranks.ok(2, try_out, place.with_name("tiny"))
    for extra_nbytes in ranks.ok(2, save_counting, place, sizes, turned):
        assert extra_nbytes <= MAX_EXTRA_NBYTES
    for extra_nbytes, wrong in ranks.ok(2, load_counting, place, sizes, turned):
        assert wrong == []
        assert extra_nbytes <= MAX_EXTRA_NBYTES
