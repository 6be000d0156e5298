"""What torch offers around its checkpoints, used with ray_dcp by rank actors that are a process group of two."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ray_dcp as dcp
from tests.interop import layouts

pytestmark = pytest.mark.ray

FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
OPTIONS = {  # by name: how the state is got, and how it is set
    "none": (StateDictOptions(),) * 2,
    "cpu_offload": (StateDictOptions(cpu_offload=True),) * 2,
    "full_state_dict": (StateDictOptions(full_state_dict=True),) * 2,
    "broadcast_from_rank0": (FULL_ON_RANK_0, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
    "flatten_optimizer_state_dict": (StateDictOptions(flatten_optimizer_state_dict=True),) * 2,
    "ignore_frozen_params": (StateDictOptions(ignore_frozen_params=True), StateDictOptions(strict=False)),
}


def trained(seed: int, *, frozen: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = layouts.built("fsdp", seed)
    if frozen:
        for parameter in model.w1.parameters():
            parameter.requires_grad_(False)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    layouts.train(model, optimizer)
    return model, optimizer


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of both by name; lists as tuples, since ``set_state_dict`` makes lists of an Adam's betas."""
    state = layouts.full_state(model, optimizer)
    return {fqn: tuple(value) if isinstance(value, list) else value for fqn, value in state.items()}


def saved_and_loaded(rank: int, folder: Path) -> dict[str, Any]:
    """For each option what differs after a load with it, in a model and an optimizer that had other values."""
    found: dict[str, Any] = {}
    for number, (name, (got, put)) in enumerate(OPTIONS.items()):
        frozen = name == "ignore_frozen_params"
        model, optimizer = trained(seed=number, frozen=frozen)
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=got), strict=True))
        dcp.save(state, checkpoint_id=folder / str(number))
        expected = everything(model, optimizer)

        model, optimizer = trained(seed=99, frozen=frozen)
        kept = {fqn: value.clone() for fqn, value in everything(model, optimizer).items() if "w1" in fqn}
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=got), strict=True))
        layouts._blank(state)
        loaded = dcp.load(state, checkpoint_id=folder / str(number)).loaded
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=put)
        found[name] = layouts.differences(everything(model, optimizer), expected | (kept if frozen else {}))
        if frozen:
            found["saved of what is frozen"] = [fqn for fqn in loaded if "w1" in fqn]
    return found


def test_every_option_of_get_state_dict_and_set_state_dict(ranks, tmp_path):
    outcomes = layouts.in_group(ranks, 2, saved_and_loaded, tmp_path, tmp_path)
    for found in outcomes:
        assert found == {name: [] for name in [*OPTIONS, "saved of what is frozen"]}


def loaded_from_a_torch_file(rank: int, file: Path) -> list[str]:
    model = layouts.Net()
    layouts._blank(dict(model.state_dict()))
    dcp.load(
        {"model": model},
        planner=dcp.format_utils.DynamicMetaLoadPlanner(),
        storage_reader=dcp.format_utils.BroadcastingTorchSaveReader(),
        checkpoint_id=file,
    )
    return layouts.differences(dict(model.state_dict()), torch.load(file)["model"])


def test_a_file_of_torch_save_is_read_by_rank_0_and_broadcast(ranks, tmp_path):
    torch.manual_seed(7)
    torch.save({"model": layouts.Net().state_dict()}, tmp_path / "model.pt")
    assert layouts.in_group(ranks, 2, loaded_from_a_torch_file, tmp_path, tmp_path / "model.pt") == [[], []]


def sharded_optimizer_state(rank: int, folder: Path) -> list[str]:
    """torch's guide to FSDP's first version, with ray_dcp for the saves and the loads."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    def built(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = FSDP(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)), device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    warnings.simplefilter("ignore")
    model, optimizer = built(1)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save_state_dict(state, storage_writer=dcp.FileSystemWriter(folder), planner=dcp.DefaultSavePlanner())
    expected = optimizer.state_dict()["state"]

    model, optimizer = built(99)
    different = []
    for reader in (dcp.FileSystemReader, dcp.StoreReader):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            template = {"model": model.state_dict()}
            dcp.load_state_dict(template, storage_reader=reader(folder), planner=dcp.DefaultLoadPlanner())
            model.load_state_dict(template["model"])
            optim = dcp.load_sharded_optimizer_state_dict(
                template["model"], optimizer_key="optim", storage_reader=reader(folder)
            )
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim["optim"]))
        for number, values in optimizer.state_dict()["state"].items():
            different += [
                f"{number}.{key}" for key, value in values.items() if not torch.equal(value, expected[number][key])
            ]
    return different


def test_the_sharded_optimizer_state_of_fsdps_first_version(ranks, tmp_path):
    assert layouts.in_group(ranks, 2, sharded_optimizer_state, tmp_path, tmp_path / "c") == [[], []]
