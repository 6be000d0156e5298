"""What the workers of both sides run: one model, one loop, two ways to keep checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from ray.train.torch import get_device
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ray_dcp
from ray_dcp.train import report
from recovery_parts import timeline
from recovery_parts.events import note, process_started_at

TORCH = "torch"
RAY_DCP = "ray_dcp"
SIDES = (TORCH, RAY_DCP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the workers are told."""

    side: str
    events: str
    """Folder for the notes."""
    num_layers: int = 8
    width: int = 256
    batch: int = 16
    checkpoint_every: int = 20
    min_step_s: float = 0.1
    """A step takes at least this long: small as it is, the model stands for a larger one."""


class Trainee:
    """Model and optimizer; a DCP ``Stateful``."""

    def __init__(self, lesson: Lesson, device: torch.device, world_size: int) -> None:
        torch.manual_seed(0)
        self.step = 0
        self._batch = (lesson.batch, lesson.width)
        self._device = device
        self._world_size = world_size
        layers = [nn.Sequential(nn.Linear(lesson.width, lesson.width), nn.GELU()) for _ in range(lesson.num_layers)]
        self._model: nn.Module = nn.Sequential(*layers).to(device)
        if dist.is_initialized():
            mesh = init_device_mesh(device.type, (world_size,))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def train_one_step(self) -> None:
        inputs = torch.randn(self._batch, device=self._device)
        loss = (self._model(inputs) - inputs).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        if self._world_size > 1:
            # As loops do that log the mean loss: no rank is ahead of the others.
            dist.all_reduce(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


class Checkpoints(Protocol):
    """How a side keeps its checkpoints; every rank calls it."""

    def load_newest(self, trainee: Trainee) -> None: ...

    def save(self, trainee: Trainee) -> None: ...


class TorchCheckpoints:
    """As Ray Train's guide shows it: each rank saves to a folder of its own, which ``report`` copies to storage."""

    def load_newest(self, trainee: Trainee) -> None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                torch_dcp.load({"trainee": trainee}, checkpoint_id=folder)

    def save(self, trainee: Trainee) -> None:
        with tempfile.TemporaryDirectory() as folder:
            torch_dcp.save({"trainee": trainee}, checkpoint_id=folder)
            ray.train.report({"step": trainee.step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


class RayDcpCheckpoints:
    """As the README shows it."""

    def __init__(self) -> None:
        self._manager = ray_dcp.CheckpointManager()

    def load_newest(self, trainee: Trainee) -> None:
        self._manager.load({"trainee": trainee})

    def save(self, trainee: Trainee) -> None:
        saved = self._manager.save(trainee.step, {"trainee": trainee})
        report({"step": trainee.step}, checkpoint=saved)


def train(config: Mapping[str, Any]) -> None:
    """Train until somebody ends it; note what happens."""
    lesson: Lesson = config["lesson"]
    context = ray.train.get_context()
    who = {"rank": context.get_world_rank(), "world_size": context.get_world_size()}
    note(lesson.events, timeline.TRAINING, process_started=process_started_at(), **who)
    torch.set_num_threads(1)
    trainee = Trainee(lesson, get_device(), context.get_world_size())
    note(lesson.events, timeline.BUILT, **who)
    checkpoints: Checkpoints = TorchCheckpoints() if lesson.side == TORCH else RayDcpCheckpoints()
    checkpoints.load_newest(trainee)
    note(lesson.events, timeline.LOADED, step=trainee.step, **who)
    try:
        while True:
            _one_step(trainee, lesson, who)
            if trainee.step % lesson.checkpoint_every == 0:
                checkpoints.save(trainee)
    except BaseException as error:
        note(lesson.events, timeline.SURVIVOR_ERROR, error=repr(error)[:500], **who)
        raise


def _one_step(trainee: Trainee, lesson: Lesson, who: Mapping[str, int]) -> None:
    started = time.monotonic()
    trainee.train_one_step()
    note(lesson.events, timeline.STEP, step=trainee.step, **who)
    time.sleep(max(0.0, started + lesson.min_step_s - time.monotonic()))
