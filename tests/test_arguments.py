"""What is passed in the wrong place, or is another thing than meant: refused by name before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader

import ray_dcp as dcp
from ray_dcp.errors import ConfigError
from ray_dcp.protocol.exception import CheckpointException

STATE = {"w": torch.ones(2)}


def refused(call, *args, **kwargs) -> str:
    with pytest.raises((CheckpointException, ConfigError)) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, ValueError)  # so is a ConfigError
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("call", [dcp.save, dcp.async_save, dcp.load, dcp.save_state_dict, dcp.load_state_dict])
@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_place_in_the_second_place_is_refused_with_the_way(tmp_path, recwarn, call, kind):
    place = kind(tmp_path / "c")
    message = refused(call, dict(STATE), place)
    assert f"{str(place)!r} is a place: pass it by name, as checkpoint_id=" in message
    assert not (tmp_path / "c").exists()
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)], "the advice to pass it as a writer"


WRONG_PLUGINS = [
    (dcp.save, "storage_writer", dcp.StoreReader(), "a StoreReader is not a StorageWriter, it is a reader"),
    (dcp.save, "storage_writer", dcp.StoreWriter, "StoreWriter is a class; pass one that is made: StoreWriter(...)"),
    (dcp.save, "planner", dcp.DefaultSavePlanner, "DefaultSavePlanner is a class"),
    (dcp.save, "planner", dcp.DefaultLoadPlanner(), "a DefaultLoadPlanner is not a SavePlanner, it is a load planner"),
    (dcp.save, "planner", "fast", "a str is not a SavePlanner"),
    (dcp.async_save, "storage_writer", FileSystemReader("/x"), "a FileSystemReader is not a StorageWriter"),
    (dcp.load, "storage_reader", dcp.StoreWriter(), "a StoreWriter is not a StorageReader, it is a writer"),
    (dcp.load, "planner", dcp.DefaultSavePlanner(), "a DefaultSavePlanner is not a LoadPlanner, it is a save planner"),
    (dcp.load, "planner", dcp.DefaultLoadPlanner, "DefaultLoadPlanner is a class"),
]


@pytest.mark.parametrize(("call", "argument", "given", "message"), WRONG_PLUGINS)
def test_what_is_no_writer_reader_or_planner_is_refused_by_name(tmp_path, call, argument, given, message):
    dcp.save(STATE, checkpoint_id=tmp_path / "there")
    template = {"w": torch.zeros(2)}
    place = tmp_path / ("there" if call is dcp.load else "new")
    found = refused(call, template, checkpoint_id=place, **{argument: given})
    assert f"{argument}: {message}" in found
    assert template["w"].tolist() == [0, 0]
    assert not (tmp_path / "new").exists()


def test_a_group_that_is_none_is_refused(tmp_path):
    place = tmp_path / "c"
    assert refused(dcp.save, STATE, checkpoint_id=place, group=3).startswith("group: 3 is not a RankGroup")
    assert refused(dcp.load, STATE, checkpoint_id=place, group=dcp.RankGroup).startswith("group: ")
    assert refused(dcp.save, STATE, checkpoint_id=place, process_group=3).startswith("process_group: 3 is not a Proc")
    assert refused(dcp.CheckpointManager, tmp_path, group="ranks").startswith("group: 'ranks' is not a RankGroup")
    assert not place.exists()


@pytest.mark.parametrize(
    ("size", "chunks", "setting"),
    [
        ((2, 2), [torch.ones(2, 2)], "chunks: a list does not say where: pass {offsets: local tensor}"),
        (4, {0: torch.ones(4)}, "size: 4 is not a tuple of whole numbers"),
        ((4,), {0: torch.ones(4)}, "chunks: offsets 0 are not a tuple of whole numbers"),
        ((2.5,), {(0,): torch.ones(2)}, "size: (2.5,) is not a tuple"),
        ((-1,), {}, "size: (-1,) is not a tuple"),
    ],
)
def test_local_shards_of_what_says_no_place_are_refused(size, chunks, setting):
    with pytest.raises(ConfigError) as caught:
        dcp.LocalShards(size, chunks)
    assert f"LocalShards.{setting}" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"random": True}, "random: True is a plain value, by which nothing is kept; pass random=dcp.RNGState()"),
        ({"data": True}, "pass data=dcp.DataPosition(...)"),
        ({"random": dcp.RNGState}, "random: RNGState is a class; pass one that is made: RNGState(...)"),
        ({"data": DataLoader([1, 2])}, "data: a DataLoader does not know where it is"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler: "),
        ({"scheduler": 3}, "scheduler: 3 has no state_dict()"),
    ],
)
def test_train_state_refuses_what_was_meant_otherwise(more, message):
    with pytest.raises(ConfigError) as caught:
        dcp.TrainState(torch.nn.Linear(2, 2), **more)
    assert message in str(caught.value)


def test_a_failed_save_with_a_writer_of_torchs_names_its_place(tmp_path):
    place = tmp_path / "afile"
    place.touch()
    writer = dcp.FileSystemWriter(place)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer)
    assert str(caught.value).startswith(f"save of {place} failed")
