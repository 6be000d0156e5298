"""One learner: model, optimizer, learning-rate schedule and data position, and what one step does to them.

The uninterrupted reference and every rank of the elastic run use this same code; only sharding differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic.corpus import global_batch, standard_library_bytes
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
    """Everything that changes with a step. A DCP ``Stateful``: its state dict is the whole of one step."""

    def __init__(self, course: Course, device: torch.device, *, rank: int = 0, world_size: int = 1) -> None:
        if course.sequences_per_step % world_size:
            raise ValueError(
                f"{course.sequences_per_step} sequences a step can't be shared out to {world_size} workers"
            )
        self.course = course
        self.step = 0
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._text = standard_library_bytes()
        torch.manual_seed(course.seed)
        self._model: torch.nn.Module = Gpt(course.shape).to(device)
        if dist.is_initialized():
            mesh = init_device_mesh(device.type, (world_size,))
            for block in self._model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=course.peak_learning_rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, course.learning_rate_factor)

    def train_one_step(self) -> float:
        """Train on the next global batch; return its mean loss before the update, the same on every rank."""
        inputs, targets = global_batch(
            self._text,
            seed=self.course.seed,
            step=self.step + 1,
            num_sequences=self.course.sequences_per_step,
            length=self.course.shape.context,
        )
        mine = slice(self._rank, None, self._world_size)
        loss = self._model(inputs[mine].to(self._device), targets[mine].to(self._device))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        self.step += 1
        mean = loss.detach()
        if self._world_size > 1:
            dist.all_reduce(mean)
            mean /= self._world_size
        return float(mean)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        # The data position is the step: a batch depends on the seed and the step alone.
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self._schedule.state_dict(),
            "step": self.step,
            "seed": self.course.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["seed"] != self.course.seed:
            raise ValueError(f"the checkpoint is of seed {state_dict['seed']}, this run has seed {self.course.seed}")
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        # After the optimizer: its parameter groups bring the learning rate that belongs to the schedule's position.
        self._schedule.load_state_dict(state_dict["schedule"])
        self.step = state_dict["step"]


def uninterrupted_losses(course: Course, device: str = "cpu") -> list[float]:
    """Train from the first step to the last in this process; return the loss of each step."""
    torch.set_num_threads(1)
    learner = Learner(course, torch.device(device))
    return [learner.train_one_step() for _ in range(course.num_steps)]
