"""What is worked out once for a layout is what torch works out for each value."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_read_items, _create_write_items

from ray_dcp import LocalShards
from ray_dcp.planning.layouts import ReadLayouts, WriteLayouts, layout_key, local_part

VALUES = {
    "plain": torch.zeros(6, 4),
    "parameter": torch.nn.Parameter(torch.zeros(6, 4)),
    "half": torch.zeros(6, 4, dtype=torch.float16),
    "no dimensions": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "needs a gradient": torch.zeros(6, 4, requires_grad=True),
    "alike": torch.ones(6, 4),
    "transposed": torch.zeros(4, 6).t(),
}


def test_write_items_are_torchs():
    layouts = WriteLayouts()
    for _ in range(2):  # the second time from what is known
        for fqn, value in VALUES.items():
            assert [layouts.item_of(fqn, value, value)] == _create_write_items(fqn, value)
    plain, alike = (layouts.item_of(fqn, VALUES[fqn], VALUES[fqn]) for fqn in ("plain", "alike"))
    assert plain.tensor_data is alike.tensor_data


@pytest.mark.parametrize("cuts", [[0, 6], [0, 2, 6], [0, 1, 2, 5, 6]], ids=str)
def test_reads_are_torchs(cuts):
    layouts = ReadLayouts()
    chunks = [ChunkStorageMetadata(torch.Size((a, 0)), torch.Size((b - a, 4))) for a, b in itertools.pairwise(cuts)]
    saved = TensorStorageMetadata(TensorProperties(), torch.Size((6, 4)), chunks)
    shards = LocalShards((6, 4), {(1, 0): torch.zeros(2, 4), (3, 2): torch.zeros(3, 2)})
    for fqn, value in (("a", torch.zeros(6, 4)), ("b", torch.ones(6, 4)), ("c", shards)):
        planned = layouts.reads_of(value, saved)
        assert planned.of(fqn) == _create_read_items(fqn, saved, value)
        assert planned.problems == ()


def test_values_that_were_saved_otherwise_are_planned_otherwise():
    layouts, value = ReadLayouts(), torch.zeros(6)
    whole = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((6,)))]
    half = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))]
    twice = [*whole, *half]
    found = [
        layouts.reads_of(value, TensorStorageMetadata(TensorProperties(), torch.Size((6,)), chunks)).problems
        for chunks in (whole, half, twice, whole)
    ]
    assert found[0] == found[3] == ()
    assert "no stored chunk covers 3 of 6" in found[1][0]
    assert "overlap" in found[2][0]


def test_only_kinds_whose_chunks_follow_from_their_type_have_a_key():
    class Own(torch.Tensor):
        pass

    assert layout_key(torch.zeros(2)) == layout_key(torch.nn.Parameter(torch.zeros(2)))
    for other in (torch.zeros(2).as_subclass(Own), LocalShards((2,), {(0,): torch.zeros(2)}), 3.0):
        assert layout_key(other) is None
        assert local_part(other) is None
