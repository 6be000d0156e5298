"""Asynchronous saves that a node's agent writes: whatever becomes of the ranks, of it and of the coordinator."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import ray
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.cluster.agent import agent_link
from ray_dcp.cluster.agent.agent_actor import READS, AgentActor, agent_name
from ray_dcp.settings import Limits
from ray_dcp.trace_points import Point
from tests.actors import SharedRanks
from tests.cluster.test_group import pid_of_coordinator, ray_dcp_actors, until
from tests.faults.scene import Rank, arm
from tests.slack import within

pytestmark = pytest.mark.ray

COLUMNS = 600_000
"""So many that a rank's rows are several blocks."""


def state_of(rank, world_size, value):
    rows = torch.full((2, COLUMNS), value + rank)
    shards = dcp.LocalShards((2 * world_size, COLUMNS), {(2 * rank, 0): rows})
    return {"rows": shards, "n": value, "all": torch.full((5,), value)}


def save_behind(rank, world_size, place, value):
    """The response of a save whose state changes at once."""
    state = state_of(rank, world_size, value)
    response = dcp.async_save(state, checkpoint_id=place)
    state["rows"].chunks[(2 * rank, 0)].fill_(-1)
    state["all"].fill_(-1)
    return response


def save_and_wait(rank, world_size, place, value):
    """How the save ended on this rank."""
    try:
        save_behind(rank, world_size, place, value).result(within(90))
    except CheckpointException as error:
        return error
    return "saved"


def save_and_die(rank, world_size, place, value):
    os.environ["RAY_DCP_MEMORY_KEEP_S"] = "1"
    save_behind(rank, world_size, f"{place}-first", value - 1)
    save_behind(rank, world_size, place, value)
    os.kill(os.getpid(), signal.SIGKILL)


def require_saved(place, world_size, value):
    """All of the checkpoint is of the save of ``value``."""
    whole = {"rows": torch.full((2 * world_size, COLUMNS), float("nan")), "n": None, "all": torch.zeros(5)}
    dcp.load(whole, checkpoint_id=place, no_dist=True)
    expected = torch.tensor([value + row // 2 for row in range(2 * world_size)])
    assert torch.equal(whole["rows"], expected[:, None].expand(-1, COLUMNS))
    assert (whole["n"], whole["all"].tolist()) == (value, [value] * 5)


class Group:
    """Two rank actors in a group of its own."""

    def __init__(self, name: str, limits: Limits | None = None) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.actors = [Rank.remote() for _ in range(2)]
        self.pids = self.form()

    def form(self) -> list[int]:
        joins = [actor.join.remote(self.name, rank, 2, self.limits) for rank, actor in enumerate(self.actors)]
        return ray.get(joins, timeout=within(120))

    def start(self, on_rank: Callable, *args) -> list:
        return [actor.do.remote(on_rank, *args) for actor in self.actors]

    def outcomes(self, on_rank: Callable, *args) -> list:
        return ray.get(self.start(on_rank, *args), timeout=within(120))

    @property
    def agent(self):
        node_id = ray.get_runtime_context().get_node_id()
        return ray.get_actor(agent_name(self.name, node_id), namespace="ray_dcp")

    def arm_agent(self, point: Point, pids: list[int], how: signal.Signals, stamp) -> int:
        """Have the agent send a signal to these processes, and to itself, at ``point``; its own number."""
        ray.get(self.agent.__ray_call__.remote(_arm, point.title, pids, how, str(stamp)), timeout=within(60))
        return ray.get(self.agent.__ray_call__.remote(_pid), timeout=within(60))

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def _arm(agent, title, pids, how, stamp):
    def send():
        for pid in (*pids, os.getpid()):
            os.kill(pid, how)

    arm(title, send, stamp)


def _pid(agent):
    return os.getpid()


@pytest.fixture(scope="module")
def group(ray_session):
    own = Group("agents")
    yield own
    own.end()


def test_it_writes_what_was_staged_in_memory_that_is_used_again(group, tmp_path):
    opened = []
    for step in range(4):
        assert group.outcomes(save_and_wait, tmp_path / f"step-{step}", float(step)) == ["saved"] * 2
        require_saved(tmp_path / f"step-{step}", 2, float(step))
        opened.append(group.outcomes(staging_buffers))
    assert opened[1] == opened[2] == opened[3]
    assert [len(of_rank) for of_rank in opened[3]] == [2, 2], "one of them stays as it is, for who loads it from memory"
    assert agents_of("agents") == 1


def staging_buffers(rank, world_size):
    """The staging buffers that this process has open, by inode."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        if os.path.islink(path) and "ray_dcp_staging" in os.readlink(path):
            links.append(os.stat(path).st_ino)
    return set(links)


def agents_of(name: str) -> int:
    return len([actor for actor in ray_dcp_actors() if actor.startswith(f"agent/{name}/")])


def test_an_agent_that_is_killed_while_it_writes_leaves_its_part_to_the_ranks(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "before", 1.0) == ["saved"] * 2
    pid = group.arm_agent(Point.MID_WRITE, [], signal.SIGKILL, tmp_path / "when")
    assert group.outcomes(save_and_wait, tmp_path / "now", 2.0) == ["saved"] * 2
    assert (tmp_path / "when").exists()
    require_saved(tmp_path / "now", 2, 2.0)
    assert group.outcomes(save_and_wait, tmp_path / "after", 3.0) == ["saved"] * 2
    require_saved(tmp_path / "after", 2, 3.0)
    assert ray.get(group.agent.__ray_call__.remote(_pid), timeout=within(60)) != pid


def test_a_coordinator_that_is_killed_is_told_again_what_ranks_and_agent_had_told_it(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "before", 1.0) == ["saved"] * 2
    coordinator = pid_of_coordinator("agents")
    ray.get(group.agent.__ray_call__.remote(_arm_kill, Point.BEFORE_RESULT.title, coordinator, str(tmp_path / "when")))
    assert group.outcomes(save_and_wait, tmp_path / "now", 2.0) == ["saved"] * 2
    assert (tmp_path / "when").exists()
    require_saved(tmp_path / "now", 2, 2.0)


def _arm_kill(agent, title, pid, stamp):
    arm(title, lambda: os.kill(pid, signal.SIGKILL), stamp)


def test_an_agent_that_stands_still_is_ended_and_the_ranks_write_by_themselves(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "before", 1.0) == ["saved"] * 2
    group.arm_agent(Point.MID_WRITE, [], signal.SIGSTOP, tmp_path / "when")
    assert group.outcomes(save_and_wait, tmp_path / "now", 2.0) == ["saved"] * 2
    assert (tmp_path / "when").exists()
    require_saved(tmp_path / "now", 2, 2.0)
    assert group.outcomes(save_and_wait, tmp_path / "after", 3.0) == ["saved"] * 2
    require_saved(tmp_path / "after", 2, 3.0)


# The last ones of this group: its ranks are gone then.


def test_a_rank_that_is_killed_with_its_agent_loses_the_save_and_is_named(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "before", 1.0) == ["saved"] * 2
    group.arm_agent(Point.MID_WRITE, [group.pids[1]], signal.SIGKILL, tmp_path / "when")
    survivor, _ = group.start(save_and_wait, tmp_path / "now", 2.0)
    error = ray.get(survivor, timeout=within(120))
    assert isinstance(error, CheckpointException)
    assert error.failed_ranks == (1,)
    assert not (tmp_path / "now" / ".metadata").exists()
    group.actors[1] = Rank.remote()
    group.pids = group.form()
    assert group.outcomes(save_and_wait, tmp_path / "after", 3.0) == ["saved"] * 2
    require_saved(tmp_path / "after", 2, 3.0)


def test_two_saves_commit_when_all_their_ranks_are_killed_and_the_agent_ends_a_while_after_the_group(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "before", 1.0) == ["saved"] * 2
    for outcome in group.start(save_and_die, tmp_path / "now", 2.0):
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(outcome, timeout=within(60))
    until((tmp_path / "now" / ".metadata").exists, timeout_s=30)
    require_saved(tmp_path / "now-first", 2, 1.0)
    require_saved(tmp_path / "now", 2, 2.0)
    until(lambda: agents_of("agents") == 0, timeout_s=60)


def test_an_agent_that_does_not_come_is_waited_for_once_and_told_of(ray_session, tmp_path, monkeypatch, caplog):
    def start_nowhere(group, limits):
        nowhere = {"a node that is not there": 1}
        return ray.remote(resources=nowhere, concurrency_groups={READS: 1})(AgentActor).remote(group, limits)

    monkeypatch.setattr(agent_link, "start_agent", start_nowhere)
    monkeypatch.setattr(agent_link, "_AGENT_STARTS_IN_S", 1.0)
    began = time.monotonic()
    with closing(dcp.RankGroup.join("nowhere", rank=0, world_size=1)):
        for step in range(3):
            dcp.async_save({"w": torch.full((3,), float(step))}, checkpoint_id=tmp_path / f"{step}").result(within(60))
    assert time.monotonic() - began > 1.0
    assert [one.getMessage() for one in caplog.records if "has not started" in one.getMessage()] == [
        "the node agent of group 'nowhere' has not started within 1 s; this rank writes by itself, and its death would "
        "lose the save"
    ]
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "2", no_dist=True)
    assert loaded["w"].tolist() == [2.0] * 3


def save_without(rank, world_size, place, value):
    os.environ["RAY_DCP_AGENTS"] = "0"
    try:
        with closing(dcp.RankGroup.join("no-agents", rank=rank, world_size=world_size)) as group, group:
            outcome = save_and_wait(rank, world_size, place, value)
    finally:
        del os.environ["RAY_DCP_AGENTS"]
    return outcome


def test_without_agents_a_thread_of_each_rank_writes(ranks, tmp_path):
    shared: SharedRanks = ranks
    assert shared.ok(2, save_without, tmp_path / "c", 4.0) == ["saved"] * 2
    require_saved(tmp_path / "c", 2, 4.0)
    assert agents_of("no-agents") == 0
