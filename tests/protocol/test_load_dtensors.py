"""DTensors as templates, as one rank of two sees them: on meta, with nothing of its own, tied, in a graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ray_dcp as dcp
from ray_dcp import CheckpointException

NAN = float("nan")


@pytest.fixture(scope="module")
def mesh():
    """Of two ranks, of which this is the second; nothing is ever sent."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def rows(mesh, local: torch.Tensor, num_rows: int) -> DTensor:
    shape = torch.Size((num_rows, *local.shape[1:]))
    return DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=(3, 1), run_check=False)


def load(state, place, **options):
    return dcp.load(state, checkpoint_id=place, no_dist=True, **options)


@pytest.fixture
def saved(mesh, tmp_path):
    whole = torch.arange(12.0).reshape(4, 3)
    dcp.save({"w": whole, "v": whole.clone(), "one row": whole[:1]}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_one_on_meta_gets_memory_also_where_this_rank_has_nothing_of_it(mesh, saved):
    state = {
        "w": rows(mesh, torch.empty(2, 3, device="meta"), 4),
        "one row": rows(mesh, torch.empty(0, 3, device="meta"), 1),
    }
    load(state, saved)
    assert [value.to_local().device.type for value in state.values()] == ["cpu", "cpu"]
    assert state["w"].to_local().tolist() == [[6, 7, 8], [9, 10, 11]]
    assert (state["one row"].to_local().shape, state["one row"].shape) == ((0, 3), (1, 3))
    assert state["w"].placements == (Shard(0),)


def test_a_module_of_them_on_meta_gets_parameters(mesh, saved):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(rows(mesh, torch.empty(2, 3, device="meta"), 4))
    module.v = module.w
    load({"m": module}, saved, rename={r"^([wv])$": r"m.\1"})
    assert module.v is module.w
    assert isinstance(module.w, torch.nn.Parameter)
    assert module.w.detach().to_local().tolist() == [[6, 7, 8], [9, 10, 11]]


def test_tied_ones_need_equal_values(mesh, saved):
    tied = rows(mesh, torch.full((2, 3), NAN), 4)
    load({"w": tied, "v": tied}, saved)
    assert tied.to_local().tolist() == [[6, 7, 8], [9, 10, 11]]
    dcp.save({"w": torch.zeros(4, 3), "v": torch.ones(4, 3)}, checkpoint_id=saved, no_dist=True)
    with pytest.raises(CheckpointException, match="v, w: share memory"):
        load({"w": tied, "v": tied}, saved)
    assert tied.to_local()[0].tolist() == [6, 7, 8]


def test_a_backward_pass_through_replaced_values_raises(mesh, saved):
    weight = torch.nn.Parameter(rows(mesh, torch.ones(2, 3), 4))
    squares = weight * weight
    load({"w": weight}, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward(torch.ones_like(squares))
