"""torch's ``ShardedTensor``, in a process group of one: several shards, cut otherwise when they are loaded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import ray_dcp as dcp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module", autouse=True)
def group_of_one(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cut(*num_rows: int) -> ShardedTensor:
    """Six rows of three, in shards of so many rows each."""
    starts = [sum(num_rows[:n]) for n in range(len(num_rows))]
    shards = [
        ShardMetadata(shard_offsets=[start, 0], shard_sizes=[rows, 3], placement="rank:0/cpu")
        for start, rows in zip(starts, num_rows, strict=True)
    ]
    tensor = sharded_tensor.zeros(EnumerableShardingSpec(shards), 6, 3)
    for shard in tensor.local_shards():
        shard.tensor.fill_(float("nan"))
    return tensor


def whole(tensor: ShardedTensor) -> torch.Tensor:
    return torch.cat([shard.tensor for shard in tensor.local_shards()])


def full(*num_rows: int) -> ShardedTensor:
    tensor, number = cut(*num_rows), 0
    for shard in tensor.local_shards():
        shard.tensor.copy_(torch.arange(number, number + shard.tensor.numel()).reshape(shard.tensor.shape))
        number += shard.tensor.numel()
    return tensor


SAVES = {  # torch's own async_save cannot stage one
    "torch": torch_dcp.save,
    "ray_dcp": dcp.save,
    "ray_dcp async": lambda state, **options: dcp.async_save(state, **options).result(),
}


@pytest.mark.parametrize("saver", SAVES)
@pytest.mark.parametrize("loader", [torch_dcp, dcp], ids=["torch", "ray_dcp"])
@pytest.mark.parametrize("flatten", [True, False])
def test_it_is_saved_and_loaded_by_both(tmp_path, saver, loader, flatten):
    planners = DefaultSavePlanner(flatten_sharded_tensors=flatten), DefaultLoadPlanner(flatten_sharded_tensors=flatten)
    SAVES[saver]({"model": {"t": full(2, 4)}, "n": 5}, checkpoint_id=tmp_path / "c", planner=planners[0])
    for template in (cut(6), cut(1, 3, 2), cut(2, 4)):
        state = {"model": {"t": template}, "n": 0}
        loader.load(state, checkpoint_id=tmp_path / "c", planner=planners[1])
        assert whole(template).flatten().tolist() == list(range(18))
        assert state["n"] == 5
    plain = {"model": {"t": torch.full((6, 3), float("nan"))}}
    loader.load(plain, checkpoint_id=tmp_path / "c")
    assert plain["model"]["t"].flatten().tolist() == list(range(18))


def test_one_that_is_missing_or_on_meta_is_refused_by_name(tmp_path):
    dcp.save({"t": full(2, 4)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(dcp.CheckpointException, match="other: Missing key"):
        dcp.load({"t": cut(6), "other": cut(2, 4)}, checkpoint_id=tmp_path / "c")
    state = {"t": cut(1, 5), "other": cut(2, 4)}
    assert dcp.load(state, checkpoint_id=tmp_path / "c", strict=False).missing == ("other",)
    assert whole(state["t"]).flatten().tolist() == list(range(18))
    on_meta = cut(2, 4)
    for shard in on_meta.local_shards():
        shard.tensor = torch.empty(shard.tensor.shape, device="meta")
    with pytest.raises(dcp.CheckpointException, match="t: the template is a ShardedTensor on meta"):
        dcp.load({"t": on_meta}, checkpoint_id=tmp_path / "c")
