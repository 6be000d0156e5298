"""``RankPool``: as many ranks as fit, lost ranks by number, re-forming."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch

import ray_dcp as dcp
from ray_dcp.errors import (
    ConfigError,
    EarlierSaveError,
    GroupError,
    NotEnoughResourcesError,
    RankLostError,
    UnfinishedSavesError,
)
from tests.cluster.test_group import ray_dcp_actors, until
from tests.slack import within

pytestmark = pytest.mark.ray

SMALL = {"CPU": 0.1}
MOST = {"CPU": 9}
"""More than half of what the cluster has: whoever asks for it as well waits until it is given back."""


class Holder:
    """A rank of a pool."""

    def __init__(self, scale=1, *, fail_on=None):
        group = dcp.current_group()
        if group.rank == fail_on:
            raise ValueError("no such device")
        self.rank, self.world_size, self.generation = group.rank, group.world_size, group.generation
        self.rows = torch.full((2, 3), float(scale * self.rank))

    def place(self):
        return self.rank, self.world_size, self.generation

    def value(self):
        return self.rows[0, 0].item()

    def save(self, checkpoint_id):
        shards = dcp.LocalShards((2 * self.world_size, 3), {(2 * self.rank, 0): self.rows})
        dcp.save({"rows": shards}, checkpoint_id=checkpoint_id)

    def die_while_others_save(self, checkpoint_id, victims):
        if self.rank in victims:
            os.kill(os.getpid(), 9)
        self.save(checkpoint_id)

    def save_behind(self, checkpoint_id, gate, fails_on=None):
        """Written once the file ``gate`` is there."""

        class Gated(dcp.StoreWriter):
            def write_data(writer, plan, planner):
                while not os.path.exists(gate):
                    time.sleep(0.02)
                if self.rank == fails_on:
                    raise OSError(28, "No space left on device")
                return super().write_data(plan, planner)

        shards = dcp.LocalShards((2 * self.world_size, 3), {(2 * self.rank, 0): self.rows})
        dcp.async_save({"rows": shards}, storage_writer=Gated(checkpoint_id))

    def be_busy(self):
        time.sleep(600)

    def raise_on(self, rank):
        if rank == self.rank:
            raise KeyError("rank's own mistake")
        return self.rank


@pytest.fixture(scope="module")
def pool(ray_session):
    pool = dcp.RankPool(Holder, 2, name="holders", max_ranks=3, resources_per_rank=SMALL)
    pool.start()
    yield pool
    pool.shutdown()
    until(lambda: "coordinator/holders" not in ray_dcp_actors(), timeout_s=10)


def test_ranks_know_their_place_and_answer_in_rank_order(pool):
    assert pool.world_size == 3
    assert [place[:2] for place in pool.run("place")] == [(0, 3), (1, 3), (2, 3)]


def test_what_a_rank_raises_is_raised(pool):
    with pytest.raises(KeyError, match="own mistake"):
        pool.run("raise_on", 1)
    assert pool.run("raise_on", None) == [0, 1, 2]


def test_starting_twice_is_refused(pool):
    with pytest.raises(GroupError, match="restart"):
        pool.start()


def test_lost_ranks_are_named_and_a_restart_makes_a_new_generation(pool, tmp_path):
    pool.run("save", tmp_path / "before")
    (generation,) = {place[2] for place in pool.run("place")}
    with pytest.raises(RankLostError) as caught:
        pool.run("die_while_others_save", tmp_path / "c", (0, 2))
    assert set(caught.value.lost) == {0, 2}
    assert not (tmp_path / "c" / ".metadata").exists()
    pool.max_ranks = 2
    assert pool.restart() == 2
    assert pool.run("place") == [(0, 2, generation + 1), (1, 2, generation + 1)]
    pool.run("save", tmp_path / "c")
    whole = {"rows": torch.zeros(4, 3)}
    dcp.load(whole, checkpoint_id=tmp_path / "c", no_dist=True)
    assert whole["rows"][:, 0].tolist() == [0.0, 0.0, 2.0, 2.0]


def test_more_than_fits_is_refused_with_what_fits(ray_session):
    pool = dcp.RankPool(Holder, name="greedy", min_ranks=3, resources_per_rank={"CPU": 7})
    with pytest.raises(NotEnoughResourcesError) as caught:
        pool.start()
    assert caught.value.fit < 3
    pool.shutdown()
    assert "coordinator/greedy" not in ray_dcp_actors()


def test_a_constructor_that_raises_leaves_nothing_behind(ray_session):
    pool = dcp.RankPool(Holder, fail_on=1, name="broken", max_ranks=2, resources_per_rank=SMALL)
    with pytest.raises(ValueError, match="no such device"):
        pool.start()
    assert pool.world_size == 0
    until(lambda: "coordinator/broken" not in ray_dcp_actors(), timeout_s=30)


def test_a_second_pool_of_one_name_takes_over_and_the_first_one_cannot_end_it(ray_session, tmp_path):
    first = dcp.RankPool(Holder, name="namesake", max_ranks=1, resources_per_rank=MOST)
    second = dcp.RankPool(ray.remote(Holder), name="namesake", max_ranks=1, resources_per_rank=SMALL)
    first.start()
    second.start()
    assert (first.run("place"), second.run("place")) == ([(0, 1, 1)], [(0, 1, 2)])
    with pytest.raises(dcp.CheckpointException, match="generation 1, the group is at 2"):
        first.run("save", tmp_path / "first")
    first.shutdown()
    second.run("save", tmp_path / "second")
    second.shutdown()
    until(lambda: "coordinator/namesake" not in ray_dcp_actors(), timeout_s=10)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"min_ranks": 0}, "min_ranks"),
        ({"min_ranks": 3, "max_ranks": 2}, "min_ranks"),
        ({"resources_per_rank": {}}, "resources_per_rank"),
        ({"resources_per_rank": {"CPU": -1}}, "resources_per_rank"),
    ],
)
def test_bad_settings_are_refused_when_made(arguments, setting):
    with pytest.raises(ConfigError, match=setting):
        dcp.RankPool(Holder, **arguments)


# So many ranks have most of the cluster's CPUs; each is a process. By day two pools of other tests have MOST of them.
@pytest.mark.soak
def test_a_restart_and_another_pool_have_what_the_ranks_before_had(ray_session):
    for name in ("former", "latter"):
        with dcp.RankPool(Holder, name=name, max_ranks=3, resources_per_rank={"CPU": 5}) as pool:
            assert pool.world_size == 3
            if name == "former":
                assert [pool.restart() for _ in range(3)] == [3] * 3


def first_rows(place):
    whole = {"rows": torch.full((4, 3), float("nan"))}
    dcp.load(whole, checkpoint_id=place, no_dist=True)
    return whole["rows"][:, 0].tolist()


# The last one that the tests' pool is for.
def test_saves_under_way_are_finished_before_the_ranks_end_and_a_failure_is_raised(pool, tmp_path):
    gate = tmp_path / "gate"
    if pool.world_size != 2:
        pool.max_ranks = 2
        pool.restart()
    before = [value for value in pool.run("value") for _ in range(2)]
    pool.run("save_behind", tmp_path / "a", gate)
    busy = [actor.be_busy.remote() for actor in pool.actors]  # so that no rank can say what it is about
    threading.Timer(0.5, gate.touch).start()
    assert (pool.restart(), len(busy)) == (2, 2)
    assert first_rows(tmp_path / "a") == before
    after = [value for value in pool.run("value") for _ in range(2)]
    pool.run("save_behind", tmp_path / "b", gate)
    pool.run("save_behind", tmp_path / "failed", gate, fails_on=1)
    with pytest.raises(EarlierSaveError, match=r"this shutdown has succeeded.*failed.*No space left") as caught:
        pool.shutdown()
    assert (pool.world_size, caught.value.failed_ranks) == (0, (1,))
    assert first_rows(tmp_path / "b") == after


def test_saves_that_take_too_long_are_named_and_do_not_hide_the_blocks_own_error(ray_session, tmp_path, caplog):
    limits = dcp.Limits(finish_timeout_s=0.5)
    pool = dcp.RankPool(Holder, name="cut-off", max_ranks=1, resources_per_rank=MOST, limits=limits)

    def block():
        with pool:
            pool.run("save_behind", tmp_path / "a", tmp_path / "never")
            with pytest.raises(UnfinishedSavesError, match="finish_timeout_s") as caught:
                pool.restart()
            assert set(caught.value.unfinished) == {0}
            assert str(tmp_path / "a") in caught.value.unfinished[0]
            (tmp_path / "gate").touch()
            pool.run("save_behind", tmp_path / "failed", tmp_path / "gate", fails_on=0)
            raise KeyError("own mistake")

    with pytest.raises(KeyError, match="own mistake"), caplog.at_level(logging.ERROR):
        block()
    assert "No space left" in caplog.text
    assert not (tmp_path / "a" / ".metadata").exists()


LEAVES_RAY_FIRST = """
import sys, ray
import ray_dcp as dcp
from tests.test_pool import SMALL, Holder
ray.init(address=sys.argv[1], log_to_driver=False)
with dcp.RankPool(Holder, name=sys.argv[3], max_ranks=1, resources_per_rank=SMALL) as pool:
    pool.run("save_behind", sys.argv[2], sys.argv[2] + "-never")
    ray.shutdown()
    try:
        pool.run("place")
    except dcp.errors.GroupError as error:
        print(error)
    if "again" in sys.argv:
        ray.init(address=sys.argv[1], log_to_driver=False)
        print(pool.restart(), pool.run("place"))
print("connected:", ray.is_initialized())
"""


@pytest.mark.parametrize(
    "again", [pytest.param([], marks=pytest.mark.soak), ["again"]], ids=["left", "connected again"]
)
def test_a_pool_whose_ranks_ray_shutdown_has_ended_says_so(ray_session, tmp_path, again):
    address = ray.get_runtime_context().gcs_address
    name = "-".join(["left-behind", *again])  # a group's generations go on where one of its name has ended
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_RAY_FIRST, address, str(tmp_path / "a"), name, *again],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=within(120),
    )
    assert ended.returncode == 0, ended.stderr
    started_anew = ["1 [(0, 1, 2)]"] if again else []
    assert ended.stdout.splitlines() == [
        f"group '{name}': ray.shutdown() has ended its ranks. Call restart()",
        *started_anew,
        f"connected: {bool(again)}",
    ]
    assert ended.stderr.count(f"pool '{name}': ray.shutdown() has ended its ranks") == 1
    assert "If an asynchronous save was under way it was cut off" in ended.stderr
    until(lambda: f"coordinator/{name}" not in ray_dcp_actors(), timeout_s=30)


@ray.remote(num_cpus=0.1)
class Owner:
    """An actor that has a pool of its own, and whose stderr is a file."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.pool = dcp.RankPool(Holder, name=f"of-{folder.name}", max_ranks=1, resources_per_rank=SMALL)
        self.pool.start()

    def save_and_end(self, how) -> None:
        sys.stderr = open(self.folder / "stderr", "w")  # noqa: SIM115 - for the rest of its life
        self.pool.run("save_behind", self.folder / "a", self.folder / "never")
        how()

    def __ray_shutdown__(self) -> None:
        (self.folder / "ended").touch()


@pytest.mark.parametrize(
    "how", [pytest.param(sys.exit, marks=pytest.mark.soak), lambda: None], ids=["exit", "handle dropped"]
)
def test_an_actor_that_ends_by_itself_says_what_becomes_of_the_saves_of_its_pool(ray_session, tmp_path, how):
    """Ray has ended its ranks by then."""
    owner = Owner.remote(tmp_path)
    ended = owner.save_and_end.remote(how)
    del owner
    ray.wait([ended])
    until((tmp_path / "ended").exists, 60)  # the user's own hook comes after ours
    assert (
        "all its ranks are lost. If an asynchronous save was under way it was cut off"
        in (tmp_path / "stderr").read_text()
    )
