"""Ranks that are plain programs connected to the cluster: Ray tells nobody of their death, so they must be heard of."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import ray

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import RankLostError
from tests.cluster.test_group import ray_dcp_actors, until
from tests.faults.survival import DEAD_PROCESS_S
from tests.slack import within

pytestmark = pytest.mark.ray

PROGRAM = """
import sys, time, ray
import ray_dcp as dcp
ray.init(address=sys.argv[1], log_to_driver=False)
group = dcp.RankGroup.join(sys.argv[2], rank=0, world_size=2)
print("joined", flush=True)
until = time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    sum(range(1000))  # busy, with hardly a moment for other threads
group.barrier()
print("met", flush=True)
time.sleep(600)
"""
BUSY_S = DEAD_PROCESS_S + 1


def start(name: str, busy_s: float) -> subprocess.Popen:
    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address, name, str(busy_s)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def meet(rank, world_size):
    try:
        dcp.current_group().barrier()
    except CheckpointException as error:
        return error, time.monotonic()
    return "met", time.monotonic()


def test_a_program_that_is_killed_is_lost_within_seconds_and_one_that_is_busy_for_longer_is_not(ranks):
    actor = ranks.actors(2)[1]
    with start("of-a-program", BUSY_S) as program:
        outcome, _ = ray.get(actor.run.remote(1, 2, "of-a-program", meet), timeout=within(60))
        assert outcome == "met"
        assert [program.stdout.readline() for _ in range(2)] == ["joined\n", "met\n"]

        waiting = actor.run.remote(1, 2, "of-a-program", meet)
        killed_at = time.monotonic()
        program.kill()
        error, noticed_at = ray.get(waiting, timeout=within(60))
        assert error.failed_ranks == (0,)
        assert isinstance(error.__cause__, RankLostError)
        assert noticed_at - killed_at < within(DEAD_PROCESS_S)
    ray.get(actor.leave.remote("of-a-program"), timeout=within(60))
    until(lambda: "coordinator/of-a-program" not in ray_dcp_actors(), timeout_s=30)


LEAVES_THE_CLUSTER = """
import sys, ray
import ray_dcp as dcp
ray.init(address=sys.argv[1], log_to_driver=False)
group = dcp.RankGroup.join("left", rank=0, world_size=1)  # not closed: that happens at exit
ray.shutdown()
try:
    dcp.save({"a": 1}, checkpoint_id=sys.argv[2], group=group)
except dcp.CheckpointException as error:
    print(error)
print("connected:", ray.is_initialized())
"""


def test_a_program_that_leaves_the_cluster_is_told_so_and_starts_no_other_one(ray_session, tmp_path):
    address = ray.get_runtime_context().gcs_address
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_THE_CLUSTER, address, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=within(120),
    )
    assert "this process has left the Ray cluster in which it joined" in ended.stdout
    assert ended.stdout.endswith("connected: False\n")
    assert "Traceback" not in ended.stderr
    assert "Started a local Ray instance" not in ended.stderr
    assert ended.returncode == 0
