"""What Ray Train holds after ``ray_dcp.train.report``: the checkpoint or a pointer, and what a run resumes from."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import ray_dcp as dcp
from ray_dcp.cluster.train_context import ray_num_to_keep, train_group_spec
from ray_dcp.format.names import METADATA, POINTER
from ray_dcp.train import CheckpointCallback, checkpoint_id_of, report
from ray_dcp.write.writer import StoreWriter

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class BrokenCallback(CheckpointCallback):
    """Whatever its hooks look at raises."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("_is_elastic", "_group_nodes", "_known_nodes", "_requester_id", "_looked_for_nodes_at"):
            raise RuntimeError(f"{name} is broken on purpose")
        return super().__getattribute__(name)


def trainer(
    loop: Any,
    config: dict[str, Any],
    *,
    name: str,
    folder: Path,
    callback: CheckpointCallback,
    num_workers: Any = (1, 2),
) -> TorchTrainer:
    return TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            callbacks=[callback],
        ),
    )


def save_and_report(config: dict[str, Any]) -> dict[str, Any]:
    """Save and report steps to the last one; the first time, the last rank fails after the step it is told."""
    torch.set_num_threads(1)
    spec = train_group_spec()
    assert spec is not None
    seen = {"spec": (spec.group, spec.rank, spec.world_size, spec.incarnation), "num_to_keep": ray_num_to_keep()}
    manager = dcp.CheckpointManager(config["root"])
    state = {"weight": torch.zeros(8), "step": 0}
    resumed = manager.load(state)
    known = ray.train.get_checkpoint()
    seen |= {"resumed": resumed, "known": known and checkpoint_id_of(known), "weight": state["weight"].tolist()}
    if resumed is not None:
        # What a run does that reports after every load. It must not be listed twice.
        report({"step": resumed}, checkpoint=manager.latest())
        assert manager.last_load is not None
        seen["places"] = {place for place, nbytes in manager.last_load.nbytes_by_place.items() if nbytes}
    (Path(config["notes"]) / f"{spec.incarnation}-{spec.rank}").touch()
    for step in range(state["step"] + 1, config["last"] + 1):
        manager.async_save(step, {"weight": torch.full((8,), float(step)), "step": step}).result(60)
        info = manager.latest()
        assert info is not None
        report({"step": step}, checkpoint=info)
        if step == config["fails_after"] and resumed is None and spec.rank == spec.world_size - 1:
            raise RuntimeError(f"rank {spec.rank} fails on purpose")
    manager.close()
    return seen


def notes_folder(folder: Path) -> Path:
    (folder / "notes").mkdir()
    return folder / "notes"


def committed_steps(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob(METADATA))


def test_a_checkpoint_of_the_run_is_reported_as_it_lies(ray_cluster: None, tmp_path: Path) -> None:
    notes = notes_folder(tmp_path)
    config = {"root": None, "notes": str(notes), "last": 4, "fails_after": 3}
    result = trainer(save_and_report, config, name="inside", folder=tmp_path, callback=BrokenCallback()).fit()

    seen = result.return_value
    # The run went on although every hook of its callback raised, and resumed from our newest checkpoint: Ray's may
    # lag behind by two.
    assert seen["resumed"] == 3
    assert seen["weight"] == [3.0] * 8
    assert seen["places"] == {"memory"}, "which the agent of the node has kept"
    assert seen["num_to_keep"] == 2
    assert Path(seen["known"]).parent == tmp_path / "inside"
    # Two groups of two ranks, each with one token of its own.
    tokens = sorted(note.name.rpartition("-")[::2] for note in notes.iterdir())
    assert [rank for _, rank in tokens] == ["0", "1", "0", "1"]
    assert len({token for token, _ in tokens}) == 2
    assert seen["spec"][3] in {token for token, _ in tokens}
    assert seen["spec"][0].startswith("train-inside-")

    assert result.checkpoint is not None
    assert result.checkpoint.path == str(tmp_path / "inside" / "step-00000004")
    assert checkpoint_id_of(result.checkpoint) == result.checkpoint.path
    restored = {"weight": torch.zeros(8), "step": 0}
    dcp.load(restored, checkpoint_id=checkpoint_id_of(result.checkpoint), no_dist=True)
    assert restored["step"] == 4
    # Ray's num_to_keep has deleted the others, and no folder was listed twice or is missing.
    listed = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    assert listed == [str(tmp_path / "inside" / f"step-0000000{step}") for step in (3, 4)]
    assert set(committed_steps(tmp_path / "inside")) >= {"step-00000003", "step-00000004"}


class SlowWriter(StoreWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(1.0)
        return super().write_data(plan, planner)


def save_elsewhere_and_fail_in_a_save(config: dict[str, Any]) -> dict[str, Any]:
    """Save and report two steps, and fail while a third is saved in the background; go on with a fourth."""
    manager = dcp.CheckpointManager(config["root"])
    resumed = manager.load({"value": torch.zeros(4)})
    known = ray.train.get_checkpoint()
    if resumed is None:
        for step in (1, 2):
            report({"step": step}, checkpoint=manager.save(step, {"value": torch.ones(4)}))
        writer = SlowWriter(manager.checkpoint_id(3), step=3, metrics=None)
        dcp.async_save({"value": torch.ones(4)}, storage_writer=writer)
        raise RuntimeError("broken on purpose")
    for step in (4, 5):
        report({"step": step}, checkpoint=manager.save(step, {"value": torch.ones(4)}))
    return {"resumed": resumed, "known": known and checkpoint_id_of(known)}


@dataclass(frozen=True)
class RunElsewhere:
    """A run whose checkpoints lie elsewhere than what Ray Train keeps of it."""

    result: ray.train.Result
    root: Path
    folder: Path


@pytest.fixture(scope="module")
def elsewhere(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> RunElsewhere:
    folder = tmp_path_factory.mktemp("pointed")
    loop, config = save_elsewhere_and_fail_in_a_save, {"root": str(folder / "elsewhere")}
    whole = CheckpointCallback(spare_packages=())
    run = trainer(loop, config, name="pointed", folder=folder, num_workers=1, callback=whole)
    return RunElsewhere(run.fit(), folder / "elsewhere", folder / "pointed")


def test_training_resumes_from_a_save_that_was_under_way_when_it_failed(elsewhere: RunElsewhere) -> None:
    assert elsewhere.result.error is None
    assert elsewhere.result.return_value["resumed"] == 3
    assert committed_steps(elsewhere.root) == [f"step-0000000{step}" for step in (1, 2, 3, 4, 5)]


def test_a_checkpoint_elsewhere_is_reported_as_a_pointer(elsewhere: RunElsewhere) -> None:
    result, root = elsewhere.result, elsewhere.root
    # It failed on the way, and what Ray knew then were pointers, of which the last may have been on its way.
    assert result.return_value["known"] in [str(root / f"step-0000000{step}") for step in (1, 2)]
    assert result.checkpoint is not None
    assert os.listdir(result.checkpoint.path) == [POINTER]
    assert Path(result.checkpoint.path).parent == elsewhere.folder
    assert checkpoint_id_of(result.checkpoint) == str(root / "step-00000005")
    # Ray has deleted pointers, and none of what they pointed at.
    assert len(list(elsewhere.folder.rglob(POINTER))) == 2
    assert committed_steps(root) == [f"step-0000000{step}" for step in (1, 2, 3, 4, 5)]
