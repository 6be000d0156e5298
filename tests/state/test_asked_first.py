"""What our own ``Stateful``s refuse they refuse before anything is filled."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import ray_dcp as dcp
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.state.param_groups import SavedGroup, other_settings
from tests.ranks import ThreadGroup, ThreadRanks


class Loader:
    """What torch's loader is to a ``LoaderPosition``."""

    def __init__(self, position: dcp.DataPosition) -> None:
        self.batch_sampler = position


def position(num_samples: int) -> dcp.DataPosition:
    return dcp.DataPosition(num_samples, 1, rank=0, world_size=1)


def trained(make: Any, schedule: Any = None, **more: Any) -> tuple[nn.Module, dcp.TrainState]:
    torch.manual_seed(5)
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer) if schedule is not None else None
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, dcp.TrainState(model, optimizer, scheduler, **more)


def refused(state: dict[str, Any], place: Any) -> str:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, checkpoint_id=place, no_dist=True)
    (failure,) = caught.value.rank_failures
    assert failure.phase == "plan"
    return str(caught.value)


OF_TEN = {
    "DataPosition": lambda number: position(number),
    "LoaderPosition": lambda number: dcp.LoaderPosition(Loader(position(number))),
    "in a TrainState": lambda number: dcp.TrainState(nn.Linear(1, 1), data=position(number)),
}


@pytest.mark.parametrize("kind", OF_TEN)
def test_another_number_of_samples_is_refused_before_a_tensor_is_filled(tmp_path, kind):
    dcp.save({"a": torch.ones(2), "deep": [{"data": OF_TEN[kind](10)}]}, checkpoint_id=tmp_path)
    template = {"a": torch.zeros(2), "deep": [{"data": OF_TEN[kind](11)}]}
    assert "run with 10 samples, this one has 11" in refused(template, tmp_path)
    assert template["a"].tolist() == [0, 0]
    good = {"a": torch.zeros(2), "deep": [{"data": OF_TEN[kind](10)}]}
    dcp.load(good, checkpoint_id=tmp_path, no_dist=True)
    assert good["a"].tolist() == [1, 1]


def test_what_one_rank_refuses_no_rank_fills(tmp_path):
    dcp.save({"a": torch.ones(2), "data": position(10)}, checkpoint_id=tmp_path)
    ranks = ThreadRanks(2)
    templates = [{"a": torch.zeros(2), "data": position(10 + rank)} for rank in range(2)]
    outcomes = ranks.run(lambda rank: dcp.load(templates[rank], checkpoint_id=tmp_path, group=ThreadGroup(ranks, rank)))
    assert all("data: the checkpoint is of a run with 10 samples" in str(outcome) for outcome in outcomes)
    assert [template["a"].sum().item() for template in templates] == [0, 0]


def test_a_random_state_that_cannot_be_put_back_is_refused_first(tmp_path, monkeypatch):
    held = dcp.RNGState().state_dict()["rng"].value
    dcp.save({"a": torch.ones(2), "r": {"rng": dcp.PerRank({**held, "torch": b"short"})}}, checkpoint_id=tmp_path)
    before = np.random.get_state()[1].copy()
    template = {"a": torch.zeros(2), "r": dcp.RNGState()}
    assert "r: the checkpoint's state of torch's generator has 5 bytes" in refused(template, tmp_path)
    assert template["a"].tolist() == [0, 0]
    assert (np.random.get_state()[1] == before).all()


MAKERS = {
    "SGD": partial(optim.SGD, lr=0.5, momentum=0.9),
    "AdamW": partial(optim.AdamW, lr=0.25),
    "RMSprop": partial(optim.RMSprop, lr=0.125),
}


@pytest.mark.parametrize(("there", "here"), [(a, b) for a in MAKERS for b in MAKERS if a != b])
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_changed(tmp_path, there, here):
    dcp.save({"train": trained(MAKERS[there])[1]}, checkpoint_id=tmp_path)
    model, train = trained(MAKERS[here])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight += 1
    message = refused({"train": train}, tmp_path)
    assert f"train: optim: was saved by another optimizer than this {here}: it has " in message
    assert torch.equal(model.weight, before["weight"] + 1)
    assert train.state_dict()["optim"]["param_groups"]["weight"][0]["settings"]["lr"] == MAKERS[here].keywords["lr"]
    dcp.load({"train": train}, checkpoint_id=tmp_path, skip="train.optim", no_dist=True)
    assert torch.equal(model.weight, before["weight"]) or there != here


@pytest.mark.parametrize("there", MAKERS)
def test_a_torch_that_adds_or_drops_a_setting_still_loads(there):
    optimizer = MAKERS[there](nn.Linear(1, 1).parameters())
    saved = dict(optimizer.defaults, initial_lr=1.0)
    assert other_settings(optimizer, [SavedGroup(("w",), saved | {"new": 1})]) == []
    del saved["lr"]
    assert other_settings(optimizer, [SavedGroup(("w",), saved)]) == []
    assert other_settings(optimizer, [SavedGroup(("w",), saved | {"new": 1})]) != []


SCHEDULES = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=3),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.StepLR(one, 3), lr_scheduler.ExponentialLR(one, 0.9)], [2]
    ),
}


@pytest.mark.parametrize(("there", "here"), [(a, b) for a in SCHEDULES for b in SCHEDULES])
def test_the_state_of_another_schedule_is_refused(tmp_path, there, here):
    dcp.save({"train": trained(MAKERS["SGD"], SCHEDULES[there])[1]}, checkpoint_id=tmp_path)
    model, train = trained(MAKERS["SGD"], SCHEDULES[here])
    nn.init.zeros_(model.weight)
    if there == here:
        dcp.load({"train": train}, checkpoint_id=tmp_path, no_dist=True)
        assert model.weight.any()
        return
    assert f"train: scheduler: was saved by another schedule than this {here}" in refused({"train": train}, tmp_path)
    assert not model.weight.any()


def test_groups_that_had_other_settings_are_refused_before_anything_is_filled(tmp_path):
    def two_groups(parameters: Any) -> optim.Optimizer:
        weight, bias = parameters
        return optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.1}], lr=0.5)

    dcp.save({"train": trained(two_groups)[1]}, checkpoint_id=tmp_path)
    model, train = trained(partial(optim.SGD, lr=0.5))
    nn.init.zeros_(model.weight)
    assert "weight and bias were saved with different lr" in refused({"train": train}, tmp_path)
    assert not model.weight.any()
