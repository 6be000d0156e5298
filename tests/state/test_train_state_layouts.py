"""``TrainState`` in the layouts that torch trains in, from one to the next, on other numbers of ranks."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp
from tests.interop import layouts

pytestmark = pytest.mark.ray


def train_and_save(rank: int, layout: str, folder: Path) -> None:
    """Four steps, saved after two: what is there then and at the end goes to files of rank 0."""
    model, optimizer = layouts.built(layout, seed=1)
    layouts.train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0625  # as a schedule changes it
    dcp.save({"app": dcp.TrainState(model, optimizer)}, checkpoint_id=folder / "saved")
    saved = copy.deepcopy(layouts.full_state(model, optimizer))
    layouts.train(model, optimizer)
    end = layouts.full_state(model, optimizer)
    if rank == 0:
        torch.save({"saved": saved, "end": end}, folder / "expected")


def load_train_and_save_again(rank: int, layout: str, folder: Path, again: Path, same: bool) -> list[str]:
    """Into an optimizer that has not stepped; what differs after the load, and at the end if the layout is the same."""
    model, optimizer = layouts.built(layout, seed=2)
    state = dcp.TrainState(model, optimizer)
    report = dcp.load({"app": state}, checkpoint_id=folder / "saved", strict="exact")
    assert report.missing == report.unexpected == state.fresh == ()
    expected = torch.load(folder / "expected")
    found = layouts.differences(layouts.full_state(model, optimizer), expected["saved"])
    dcp.save({"app": state}, checkpoint_id=again / "saved")
    if rank == 0:
        torch.save(expected, again / "expected")
    if same:
        layouts.train(model, optimizer)
        found += layouts.differences(layouts.full_state(model, optimizer), expected["end"])
    return found


@pytest.mark.parametrize(
    "chain",
    [("fsdp", "fsdp", "plain", "ddp", "fsdp"), ("plain", "fsdp+tp", "plain")],
    ids=" -> ".join,
)
def test_a_train_state_goes_from_layout_to_layout(ranks, tmp_path: Path, chain: tuple[str, ...]) -> None:
    folders = [tmp_path / str(number) for number in range(len(chain) + 1)]
    for folder in folders:
        folder.mkdir()
    layouts.in_group(ranks, layouts.WORLD_SIZES[chain[0]], train_and_save, tmp_path, chain[0], folders[0])
    for number, (before, layout) in enumerate(itertools.pairwise(chain)):
        found = layouts.in_group(
            ranks,
            layouts.WORLD_SIZES[layout],
            load_train_and_save_again,
            tmp_path,
            layout,
            folders[number],
            folders[number + 1],
            number == 0 and layout == before,
        )
        assert found == [[]] * layouts.WORLD_SIZES[layout], layout
