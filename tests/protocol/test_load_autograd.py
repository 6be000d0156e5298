"""Filling a tensor is a change in place that autograd knows of."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

import ray_dcp as dcp
from ray_dcp import LocalShards
from tests.ranks import ThreadRanks, require_no_errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class UsersPlanner(DefaultLoadPlanner):
    pass


OPTIONS = {
    "as ever": lambda place: {},
    "torch's reader": lambda place: {"storage_reader": FileSystemReader(place)},
    "a user's planner": lambda place: {"planner": UsersPlanner()},
}
SMALL, LARGE = 3, 3 << 18


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "view", [lambda w: w, lambda w: w.detach(), lambda w: w.detach()[:]], ids=["it", "detached", "view"]
)
def test_a_backward_pass_through_what_a_load_has_replaced_raises(tmp_path, size, options, view):
    dcp.save({"w": torch.full((size,), 2.0)}, checkpoint_id=tmp_path, no_dist=True)
    weight = torch.nn.Parameter(torch.ones(size))
    loss = (weight * weight).sum()
    dcp.load({"w": view(weight)}, checkpoint_id=tmp_path, no_dist=True, **OPTIONS[options](tmp_path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    assert bool((weight.grad == 4).all())


def test_so_do_shards_and_what_several_ranks_read_together(tmp_path):
    dcp.save({"w": torch.ones(LARGE), "s": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    templates = [{"w": torch.zeros(LARGE), "s": LocalShards((4,), {(1,): torch.zeros(2)})} for _ in range(4)]
    tensors = [tensor for state in templates for tensor in (state["w"], state["s"].chunks[1,])]
    before = [tensor._version for tensor in tensors]
    require_no_errors(ThreadRanks(4).load(templates, tmp_path))
    assert all(tensor._version > old for tensor, old in zip(tensors, before, strict=True))


def test_a_refused_load_changes_no_version(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    weight = torch.ones(2)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": weight, "absent": 0}, checkpoint_id=tmp_path, no_dist=True)
    assert weight._version == 0


def test_tensors_of_inference_mode_have_none_and_are_filled(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with torch.inference_mode():
        state = {"w": torch.zeros(2)}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["w"].tolist() == [1, 1]
