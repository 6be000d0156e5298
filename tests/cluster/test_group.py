"""Groups of real actors: joining, failing, re-forming, ending."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import GroupError, JoinTimeoutError, OutOfStepError, RankConflictError, StaleGenerationError
from ray_dcp.write.writer import StoreWriter
from tests.actors import RankActor, SharedRanks
from tests.slack import within

pytestmark = pytest.mark.ray


def ray_dcp_actors() -> list[str]:
    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "ray_dcp"]


def until(condition, timeout_s: float) -> float:
    """Seconds until ``condition()`` holds; fails the test after ``timeout_s``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within(timeout_s), "did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - start


# Three tests are in this group one after the other: each name has a coordinator, which is a process.
def join(name, rank, world_size, timeout_s=60.0):
    group = dcp.RankGroup.join(name, rank=rank, world_size=world_size, timeout_s=timeout_s)
    return group.generation


@pytest.fixture(scope="module")
def mortals(ray_session):
    """Actors that a test may kill; those that are left are the next test's."""
    own = SharedRanks()
    yield own
    own.forget()


def test_a_rank_that_never_joins_is_named(ranks):
    actors = ranks.actors(2)
    outcomes = ray.get([actors[r].call.remote(join, "short-lived", r, 4, 1.0) for r in (0, 1)])
    for outcome in outcomes:
        assert isinstance(outcome, JoinTimeoutError)
        assert set(outcome.missing_ranks) >= {2, 3}
        assert outcome.timeout_s == 1.0


def test_two_ranks_joining_with_one_number(ranks):
    actors = ranks.actors(2)
    outcomes = ray.get([actor.call.remote(join, "short-lived", 0, 2, 2.0) for actor in actors])
    conflict = next(outcome for outcome in outcomes if isinstance(outcome, RankConflictError))
    assert conflict.rank == 0
    assert "two processes join as rank 0" in str(conflict)
    assert any(isinstance(outcome, JoinTimeoutError) for outcome in outcomes)


def generation_of(rank, world_size):
    dcp.current_group().barrier()
    return dcp.current_group().generation, dcp.current_group().rank, dcp.current_group().world_size


def test_ranks_gather_at_a_barrier(ranks):
    assert ranks.ok(3, generation_of) == [(1, rank, 3) for rank in range(3)]


def test_a_new_set_of_ranks_makes_a_new_generation_and_the_old_is_refused(ranks, mortals):
    ranks.ok(2, generation_of, name="re-forming")
    assert mortals.ok(2, generation_of, name="re-forming") == [(2, 0, 2), (2, 1, 2)]
    for outcome in ranks.run(2, generation_of, name="re-forming"):
        assert isinstance(outcome, CheckpointException)
        assert isinstance(outcome.__cause__, StaleGenerationError)
        assert (outcome.__cause__.generation, outcome.__cause__.current) == (1, 2)


def save_or_die(rank, world_size, place, victim):
    if rank == victim:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    try:
        dcp.save({f"w{rank}": torch.ones(3)}, checkpoint_id=place)
    except CheckpointException as error:
        return error.failed_ranks, time.monotonic() - start
    return None


def test_a_killed_rank_ends_the_save_of_the_others_who_go_on_as_a_smaller_group(mortals, tmp_path):
    mortals.ok(3, generation_of, name="mortal")
    actors = mortals.actors(3)
    calls = [a.run.remote(r, 3, "mortal", save_or_die, tmp_path / "c", 1) for r, a in enumerate(actors)]
    for survivor in (0, 2):
        failed_ranks, waited_s = ray.get(calls[survivor], timeout=within(60))
        assert failed_ranks == (1,)
        assert waited_s < within(5)
    assert not (tmp_path / "c").exists() or ".metadata" not in os.listdir(tmp_path / "c")
    mortals.bury(actors[1])
    smaller = mortals.actors(2)
    calls = [a.run.remote(r, 2, "mortal", save_or_die, tmp_path / "d", None) for r, a in enumerate(smaller)]
    assert ray.get(calls, timeout=within(60)) == [None, None]
    state = {"w0": torch.zeros(3), "w1": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path / "d", no_dist=True)
    assert state["w0"].tolist() == state["w1"].tolist() == [1.0] * 3


def raise_in_state_dict(rank, world_size, place, guilty):
    class Stubborn:
        def state_dict(self):
            if rank == guilty:
                raise ValueError("no state today")
            return {"w": torch.ones(2)}

        def load_state_dict(self, state):
            raise AssertionError("not loaded here")

    start = time.monotonic()
    try:
        dcp.save({"s": Stubborn()}, checkpoint_id=place)
    except CheckpointException as error:
        return error.failed_ranks, error.phase, type(error.__cause__).__name__, time.monotonic() - start
    return None


def test_one_ranks_exception_reaches_all_by_name_and_the_next_save_works(ranks, tmp_path):
    for failed_ranks, phase, cause, waited_s in ranks.ok(3, raise_in_state_dict, tmp_path / "c", 2):
        assert (failed_ranks, phase, cause) == ((2,), "collect", "ValueError")
        assert waited_s < within(5)
    assert ranks.ok(3, raise_in_state_dict, tmp_path / "c", None) == [None] * 3


def forget_a_save(rank, world_size, root, forgetful):
    """Each save that this rank makes: its metadata's type, or with what it failed and how long it was in it."""
    outcomes = []
    for step in (1, 2, 3):
        if (rank, step) == (forgetful, 1):
            continue
        start = time.monotonic()
        try:
            dcp.save({f"w{rank}": torch.full((3,), float(step))}, checkpoint_id=f"{root}/step-{step}")
            outcomes.append("saved")
        except CheckpointException as error:
            outcomes.append((error.__cause__, time.monotonic() - start))
    return outcomes


def test_a_rank_that_forgets_a_save_is_named_at_once_and_the_next_save_works(ranks, tmp_path):
    ranks.ok(2, generation_of)
    (first, second, third), (ahead, met) = ranks.ok(2, forget_a_save, tmp_path, 1)
    for error, waited_s in (first, second, ahead):
        assert isinstance(error, OutOfStepError)
        assert waited_s < within(5)
        # Whoever comes later is the one that is named: which of the two that is, the machine decides.
        calls = {0: f"save of {tmp_path}/step-1", 1: f"save of {tmp_path}/step-2"}
        assert (error.call, error.others_call) == (calls[error.rank], calls[1 - error.rank])
        assert str(error) == str(first[0])
    assert third == met == "saved"
    state = {"w0": torch.full((3,), torch.nan), "w1": torch.full((3,), torch.nan)}
    dcp.load(state, checkpoint_id=tmp_path / "step-3", no_dist=True)
    assert state["w0"].tolist() == state["w1"].tolist() == [3.0] * 3


def test_a_checkpoint_exception_crosses_ray_with_its_facts(ranks, tmp_path):
    outcomes = ranks.run(2, lambda rank, n: dcp.load({"w": torch.zeros(1)}, checkpoint_id=tmp_path / "none"))
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException)
        assert outcome.checkpoint_id == str(tmp_path / "none")
        assert type(outcome.__cause__).__name__ == "CheckpointNotFoundError"


def async_failure(rank, world_size, place):
    """Rank 1's background write fails; nobody awaits it."""
    from ray_dcp.write.writer import StoreWriter

    class Broken(StoreWriter):
        def write_data(self, plan, planner):
            if rank == 1:
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    dcp.async_save({f"w{rank}": torch.ones(2)}, storage_writer=Broken(place))
    messages = []
    for attempt in range(2):
        try:
            dcp.save({f"w{rank}": torch.ones(2)}, checkpoint_id=f"{place}-{attempt}")
            messages.append("saved")
        except CheckpointException as error:
            messages.append("No space left" in str(error))
    return messages


def test_an_asynchronous_failure_of_one_rank_is_raised_on_all_by_the_next_call(ranks, tmp_path):
    assert ranks.ok(2, async_failure, tmp_path / "c") == [[True, "saved"]] * 2


def pid_of_coordinator(name):
    coordinator = ray.get_actor(f"coordinator/{name}", namespace="ray_dcp")
    return ray.get(coordinator.__ray_call__.remote(lambda self: os.getpid()), timeout=within(30))


def test_a_wait_outlives_the_coordinator_whose_process_or_actor_is_killed(ranks):
    group = "headless"
    ranks.ok(2, generation_of, name=group)
    actors = ranks.actors(2)
    for kill in (
        lambda: os.kill(pid_of_coordinator(group), 9),
        lambda: ray.kill(ray.get_actor(f"coordinator/{group}", namespace="ray_dcp")),  # for good
    ):
        waiting = actors[0].run.remote(0, 2, group, generation_of)
        kill()
        late = actors[1].run.remote(1, 2, group, generation_of)
        assert ray.get([waiting, late], timeout=within(60)) == [(1, 0, 2), (1, 1, 2)]


def test_a_rank_that_dies_while_the_coordinator_starts_again_is_noticed(mortals):
    mortals.ok(2, generation_of, name="mortal")
    actors = mortals.actors(2)
    waiting = actors[0].run.remote(0, 2, "mortal", generation_of)
    os.kill(pid_of_coordinator("mortal"), 9)
    ray.kill(actors[1])
    mortals.bury(actors[1])
    error = ray.get(waiting, timeout=within(60))
    assert isinstance(error, CheckpointException)
    assert error.failed_ranks == (1,)


def is_up(actor) -> bool:
    """Ray gives up what is sent to an actor while it starts it again."""
    with suppress(ActorUnavailableError):
        return bool(ray.get(actor.call.remote(os.getpid), timeout=within(60)))
    return False


def test_an_actor_that_ray_starts_again_is_not_the_rank_that_joined(ranks):
    reborn = RankActor.options(max_restarts=-1).remote()
    (other,) = ranks.actors(1)
    calls = [a.run.remote(r, 2, "reborn", generation_of) for r, a in enumerate([other, reborn])]
    assert [outcome[0] for outcome in ray.get(calls, timeout=within(60))] == [1, 1]
    waiting = other.run.remote(0, 2, "reborn", generation_of)
    ray.kill(reborn, no_restart=False)
    until(lambda: is_up(reborn), timeout_s=60)  # it is there again, and in no group
    error = ray.get(waiting, timeout=within(60))
    assert isinstance(error, CheckpointException)
    assert error.failed_ranks == (1,)
    ray.kill(reborn)


def close_after_barrier(name, rank, world_size):
    with dcp.RankGroup.join(name, rank=rank, world_size=world_size) as group:
        assert dcp.current_group() is group
        group.barrier()
    group.close()
    group.close()
    try:
        group.barrier()
    except GroupError as error:
        return "closed" in str(error) and dcp.current_group() is None
    return False


class SlowWriter(StoreWriter):
    def write_data(self, plan, planner):
        time.sleep(1)
        return super().write_data(plan, planner)


@ray.remote(num_cpus=0.1)
class EndsByItself:
    """An actor of a user's own, whose stderr is a file."""

    def __init__(self, folder) -> None:
        self.group = dcp.RankGroup.join(f"of-{folder.name}", rank=0, world_size=1)
        self.folder = folder

    def save_and_end(self, how) -> None:
        sys.stderr = open(self.folder / "stderr", "w")  # noqa: SIM115 - for the rest of its life
        self.response = dcp.async_save({"a": torch.ones(2)}, storage_writer=SlowWriter(self.folder / "saved"))
        how()

    def __ray_shutdown__(self) -> None:
        (self.folder / "ended").touch()


# Pools have it the other way round: there it is the handle that is dropped by day.
@pytest.mark.parametrize(
    "how", [sys.exit, pytest.param(lambda: None, marks=pytest.mark.soak)], ids=["exit", "handle dropped"]
)
def test_an_actor_that_ends_by_itself_says_what_became_of_its_save_and_leaves_no_files(ray_session, tmp_path, how):
    actor = EndsByItself.remote(tmp_path)
    ended = actor.save_and_end.remote(how)
    del actor
    ray.wait([ended])
    until((tmp_path / "ended").exists, 30)  # the user's own hook comes after ours
    text = (tmp_path / "stderr").read_text()
    assert "an asynchronous save failed, and nobody had asked" in text
    assert "RankLostError" in text
    assert not list((tmp_path / "saved").glob("*"))


def test_the_coordinator_ends_with_the_last_rank_that_closes(ranks):
    actors = ranks.actors(2)
    outcomes = ray.get([a.call.remote(close_after_barrier, "short-lived", r, 2) for r, a in enumerate(actors)])
    assert outcomes == [True, True]
    until(lambda: "coordinator/short-lived" not in ray_dcp_actors(), timeout_s=10)


def test_the_coordinator_ends_when_all_its_ranks_have_died_and_the_next_group_has_a_later_generation(mortals, ranks):
    mortals.ok(2, generation_of, name="doomed")
    assert "coordinator/doomed" in ray_dcp_actors()
    mortals.forget()
    until(lambda: "coordinator/doomed" not in ray_dcp_actors(), timeout_s=30)
    assert ranks.ok(2, generation_of, name="doomed") == [(2, 0, 2), (2, 1, 2)]


def test_joining_checks_its_arguments(ray_session):
    for arguments, setting in (
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
        ({"rank": 0, "world_size": 1, "timeout_s": 0}, "timeout_s"),
    ):
        with pytest.raises(ValueError, match=setting):
            dcp.RankGroup.join("g", **arguments)


def test_one_process_alone_is_no_group():
    assert dcp.current_group() is None
