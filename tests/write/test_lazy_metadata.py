"""The metadata that a save returns is torch's, however it is looked at first."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

import ray_dcp as dcp
from ray_dcp.write.lazy_metadata import CommittedMetadata


@pytest.fixture
def saved(tmp_path):
    state = {"w": torch.ones(3, 2), "lr": 0.5, "deep": {"a": [1, torch.zeros(())]}}
    return dcp.save(state, checkpoint_id=tmp_path, no_dist=True), FileSystemReader(tmp_path).read_metadata()


LOOKS = {
    "a field": lambda metadata: metadata.state_dict_metadata,
    "a field with a default": lambda metadata: metadata.storage_data,
    "the version": lambda metadata: metadata.version,
    "its dict": vars,
    "equality": lambda metadata: metadata == 1,
    "repr": repr,
    "asdict": lambda metadata: [getattr(metadata, field.name) for field in dataclasses.fields(metadata)],
    "replace": dataclasses.replace,
    "setting": lambda metadata: setattr(metadata, "planner_data", metadata.planner_data),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda metadata: pickle.loads(pickle.dumps(metadata)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_it_becomes_plain_metadata_when_it_is_looked_at(saved, look):
    committed, on_disk = saved
    on_disk.storage_meta = committed.storage_meta if look == "a field" else on_disk.storage_meta
    assert isinstance(committed, Metadata)
    LOOKS[look](committed)
    assert committed.state_dict_metadata == on_disk.state_dict_metadata
    assert committed.storage_data == on_disk.storage_data
    assert committed.planner_data == on_disk.planner_data
    assert committed.version == on_disk.version
    assert type(committed) is Metadata


def test_until_then_it_is_what_is_stored(saved):
    committed, _ = saved
    assert type(committed) is CommittedMetadata
    travelled = pickle.loads(pickle.dumps(committed))
    assert type(travelled) is CommittedMetadata
    assert travelled == committed
    assert not isinstance(travelled, CommittedMetadata)
