"""Deputies that are actors without torch, as the coordinator's actor sees them."""

from __future__ import annotations

import pickle

import pytest
import ray

from ray_dcp import CheckpointException
from ray_dcp.cluster.coordinator_actor import CoordinatorActor, end_coordinator, ensure_coordinator
from ray_dcp.cluster.coordinator_door import ANSWERED, CoordinatorDoor
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.messages import CallId
from tests.cluster import torchless_agent
from tests.cluster.torchless_agent import TorchlessAgent
from tests.protocol.handed_saves import OneRank
from tests.slack import within

GROUP = "by agents"


@pytest.fixture(scope="module")
def coordinator(ray_session):
    handle = ensure_coordinator(GROUP)
    yield handle
    end_coordinator(GROUP)


@pytest.fixture(scope="module")
def agents(coordinator):
    """The last test kills one."""
    ray.cloudpickle.register_pickle_by_value(torchless_agent)  # its own package imports torch
    both = [ray.remote(num_cpus=0)(TorchlessAgent).remote(coordinator) for _ in range(2)]
    yield both
    ray.cloudpickle.unregister_pickle_by_value(torchless_agent)
    for agent in both:
        ray.kill(agent)


def handed_over(coordinator, agents, place) -> list[OneRank]:
    """A save that two ranks have handed over."""
    joined = [coordinator.join.remote(JoinRequest(rank, 2, f"{place}/{rank}"), 60.0, []) for rank in (0, 1)]
    generation = ray.get(joined[0]).unwrap()
    ranks = [OneRank(rank, CallId.named(generation, 0, "save", str(place)), value=rank) for rank in (0, 1)]
    sent = [coordinator.contribute.remote(one.call_id, one.rank, "plan", one.plan_message) for one in ranks]
    for one, answer in zip(ranks, sent, strict=True):
        one.finish_plan(ray.get(answer).unwrap())
    assert ray.get([agent.take.remote(one.handed_over) for agent, one in zip(agents, ranks, strict=True)]) == [True] * 2
    return ranks


def test_the_door_knows_all_that_the_coordinator_answers():
    answered = {name for name in vars(CoordinatorActor) if not name.startswith("_")}
    assert answered == set(ANSWERED) == {name for name in vars(CoordinatorDoor) if not name.startswith("_")}


@pytest.mark.ray
def test_agents_without_torch_finish_the_save_of_ranks_that_are_gone(coordinator, agents, tmp_path):
    ranks = handed_over(coordinator, agents, tmp_path / "c")
    ray.get(coordinator.ranks_failed.remote({0: "killed", 1: "killed"}))
    assert not ray.get(agents[1].progress.remote(pickle.dumps(ranks[1].call_id), 1)).failed
    sent = [agent.send.remote(one.write_message) for agent, one in zip(agents, ranks, strict=True)]
    for told, knows_torch in ray.get(sent, timeout=within(30)):
        assert not told.failed
        assert not knows_torch
    assert (tmp_path / "c" / ".metadata").exists()


@pytest.mark.ray
def test_what_keeps_an_agent_from_writing_reaches_the_others(coordinator, agents, tmp_path):
    ranks = handed_over(coordinator, agents, tmp_path / "c")
    waiting = agents[0].send.remote(ranks[0].write_message)
    assert ray.get(agents[1].give_up.remote(OSError(28, "No space left on device"))).failed
    told, _ = ray.get(waiting, timeout=within(30))
    assert pickle.loads(told.failure).__cause__.errno == 28


@pytest.mark.ray
def test_an_agent_that_is_killed_is_missed_where_its_rank_is_gone_too(coordinator, agents, tmp_path):
    ranks = handed_over(coordinator, agents, tmp_path / "c")
    waiting = agents[0].send.remote(ranks[0].write_message)
    ray.get(coordinator.ranks_failed.remote({1: "killed"}))
    ray.kill(agents[1])
    told, knows_torch = ray.get(waiting, timeout=within(30))
    assert not knows_torch
    error = pickle.loads(told.failure)
    assert isinstance(error, CheckpointException)
    assert error.failed_ranks == (1,)
    assert "which had taken over its part, is gone, too" in str(error)
