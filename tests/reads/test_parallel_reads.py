"""Whole loads with several reads in flight, as from a bucket or on many cores: right, or told as from one."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads import reader
from ray_dcp.reads.plan.shape import ReadShape
from tests.ranks import ThreadRanks, require_no_errors
from tests.reads.damaged import Checkpoint
from tests.shardings import differences, state, templates

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ONE = ReadShape(
    unit_nbytes=BLOCK_NBYTES,
    piece_nbytes=BLOCK_NBYTES,
    run_nbytes=4 * BLOCK_NBYTES,
    max_gap_nbytes=16 << 10,
    num_in_flight=1,
)
SHAPES = {
    "one at a time": ONE,
    "four": dataclasses.replace(ONE, num_in_flight=4),
    "small runs": ReadShape(
        unit_nbytes=BLOCK_NBYTES, piece_nbytes=700, run_nbytes=700, max_gap_nbytes=0, num_in_flight=8
    ),
    "as from a bucket": ReadShape(
        unit_nbytes=16 * BLOCK_NBYTES,
        piece_nbytes=16 * BLOCK_NBYTES,
        run_nbytes=16 * BLOCK_NBYTES,
        max_gap_nbytes=256 << 10,
        num_in_flight=8,
    ),
}


@pytest.fixture(params=SHAPES)
def shape(request, monkeypatch) -> ReadShape:
    chosen = SHAPES[request.param]
    monkeypatch.setattr(reader, "read_shape", lambda store: chosen)
    return chosen


def test_every_kind_of_tensor_cut_in_every_way_is_right(tmp_path, shape):
    require_no_errors(ThreadRanks(2).save(lambda rank: state(rank, 2), tmp_path))
    filled = [templates(rank, 3) for rank in range(3)]
    require_no_errors(ThreadRanks(3).load(filled, tmp_path))
    assert [differences(filled[rank], rank, 3) for rank in range(3)] == [[], [], []]


def values() -> dict[str, torch.Tensor]:
    """Small ones, some of several blocks, and a transposed one."""
    sizes = {f"w{n}": 10 + n * n * 9000 for n in range(12)}
    found = {name: torch.arange(count, dtype=torch.float32) for name, count in sizes.items()}
    return found | {"t": torch.arange(900_000.0, device="cpu").reshape(900, 1000).t()}


@pytest.mark.parametrize("save", [dcp.save, torch_dcp.save], ids=["ours", "torchs"])
def test_damage_is_told_of_the_tensor_that_has_it(tmp_path, shape, save):
    save(values(), checkpoint_id=tmp_path, no_dist=True)
    checkpoint = Checkpoint(tmp_path)
    for name in ("w0", "w5", "w11"):
        at = checkpoint.files[checkpoint.shard].index(values()[name].numpy().tobytes())
        filled = {key: torch.zeros_like(tensor) for key, tensor in values().items()}
        with checkpoint.flipped(checkpoint.shard, at + 4, 1), pytest.raises(dcp.CheckpointException) as caught:
            dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
        assert isinstance(caught.value.__cause__, CorruptCheckpointError)
        assert caught.value.__cause__.fqn == name
        assert not [one for one in threading.enumerate() if one.name.startswith("ray_dcp_read")]


MODES = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "another default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "none": contextlib.nullcontext,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("save", [dcp.save, torch_dcp.save], ids=["ours", "torchs"])
def test_torchs_modes_of_the_calling_thread_change_nothing(tmp_path, shape, save, mode):
    saved = values()
    save(saved, checkpoint_id=tmp_path, no_dist=True)
    with MODES[mode]():
        filled = {name: torch.zeros(tensor.shape, device="cpu") for name, tensor in saved.items()}
        dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(filled[name], saved[name]) for name in saved)
