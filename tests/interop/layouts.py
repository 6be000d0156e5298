"""One model in every layout that torch trains in, with an optimizer that has stepped."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.slack import within

WORLD_SIZES = {"plain": 1, "ddp": 2, "fsdp": 2, "fsdp of 3": 3, "hsdp": 4, "fsdp+tp": 4}


class Net(nn.Module):
    """Sizes that divide evenly by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.w1 = nn.Linear(10, 14)
        self.w2 = nn.Linear(14, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 3, bias=False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.w2(torch.relu(self.w1(hidden))))
        return self.head(hidden)


def built(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in this process's part of ``layout``; the values are the seed's."""
    torch.manual_seed(seed)
    model = _laid_out(layout, Net())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def _laid_out(layout: str, model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if layout == "plain":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        mesh = mesh["dp"]
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (WORLD_SIZES[layout],))
    for part in (model.embedding, model.w1, model.w2):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    """The same batches on every rank."""
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.arange(4) + step).square().mean().backward()
        optimizer.step()
    unwrapped = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    unwrapped.seen += 2**53 + 1


class AppState:
    """The ``Stateful`` of torch's own guide to saving model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


class BlankAppState(AppState):
    """As a template: every tensor is one that no checkpoint holds, so a value that is not filled is seen."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        _blank(state)
        return state


def _blank(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.detach().fill_(float("nan") if value.is_floating_point() else -1)
    elif isinstance(value, dict):
        for part in value.values():
            _blank(part)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of it on every rank, flat; replicas each show their own."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return flatten_state_dict({"model": model_state, "optim": optimizer_state})[0]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names that one of the two lacks, or whose values or types differ in any bit."""
    from tests.shardings import same_bits

    names = sorted(found.keys() | expected.keys())
    return [name for name in names if name not in found or name not in expected] + [
        name
        for name in found.keys() & expected.keys()
        if type(found[name]) is not type(expected[name])
        or not (
            same_bits(found[name], expected[name])
            if isinstance(found[name], torch.Tensor)
            else found[name] == expected[name]
        )
    ]


def in_group(
    ranks: Any, world_size: int, on_rank: Callable[..., Any], folder: Path, *args: Any, joined: bool = True
) -> list[Any]:
    """``on_rank(rank, *args)`` in real processes that are a gloo process group, or one alone.

    They have ``joined`` a group of ours, which tests share; else a save is the process group's own affair, for which a
    coordinator has to start. Raises the first error of a rank; the others may wait for it in a collective, so all are
    then stopped.
    """
    import ray

    store = folder / f"store-{uuid.uuid4().hex}"
    if joined and world_size > 1:
        name = ranks.group_name(world_size)
        calls = [
            actor.run.remote(rank, world_size, name, _within_process_group, store, on_rank, args)
            for rank, actor in enumerate(ranks.actors(world_size))
        ]
    else:
        calls = [
            actor.call.remote(_of_none_of_ours, rank, world_size, store, on_rank, args)
            for rank, actor in enumerate(ranks.actors(world_size))
        ]
    waiting = list(calls)
    while waiting:
        ended, waiting = ray.wait(waiting, timeout=within(120))
        for outcome in ray.get(ended) if ended else [TimeoutError(f"{len(waiting)} ranks hang in {on_rank.__name__}")]:
            if isinstance(outcome, BaseException):
                ranks.forget()
                raise outcome
    return ray.get(calls)


def _of_none_of_ours(
    rank: int, world_size: int, store: Path, on_rank: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    from ray_dcp.cluster import current

    current.set_joined(None)  # the actors are shared: other tests join groups by name
    if world_size == 1:
        return on_rank(rank, *args)
    try:
        return _within_process_group(rank, world_size, store, on_rank, args)
    finally:
        for group in list(current._lazily_joined.values()):
            group.close()


def _within_process_group(
    rank: int, world_size: int, store: Path, on_rank: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        return on_rank(rank, *args)
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor keeps plans by mesh, and takes the next process group's for those of this one: ranks then hang."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()
