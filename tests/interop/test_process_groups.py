"""Who the ranks are where torch.distributed is in use: found by themselves, or named by ``process_group=``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

import ray_dcp as dcp
from ray_dcp import LocalShards
from ray_dcp.cluster import current
from tests.cluster.test_group import ray_dcp_actors, until
from tests.interop import layouts
from tests.slack import within

pytestmark = pytest.mark.ray


def shard(rank: int, world_size: int, value: float | None = None) -> LocalShards:
    """One row a rank."""
    return LocalShards((world_size, 3), {(rank, 0): torch.full((1, 3), rank + 1.0 if value is None else value)})


def found_by_themselves(rank: int, folder: Path) -> tuple[object, ...]:
    group = dcp.current_group()
    again = dcp.current_group()
    dcp.save({"t": shard(rank, 2)}, checkpoint_id=folder)
    template = {"t": shard(rank, 2, value=-1.0)}
    dcp.load(template, checkpoint_id=folder)
    filled = template["t"].chunks[rank, 0].tolist()
    return group.rank == dist.get_rank(), group.world_size, group is again, group.name, filled


def alone_or_not(rank: int, folder: Path) -> float:
    dcp.save({"rank": float(rank)}, checkpoint_id=folder / str(rank), no_dist=True)
    template = {"rank": -1.0}
    dcp.load(template, checkpoint_id=folder / str(rank), no_dist=True)
    return template["rank"]


def one_fails(rank: int, folder: Path) -> tuple[str, tuple[int, ...], bool]:
    state = {"t": shard(rank, 2)} | ({"bad": lambda: 0} if rank == 1 else {})
    try:
        dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        dcp.save({"t": shard(rank, 2)}, checkpoint_id=folder)
        return error.phase, error.failed_ranks, (folder / ".metadata").exists()
    return "", (), False


def all_of_two(rank: int, folder: Path) -> tuple[tuple[object, ...], float, tuple[str, tuple[int, ...], bool]]:
    """One after the other in one process group: that of each has a coordinator, which is a process."""
    found = found_by_themselves(rank, folder / "found")
    return found, alone_or_not(rank, folder / "alone"), one_fails(rank, folder / "fails")


@pytest.fixture(scope="module")
def outcomes(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("process-group")
    return layouts.in_group(ranks, 2, all_of_two, folder, folder, joined=False)


def test_the_ranks_of_the_default_process_group_are_found(outcomes):
    found = [each for each, _, _ in outcomes]
    assert len({each[3] for each in found}) == 1
    assert found[0][3].startswith("torch-")
    assert [(*each[:3], each[4]) for each in found] == [(True, 2, True, [[rank + 1.0] * 3]) for rank in range(2)]


def test_no_dist_acts_alone_within_a_process_group(outcomes):
    assert [alone for _, alone, _ in outcomes] == [0.0, 1.0]


def test_a_failure_of_one_reaches_all_and_the_next_save_works(outcomes):
    assert [failure for _, _, failure in outcomes] == [("plan", (1,), True)] * 2


def save_by_halves(rank: int, folder: Path) -> tuple[int, int, list[float], bool]:
    """Two process groups of two ranks, each with a checkpoint of its own, at the same time."""
    import torch.distributed as dist

    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]
    place = folder / f"half-{rank // 2}"
    dcp.save({"t": shard(rank % 2, 2, value=float(rank))}, checkpoint_id=place, process_group=half)
    template = {"t": torch.full((2, 3), -1.0)}
    report = dcp.load(template, checkpoint_id=place, process_group=half)
    dist.barrier()
    # The default group goes on beside them.
    dcp.save({"t": shard(rank, 4)}, checkpoint_id=folder / "all")
    everything = {"t": torch.full((4, 3), -1.0)}
    dcp.load(everything, checkpoint_id=folder / "all")
    return (
        dist.get_rank(half),
        len(report.loaded),
        template["t"][:, 0].tolist(),
        everything["t"][:, 0].tolist() == [1, 2, 3, 4],
    )


def test_a_process_group_that_is_passed_takes_its_place(ranks, tmp_path):
    outcomes = layouts.in_group(ranks, 4, save_by_halves, tmp_path, tmp_path, joined=False)
    assert outcomes == [
        (0, 1, [0, 1], True),
        (1, 1, [0, 1], True),
        (0, 1, [2, 3], True),
        (1, 1, [2, 3], True),
    ]


WITHOUT_RAY = """
import sys, torch, torch.distributed as dist, ray_dcp as dcp
from ray_dcp.errors import GroupError
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=int(sys.argv[1]))
try:
    print("GROUP", dcp.current_group())
    dcp.save({"n": 1}, checkpoint_id=sys.argv[2])
    print("SAVED")
except GroupError as error:
    print(type(error).__name__, error)
"""


def test_several_ranks_without_a_connection_to_ray_are_told_what_to_do(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, "2", str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=within(120),
    )
    assert ran.stdout.startswith("GroupError"), ran.stdout + ran.stderr
    for words in ("torch.distributed has 2 ranks", 'ray.init(address="auto")', "no_dist=True"):
        assert words in ran.stdout
    assert not (tmp_path / "c").exists()


def name_of_the_group(rank: int) -> str:
    group = dcp.current_group()
    group.barrier()
    return group.name


def one_process_group_after_another(rank, folder):
    """The names of their two groups, and which of them have a coordinator in the end, while the second goes on."""
    current.set_joined(None)
    names = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{number}", rank=rank, world_size=2)
        try:
            names.append(name_of_the_group(rank))
            if number == 1:
                until(lambda: f"coordinator/{names[0]}" not in ray_dcp_actors(), timeout_s=30)
                going_on = [name for name in names if f"coordinator/{name}" in ray_dcp_actors()]
                dcp.current_group().barrier()
        finally:
            dist.destroy_process_group()
    for group in [group for group in current.joined_groups() if group.name in names]:
        group.close()
    return names, going_on


def test_the_group_of_a_process_group_that_has_ended_is_closed(ranks, tmp_path):
    calls = [a.call.remote(one_process_group_after_another, r, tmp_path) for r, a in enumerate(ranks.actors(2))]
    for names, going_on in ray.get(calls, timeout=within(120)):
        assert len(set(names)) == 2
        assert going_on == names[1:]
