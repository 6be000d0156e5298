"""A program that torchrun starts, beside a Ray cluster that is there already."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

from tests.slack import within

pytestmark = pytest.mark.ray

PROGRAM = """
import sys
import ray, torch, torch.distributed as dist
import ray_dcp as dcp
from ray_dcp.errors import GroupError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo")
rank, place = dist.get_rank(), sys.argv[1]


def save():
    mesh = init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(torch.full((1, 3), float(rank)), mesh, [Shard(0)])
    dcp.save({"weight": weight, "step": 7}, checkpoint_id=place)


for _ in range(2):
    try:
        save()
    except GroupError as error:
        print(f"rank {rank}: {error}", flush=True)
    if not ray.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        store.set("ray_dcp/node", "of another cluster")
        ray.init(address="auto", log_to_driver=False)
dist.barrier()
if rank == 0:
    store.delete_key("ray_dcp/node")
dist.barrier()
save()
state = {"weight": torch.full((2, 3), float("nan")), "step": 0}
dcp.load(state, checkpoint_id=place)
print(f"rank {rank}: {state['weight'].tolist()} {state['step']}", flush=True)
"""


def test_it_is_told_how_to_reach_ray_and_then_saves_and_loads(ray_session, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    cluster = ray.get_runtime_context().gcs_address
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py", "c"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=within(180),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    for rank in range(2):
        told = [line for line in ran.stdout.splitlines() if line.startswith(f"rank {rank}: ")]
        assert len(told) == 3, ran.stdout
        assert "not connected to Ray" in told[0]
        assert 'ray.init(address="auto") on every rank' in told[0]
        assert "another Ray cluster" in told[1]
        assert told[2] == f"rank {rank}: [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]] 7"
