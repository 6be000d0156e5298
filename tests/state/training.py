"""A small training for tests of what comes back: resumed and uninterrupted runs must agree to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ray_dcp as dcp
from tests.shardings import same_bits

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """A frozen layer, one that no batch reaches, a buffer that counts, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.idle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 4, bias=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(torch.tanh(self.first(inputs))))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(model: nn.Module, optimizer: Any, first: int, last: int, scheduler: Any = None) -> None:
    """Steps ``first`` to ``last``, exclusive; the batch of a step is always the same."""
    for step in range(first, last):
        inputs = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            value = model(inputs).square().mean()
            value.backward()
            return value

        optimizer.step(loss)
        if scheduler is not None:
            scheduler.step()
        for module in model.modules():
            if isinstance(module, Net):
                module.seen += 1


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two nested states differ in any bit, type or key."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and same_bits(found, expected)
        return [] if same else [where]
    if type(found) is not type(expected):
        return [f"{where}: {type(found).__name__} for {type(expected).__name__}"]
    if isinstance(expected, dict):
        lacking = [f"{where}.{key}" for key in found.keys() ^ expected.keys()]
        return lacking + [
            d
            for key in found.keys() & expected.keys()
            for d in differences(found[key], expected[key], f"{where}.{key}")
        ]
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [where]
        return [
            d for i, (a, b) in enumerate(zip(found, expected, strict=True)) for d in differences(a, b, f"{where}.{i}")
        ]
    return [] if found == expected else [where]


def everything(model: nn.Module, optimizer: Any, scheduler: Any = None) -> dict[str, Any]:
    """As torch itself gives it, without any code of ray_dcp."""
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
    }


def save(state: Any, place: Path) -> None:
    dcp.save({"app": state}, checkpoint_id=place, no_dist=True)


def load(state: Any, place: Path, **options: Any) -> Any:
    return dcp.load({"app": state}, checkpoint_id=place, no_dist=True, **options)
