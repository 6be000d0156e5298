"""One learner: model, optimizer, learning-rate schedule and data position, and what one step does to them.

The uninterrupted reference and every rank of the elastic run use this same code; only sharding differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ray_dcp as dcp
from elastic.corpus import Windows, standard_library_bytes
from elastic.gpt import Gpt, GptShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is trained: the losses of a run follow from this alone, whatever happens to its workers."""

    seed: int = 0
    num_steps: int = 90
    sequences_per_step: int = 12
    """Shared out evenly, so it must be a multiple of every number of workers that may turn up."""
    peak_learning_rate: float = 2e-3
    num_warmup_steps: int = 10
    shape: GptShape = field(default_factory=GptShape)

    def learning_rate_factor(self, step: int) -> float:
        """Rise linearly, then fall along a half cosine to a tenth."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        progress = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class Learner:
    """Everything that changes with a step. ``state`` is the whole of it: what goes in a checkpoint, and comes back."""

    def __init__(self, course: Course, device: torch.device, *, rank: int = 0, world_size: int = 1) -> None:
        if course.sequences_per_step % world_size:
            raise ValueError(
                f"{course.sequences_per_step} sequences a step can't be shared out to {world_size} workers"
            )
        self.course = course
        self._device = device
        self._world_size = world_size
        self._windows = Windows(standard_library_bytes(), course.shape.context)
        torch.manual_seed(course.seed)  # on all workers alike: they make the same model
        self._model: torch.nn.Module = Gpt(course.shape).to(device)
        if dist.is_initialized():
            mesh = init_device_mesh(device.type, (world_size,))
            for block in self._model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self._model, mesh=mesh)
        torch.manual_seed(course.seed * 1_000_003 + rank + 1)  # from here on each drops out values of its own
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=course.peak_learning_rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, course.learning_rate_factor)
        # Steps are full on any number of workers, so that all of them take the same samples in the same step.
        self.data = dcp.DataPosition(
            len(self._windows),
            course.sequences_per_step // world_size,
            seed=course.seed,
            drop_last=True,
            rank=rank,
            world_size=world_size,
        )
        self.state = dcp.TrainState(
            self._model,
            self._optimizer,
            self._schedule,
            data=self.data,
            random=dcp.RNGState(),
            course=_SameSeed(course.seed),
            step=0,
        )
        self._batches = self._endless_batches()

    @property
    def step(self) -> int:
        """How many steps are done."""
        return int(self.state.more["step"])

    def train_one_step(self) -> float:
        """Train on the next global batch; return its mean loss before the update, the same on every rank."""
        inputs, targets = self._windows.batch(next(self._batches))
        loss = self._model(inputs.to(self._device), targets.to(self._device))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        self.state.more["step"] += 1
        mean = loss.detach()
        if self._world_size > 1:
            dist.all_reduce(mean)
            mean /= self._world_size
        return float(mean)

    def _endless_batches(self) -> Iterator[list[int]]:
        """This rank's samples, epoch after epoch, from where the position is when the first batch is taken."""
        while True:
            yield from self.data.track()


class _SameSeed:
    """Refuses a checkpoint of another run. A ``Stateful``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["seed"] != self._seed:
            raise ValueError(f"the checkpoint is of seed {state_dict['seed']}, this run has seed {self._seed}")


def uninterrupted_losses(course: Course, device: str = "cpu") -> list[float]:
    """Train from the first step to the last in this process; return the loss of each step."""
    torch.set_num_threads(1)
    learner = Learner(course, torch.device(device))
    return [learner.train_one_step() for _ in range(course.num_steps)]
