"""``CheckpointManager``: steps under a root, alone and over several ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import ConfigError, NotAFolderError
from ray_dcp.format.names import POINTER, encode_pointer
from tests.ranks import ThreadGroup, ThreadRanks


def state(value: float = float("nan")):
    return {"w": torch.full((4,), value), "step": 0}


def test_steps_are_saved_listed_and_loaded(tmp_path):
    manager = dcp.CheckpointManager(tmp_path / "run")
    assert manager.latest() is None
    assert manager.list() == []
    assert manager.load(state()) is None
    for step in (10, 20):
        info = manager.save(
            step,
            {"w": torch.full((4,), float(step)), "step": step},
            metrics={"loss": torch.tensor(1.0 / step, dtype=torch.float64)},
        )
        assert (info.step, info.world_size, info.metrics) == (step, 1, {"loss": 1.0 / step})
        assert info.checkpoint_id == str(tmp_path / "run" / f"step-000000{step}")
        assert info.nbytes > 16
    assert [info.step for info in manager.list()] == [10, 20]
    assert manager.latest() == manager.list()[-1]
    newest, older = state(), state()
    assert manager.load(newest) == 20
    assert manager.load(older, step=10) == 10
    assert (newest["step"], older["step"], newest["w"][0].item(), older["w"][0].item()) == (20, 10, 20.0, 10.0)


def test_a_load_takes_the_options_of_a_load_and_its_report_is_kept(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    manager.save(1, {"module.w": torch.ones(2), "n": 5, "more": 1})
    state = {"w": torch.zeros(2, dtype=torch.float64), "n": 0, "absent": 0, "loader": {}}
    assert manager.last_load is None
    options = {"strict": False, "cast": True, "skip": "n", "rename": {r"^module\.": ""}}
    assert manager.load(state, **options) == 1
    report = manager.last_load
    assert (report.loaded, report.missing, report.unexpected) == (("w",), ("absent", "loader"), ("more",))
    assert (state["w"].tolist(), state["n"]) == ([1, 1], 0)
    with pytest.raises(dcp.CheckpointException):
        manager.load(state, only="w")
    assert manager.last_load is None
    planner = DefaultLoadPlanner()
    manager.load({"n": 0}, only="n", planner=planner)
    assert (manager.last_load.loaded, list(planner.state_dict)) == (("n",), ["n"])


EVERY_LOOK = {
    "load": lambda manager: manager.load(state()),
    "load of a step": lambda manager: manager.load(state(), step=7),
    "save": lambda manager: manager.save(1, state(0.0)),
    "asynchronous save": lambda manager: manager.async_save(1, state(0.0)),
    "list": lambda manager: manager.list(),
    "latest": lambda manager: manager.latest(),
}


@pytest.mark.parametrize("look", EVERY_LOOK)
@pytest.mark.parametrize("kind", ["a step", "a checkpoint", "a pointer", "a model"])
def test_a_root_that_is_itself_a_checkpoint_is_refused_with_what_to_pass(tmp_path, kind, look):
    place = tmp_path / "run" / ("step-00000007" if kind == "a step" else "final")
    if kind == "a model":
        place.mkdir(parents=True)
        save_file({"w": torch.ones(4)}, place / "model-00001-of-00001.safetensors")
    elif kind == "a pointer":
        place.mkdir(parents=True)
        (place / POINTER).write_bytes(encode_pointer(str(tmp_path / "elsewhere")))
    else:
        dcp.save(state(1.0), checkpoint_id=place)
    before = sorted(place.rglob("*"))
    with pytest.raises((CheckpointException, ConfigError)) as caught:
        EVERY_LOOK[look](dcp.CheckpointManager(place))
    assert isinstance(caught.value, ValueError)
    message = str(caught.value).splitlines()[0]
    assert f"root: {place} " in message
    assert f"dcp.load(state, checkpoint_id={str(place)!r})" in message
    assert ("holds a model" if kind == "a model" else "is itself a checkpoint") in message
    assert (f"pass the folder above, {tmp_path / 'run'}" in message) == (kind == "a step")
    assert sorted(place.rglob("*")) == before


def test_every_rank_hears_that_the_root_is_a_checkpoint(tmp_path):
    dcp.save(state(1.0), checkpoint_id=tmp_path)
    for look in (lambda m: m.save(1, state(0.0)), lambda m: m.load(state())):
        ranks = ThreadRanks(2)
        managers = [dcp.CheckpointManager(tmp_path, group=ThreadGroup(ranks, rank)) for rank in range(2)]
        outcomes = ranks.run(lambda rank, look=look, managers=managers: look(managers[rank]))
        assert all("is itself a checkpoint" in str(outcome) for outcome in outcomes), outcomes


def test_a_root_with_steps_may_hold_other_things_besides(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    manager.save(1, state(1.0))
    dcp.save(state(2.0), checkpoint_id=tmp_path)
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    manager = dcp.CheckpointManager(tmp_path)
    manager.save(2, state(2.0))
    assert manager.load(state()) == 2
    assert len(manager.list()) == 2


def test_a_file_where_the_root_should_be_is_named(tmp_path):
    (tmp_path / "afile").touch()
    manager = dcp.CheckpointManager(tmp_path / "afile")
    for look in EVERY_LOOK.values():
        with pytest.raises((CheckpointException, NotAFolderError), match=f"{tmp_path}/afile is a file, give a folder"):
            look(manager)


def test_an_asynchronous_save_becomes_the_newest_when_it_is_committed(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(4), "step": 1})
    manager.async_save(2, {"w": torch.full((4,), 2.0), "step": 2})
    manager.wait()
    loaded = state()
    assert manager.load(loaded) == 2
    assert loaded["step"] == 2
    manager.close()


def test_what_is_not_whole_is_not_the_newest(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"w": torch.full((4,), float(step)), "step": step})
    (tmp_path / "step-00000003" / ".metadata").unlink()
    (shard,) = (tmp_path / "step-00000002").glob("*.distcp")
    shard.unlink()
    loaded = state()
    assert manager.load(loaded) == 1
    assert loaded["step"] == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    for value in (1.0, 2.0):
        manager.save(5, {"w": torch.full((4,), value), "step": int(value)})
    loaded = state()
    assert manager.load(loaded) == 5
    assert loaded["step"] == 2
    assert [info.step for info in manager.list()] == [5]


def test_a_step_that_is_not_there(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointException, match="step-00000007"):
        manager.load(state(), step=7)


def test_a_bad_step_or_root_is_refused(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    for step in (-1, 1.5, "3", True):
        with pytest.raises(ConfigError, match="step"):
            manager.save(step, state(0.0))
    with pytest.raises(ConfigError, match="root"):
        dcp.CheckpointManager()
    assert list(tmp_path.iterdir()) == []


def test_it_works_on_a_memory_store():
    manager = dcp.CheckpointManager("memory://manager-test/run")
    manager.save(3, {"w": torch.ones(4), "step": 3})
    loaded = state()
    assert manager.load(loaded) == 3
    assert loaded["w"].tolist() == [1.0] * 4


def _save_and_load(rank, world_size, root):
    import ray_dcp.catalog.newest
    import ray_dcp.manager

    manager = dcp.CheckpointManager(root)
    shards = dcp.LocalShards((2 * world_size,), {(2 * rank,): torch.full((2,), float(rank))})
    infos = [manager.save(step, {"w": shards, "step": step}) for step in (1, 2)]

    def blind(root):
        raise AssertionError("a rank looks for the newest step by itself")

    sighted, ray_dcp.catalog.newest.latest_checkpoint = ray_dcp.catalog.newest.latest_checkpoint, blind
    template = {"w": dcp.LocalShards((2 * world_size,), {(2 * rank,): torch.zeros(2)}), "step": 0}
    try:
        step = manager.load(template)
    finally:
        ray_dcp.catalog.newest.latest_checkpoint = sighted
    return step, template["step"], template["w"].chunks[2 * rank,].tolist(), [info.step for info in infos]


@pytest.mark.ray
def test_all_ranks_load_the_one_step_that_was_looked_up_once(ranks, tmp_path):
    assert ranks.ok(3, _save_and_load, tmp_path) == [(2, 2, [float(rank)] * 2, [1, 2]) for rank in range(3)]


def test_metrics_that_are_no_json_are_refused_before_anything_is_written(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    with pytest.raises(ConfigError, match="metrics"):
        manager.save(1, state(0.0), metrics={"loss": torch.ones(2)})
    assert list(tmp_path.iterdir()) == []
