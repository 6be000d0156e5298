"""Model and optimizer saved in one layout load in every other, ours and torch's checkpoints alike, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from tests.interop import layouts

pytestmark = pytest.mark.ray

SAVED = ("plain", "ddp", "fsdp", "hsdp", "fsdp+tp")
LOADED = ("plain", "ddp", "fsdp", "fsdp of 3", "hsdp", "fsdp+tp")


def save(rank: int, folder: Path, layouts_now: list[str]) -> None:
    for layout in layouts_now:
        model, optimizer = layouts.built(layout, seed=SAVED.index(layout))
        layouts.train(model, optimizer)
        state = {"app": layouts.AppState(model, optimizer), "layout": layout}
        dcp.save(state, checkpoint_id=folder / layout / "ours")
        torch_dcp.save(state, checkpoint_id=folder / layout / "torchs")
        everything = layouts.full_state(model, optimizer)
        if rank == 0:
            torch.save(everything, folder / layout / "everything.pt")


def load(rank: int, folder: Path, layouts_now: list[str]) -> dict[str, list[str]]:
    """What differs after each load, by target, source and way."""
    found = {}
    for target in layouts_now:
        for source in SAVED:
            expected = torch.load(folder / source / "everything.pt")
            for way, place in ((dcp, "ours"), (torch_dcp, "ours"), (dcp, "torchs")):
                model, optimizer = layouts.built(target, seed=99)
                state = {"app": layouts.BlankAppState(model, optimizer), "layout": ""}
                way.load(state, checkpoint_id=folder / source / place)
                differences = layouts.differences(layouts.full_state(model, optimizer), expected)
                if state["layout"] != source:
                    differences.append("layout")
                found[f"{place} of {source} into {target} by {way.__name__}"] = differences
    return found


def load_into_meta(rank: int, folder: Path) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with torch.device("meta"):
        model = layouts.Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    state = {"app": {"model": model.state_dict()}}
    assert {value.device.type for value in state["app"]["model"].values()} == {"meta"}
    dcp.load(state, checkpoint_id=folder / "fsdp+tp" / "ours")
    whole = {
        f"model.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state["app"]["model"].items()
    }
    expected = torch.load(folder / "fsdp+tp" / "everything.pt")
    return layouts.differences(whole, {name: value for name, value in expected.items() if name.startswith("model.")})


def load_wrong(rank: int, folder: Path) -> tuple[str, bool]:
    model, optimizer = layouts.built("fsdp", seed=5)
    before = layouts.full_state(model, optimizer)
    state = layouts.AppState(model, optimizer).state_dict()
    state["model"]["new.weight"] = torch.zeros(3)
    try:
        dcp.load({"app": state}, checkpoint_id=folder / "fsdp" / "ours")
    except dcp.CheckpointException as error:
        return str(error), layouts.differences(layouts.full_state(model, optimizer), before) == []
    return "", False


def sharded_tensor(rank: int, world_size: int, values: torch.Tensor):
    """torch's older kind of shard: rows of this rank, one row short on the last."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rows = -(-values.shape[0] // world_size)
    start, stop = min(rank * rows, values.shape[0]), min((rank + 1) * rows, values.shape[0])
    local = values[start:stop].clone()
    metadata = ShardMetadata([start, 0], list(local.shape), placement=f"rank:{rank}/cpu")
    return init_from_local_shards([Shard(local, metadata)], list(values.shape))


def save_sharded(rank: int, folder: Path) -> None:
    state = {"t": sharded_tensor(rank, 2, torch.arange(21.0).reshape(7, 3)), "n": 1}
    dcp.save(state, checkpoint_id=folder / "ours")
    torch_dcp.save(state, checkpoint_id=folder / "torchs")


def load_sharded(rank: int, folder: Path) -> list[tuple[list[float], list[float]]]:
    rows = []
    for way, place in ((dcp, "ours"), (torch_dcp, "ours"), (dcp, "torchs")):
        state = {"t": sharded_tensor(rank, 3, torch.full((7, 3), -1.0)), "n": 0}
        whole = {"t": torch.full((7, 3), -1.0), "n": 0}
        way.load(state, checkpoint_id=folder / "sharded" / place)
        way.load(whole, checkpoint_id=folder / "sharded" / place)
        (shard,) = state["t"].local_shards()
        rows.append((shard.tensor[:, 0].tolist(), whole["t"][:, 0].tolist()))
    return rows


def of_size(world_size: int, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if layouts.WORLD_SIZES[name] == world_size]


def save_on_two(rank: int, folder: Path) -> None:
    save(rank, folder, of_size(2, SAVED))
    save_sharded(rank, folder / "sharded")


def save_and_load_on_four(rank: int, folder: Path) -> dict[str, list[str]]:
    save(rank, folder, of_size(4, SAVED))
    return load(rank, folder, of_size(4, LOADED))


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What each rank has found in the loads of one number of ranks, which are all in one process group."""

    every_layout: list[dict[str, list[str]]]
    other: list[Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """All saves, and all loads by number of ranks: a process group costs a coordinator, which is a process."""

    folder: Path
    loads: dict[int, Loads]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    for layout in SAVED:
        (folder / layout).mkdir()

    def each(world_size, on_rank, *args):
        return layouts.in_group(ranks, world_size, on_rank, folder, folder, *args)

    def loads(world_size, *others):
        found = each(world_size, load_and_more, world_size, *others)
        return Loads(every_layout=[one for one, *_ in found], other=[more for _, *more in found])

    each(2, save_on_two)
    each(1, save, of_size(1, SAVED))
    on_four = Loads(every_layout=each(4, save_and_load_on_four), other=[])
    on_three = loads(3, load_into_meta, load_sharded)
    return Run(folder=folder, loads={1: loads(1), 2: loads(2, load_wrong), 3: on_three, 4: on_four})


def load_and_more(rank: int, folder: Path, world_size: int, *others: Callable[..., Any]) -> list[Any]:
    return [load(rank, folder, of_size(world_size, LOADED)), *(other(rank, folder) for other in others)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_loads_what_every_other_saved(run, world_size):
    every_layout = run.loads[world_size].every_layout
    assert len(every_layout) == world_size
    for found in every_layout:
        assert len(found) == len(of_size(world_size, LOADED)) * len(SAVED) * 3
        assert {way: differences for way, differences in found.items() if differences} == {}


def test_the_checkpoints_differ_in_every_value(run):
    """So that a load of the wrong one is seen."""
    everything = [torch.load(run.folder / source / "everything.pt") for source in SAVED]
    same = {"optim.param_groups", "model.seen"}
    for name in everything[0]:
        if not any(name.startswith(prefix) for prefix in same) and not name.endswith(".step"):
            values = [one[name] for one in everything]
            assert all(not torch.equal(a, b) for n, a in enumerate(values) for b in values[:n])
    assert everything[0]["model.seen"].item() == 2**53 + 1


def test_a_model_on_the_meta_device_gets_memory_and_values(run):
    assert [differences for differences, _ in run.loads[3].other] == [[], [], []]


def test_a_template_that_does_not_fit_is_refused_on_every_rank_and_untouched(run):
    assert len(run.loads[2].other) == 2
    for ((message, untouched),) in run.loads[2].other:
        assert "app.model.new.weight: Missing key: not in the checkpoint" in message
        assert untouched


def test_sharded_tensors_load_on_another_number_of_ranks_and_whole(run):
    everything = [row * 3.0 for row in range(7)]
    spans = [(0, 3), (3, 6), (6, 7)]
    assert [rows for _, rows in run.loads[3].other] == [
        [(everything[start:stop], everything)] * 3 for start, stop in spans
    ]
