"""A group that forms anew after a death loads from the memory of its node's agent, not from storage."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray
import torch

import ray_dcp as dcp
from ray_dcp.cluster.agent.agent_actor import tell_agents_of_end
from ray_dcp.staging.buffer_errors import StagingMemoryError
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.cluster.test_group import until
from tests.cluster.test_node_agents import COLUMNS, Group, agents_of, save_and_wait, staging_buffers
from tests.faults.scene import Rank
from tests.slack import within

pytestmark = pytest.mark.ray

NAME = "from-memory"


def load_columns(rank, world_size, place, value):
    """Load some columns of all rows; where the bytes came from, and the descriptors that stay of it."""
    before = staging_buffers(rank, world_size)
    width = COLUMNS // world_size
    rows = torch.full((4, width), float("nan"))
    state = {"rows": dcp.LocalShards((4, COLUMNS), {(0, rank * width): rows}), "n": None, "all": torch.zeros(5)}
    began = time.monotonic()
    report = dcp.load(state, checkpoint_id=place)
    took_s = time.monotonic() - began
    assert torch.equal(rows, torch.tensor([value, value, value + 1, value + 1])[:, None].expand(-1, width))
    assert (state["n"], state["all"].tolist()) == (value, [value] * 5)
    assert staging_buffers(rank, world_size) == before
    return report.nbytes_by_place, took_s


@pytest.fixture(scope="module")
def group(ray_session):
    own = Group(NAME)
    own.spare = []
    yield own
    own.actors += own.spare
    own.end()


def form(group, world_size: int) -> None:
    """Have the group form anew, of so many ranks: those that live, and others in the place of those that do not."""
    there = group.actors + group.spare
    there += [Rank.remote() for _ in range(world_size - len(there))]
    group.actors, group.spare = there[:world_size], there[world_size:]
    joins = [actor.join.remote(NAME, rank, world_size, group.limits) for rank, actor in enumerate(group.actors)]
    group.pids = ray.get(joins, timeout=within(120))


def kill(group, *ranks: int) -> None:
    for rank in sorted(ranks, reverse=True):
        os.kill(group.pids[rank], signal.SIGKILL)
        del group.actors[rank]


def sources(group, place, value) -> list[set[str]]:
    """Where each rank's bytes came from."""
    return [{place for place, nbytes in by.items() if nbytes} for by, _ in group.outcomes(load_columns, place, value)]


def hide_shards(place) -> None:
    """Have nothing in storage but what says that there is a checkpoint."""
    for path in place.glob("*.distcp"):
        path.rename(f"{path}.hidden")


def show_shards(place) -> None:
    for path in place.glob("*.hidden"):
        path.rename(str(path).removesuffix(".hidden"))


def test_a_rank_is_killed_and_all_load_from_memory_be_they_as_many_or_not(group, tmp_path):
    for step in (0, 1):
        assert group.outcomes(save_and_wait, tmp_path / f"step-{step}", float(step)) == ["saved"] * 2
    place = tmp_path / "step-1"
    hide_shards(place)
    assert sources(group, place, 1.0) == [{"memory"}] * 2, "while all live"
    kill(group, 1)
    form(group, 2)
    assert sources(group, place, 1.0) == [{"memory"}] * 2
    form(group, 1)
    assert sources(group, place, 1.0) == [{"memory"}]
    form(group, 3)
    assert sources(group, place, 1.0) == [{"memory"}] * 3
    assert sources(group, tmp_path / "step-0", 0.0) == [{"storage"}] * 3, "the newest alone is kept"


def test_all_ranks_are_killed(group, tmp_path):
    form(group, 2)
    assert group.outcomes(save_and_wait, tmp_path / "step-2", 2.0) == ["saved"] * 2
    hide_shards(tmp_path / "step-2")
    kill(group, 0, 1)
    form(group, 2)
    assert sources(group, tmp_path / "step-2", 2.0) == [{"memory"}] * 2
    agent = ray.get(group.agent.__ray_call__.remote(_staging_buffers), timeout=within(60))
    assert len(agent) == 2, "of each rank one buffer"
    show_shards(tmp_path / "step-2")


def _staging_buffers(agent):
    return staging_buffers(0, 0)


def _pid(agent):
    return os.getpid()


def test_an_agent_that_stands_still_is_not_waited_for(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "c", 3.0) == ["saved"] * 2
    pid = ray.get(group.agent.__ray_call__.remote(_pid), timeout=within(60))
    os.kill(pid, signal.SIGSTOP)
    try:
        loads = group.outcomes(load_columns, tmp_path / "c", 3.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [by["storage"] > 0 and "memory" not in by for by, _ in loads] == [True] * 2
    assert max(took_s for _, took_s in loads) < within(5)
    assert sources(group, tmp_path / "c", 3.0) == [{"memory"}] * 2


def test_an_agent_that_is_killed_leaves_the_storage(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "c", 4.0) == ["saved"] * 2
    ray.kill(group.agent)
    assert sources(group, tmp_path / "c", 4.0) == [{"storage"}] * 2
    assert group.outcomes(save_and_wait, tmp_path / "d", 4.0) == ["saved"] * 2
    assert sources(group, tmp_path / "d", 4.0) == [{"memory"}] * 2, "of another agent"


def _keeps_for_later(agent):
    return agent._agent.memory.is_for_later


def test_whoever_ends_the_group_has_agents_keep_nothing_for_it(group, tmp_path):
    def keeps():
        return ray.get(group.agent.__ray_call__.remote(_keeps_for_later), timeout=within(60))

    assert group.outcomes(save_and_wait, tmp_path / "c", 5.0) == ["saved"] * 2
    assert keeps()
    tell_agents_of_end(NAME)
    until(lambda: not keeps(), timeout_s=30)
    assert sources(group, tmp_path / "c", 5.0) == [{"memory"}] * 2
    assert keeps(), "it goes on"


def take_two_buffers(rank, world_size):
    """Need more memory than there is, as far as this process sees it, until agents have made room."""
    pool = dcp.current_group().background.buffers
    create, failures = SharedBuffer.create, []

    def create_the_third_time(nbytes):
        if len(failures) < 2:  # with room to grow on, and without
            failures.append(nbytes)
            raise StagingMemoryError(nbytes=nbytes, available_nbytes=0, reason="it would not fit")
        return create(nbytes)

    SharedBuffer.create = create_the_third_time
    try:
        pool.give_back(pool.take(2 * pool.nbytes))
    finally:
        SharedBuffer.create = create
    return len(failures)


def test_a_rank_that_has_no_memory_to_stage_in_gets_that_of_the_agent(group, tmp_path):
    assert group.outcomes(save_and_wait, tmp_path / "c", 6.0) == ["saved"] * 2
    assert sources(group, tmp_path / "c", 6.0) == [{"memory"}] * 2
    assert group.outcomes(take_two_buffers) == [2, 2]
    assert sources(group, tmp_path / "c", 6.0) == [{"storage"}] * 2
    assert group.outcomes(save_and_wait, tmp_path / "d", 7.0) == ["saved"] * 2
    assert sources(group, tmp_path / "d", 7.0) == [{"memory"}] * 2


def train(rank, world_size, root, last_step, dies):
    """Go on to ``last_step`` from whatever there is; the step that it went on from, and those that it has done.

    Rank 1 kills itself in the last one, before or after it is saved, where it ``dies``.
    """
    manager = dcp.CheckpointManager(root, memory_every=1, when_busy="wait")
    width = COLUMNS // world_size
    rows = torch.zeros(4, width)
    state = {"rows": dcp.LocalShards((4, COLUMNS), {(0, rank * width): rows}), "n": 0}
    went_on_from = manager.load(state) or 0
    assert (state["n"], rows.unique().tolist()) == (went_on_from, [went_on_from])
    step = went_on_from
    while step < last_step:
        step += 1
        rows.add_(1)
        state["n"] = step
        if dies == "before" and step == last_step and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if manager.due(step):
            try:
                response = manager.async_save(step, state)
            except dcp.CheckpointException:
                return went_on_from, step
            if step == went_on_from + 1:  # the agent is up by then
                response.exception(within(60))
        if dies == "after" and step == last_step and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.wait()
    return went_on_from, step


def test_a_rank_is_killed_with_memory_every_1_and_one_step_at_most_is_repeated(group, tmp_path):
    form(group, 2)
    done = 0
    for dies in ("before", "after", None):
        last_step = done + 4
        outcomes = group.start(train, tmp_path / "run", last_step, dies)
        if dies:
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(outcomes[1], timeout=within(120))
        went_on_from, step = ray.get(outcomes[0], timeout=within(120))
        assert done - went_on_from <= 1
        assert step == last_step
        done = step
        if dies:
            del group.actors[1]
            form(group, 2)
    assert not (tmp_path / "run").exists(), "nothing of it is in storage"


def leave(rank, world_size):
    dcp.current_group().close()


def test_nothing_is_kept_of_a_group_that_all_have_left(group, tmp_path):
    """The last one: its ranks have left then."""
    assert group.outcomes(save_and_wait, tmp_path / "c", 5.0) == ["saved"] * 2
    assert agents_of(NAME) == 1
    for actor in group.actors:
        ray.get(actor.do.remote(leave), timeout=within(60))
    assert group.outcomes(staging_buffers) == [set()] * 2
    until(lambda: agents_of(NAME) == 0, timeout_s=60)
