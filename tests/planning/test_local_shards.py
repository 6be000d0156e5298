"""``LocalShards``: what it refuses, how it shows itself, and that it carries chunks and does nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from ray_dcp import LocalShards
from ray_dcp.errors import ConfigError
from tests.shardings import DTYPES, same_bits, whole_tensor


@pytest.mark.parametrize(
    ("size", "chunks", "complaint"),
    [
        ((4, 3), {(0, 0): [1, 2]}, "the value at offsets (0, 0) is a list"),
        ((4, 3), {(0, 0): None}, "the value at offsets (0, 0) is a NoneType"),
        ((4,), {0: torch.ones(2)}, "offsets 0 are not a tuple of whole numbers"),
        ((4,), {(0.5,): torch.ones(2)}, "offsets (0.5,) are not a tuple of whole numbers"),
        ((4, 3), {(0,): torch.ones(2, 3)}, "chunk of shape (2, 3) at offsets (0,) has other dimensions"),
        ((4, 3), {(0, 0): torch.ones(6)}, "chunk of shape (6,) at offsets (0, 0) has other dimensions"),
        ((4, 3), {(0, 0): torch.tensor(1.0)}, "chunk of shape () at offsets (0, 0) has other dimensions"),
        ((4, 3), {(3, 0): torch.ones(2, 3)}, "chunk of shape (2, 3) at offsets (3, 0) reaches outside the size (4, 3)"),
        ((4, 3), {(-1, 0): torch.ones(2, 3)}, "at offsets (-1, 0) reaches outside"),
        ((0, 3), {(0, 0): torch.ones(1, 3)}, "reaches outside the size (0, 3)"),
        (
            (4, 3),
            {(0, 0): torch.ones(1, 3), (1, 0): torch.ones(1, 3, dtype=torch.int64)},
            "chunk of shape (1, 3) at offsets (1, 0) is torch.int64, others are torch.float32",
        ),
        ((4, 3), {(0, 0): torch.ones(2, 3), (1, 1): torch.ones(2, 2)}, "chunks at (0, 0) and (1, 1) overlap"),
    ],
)
def test_a_chunk_that_does_not_fit_is_named(size, chunks, complaint):
    with pytest.raises(ConfigError) as caught:
        LocalShards(size, chunks)
    assert complaint in str(caught.value)
    assert caught.value.setting == "LocalShards.chunks"


def test_a_dtype_that_contradicts_the_chunks_is_refused():
    with pytest.raises(ConfigError, match=r"is torch\.float32, others are torch\.float16"):
        LocalShards((2,), {(0,): torch.ones(2)}, dtype=torch.float16)


def test_chunks_that_touch_do_not_overlap_and_empty_ones_never_do():
    chunks = {(0, 0): torch.ones(2, 3), (2, 0): torch.ones(2, 1), (2, 1): torch.ones(2, 2), (1, 1): torch.ones(0, 2)}
    assert LocalShards((4, 3), chunks).chunks == chunks


def test_it_shows_its_size_dtype_and_chunks():
    shards = LocalShards([4, 3], {(2, 0): torch.ones(2, 3, dtype=torch.bfloat16)})
    assert repr(shards) == "LocalShards(size=(4, 3), dtype=torch.bfloat16, chunks=[(2, 3) at (2, 0)])"
    assert (
        repr(LocalShards((), {(): torch.tensor(1.5)})) == "LocalShards(size=(), dtype=torch.float32, chunks=[() at ()])"
    )


def test_it_has_shape_dtype_and_device_of_the_whole():
    shards = LocalShards((4, 3), {(2, 0): torch.ones(2, 3, dtype=torch.int8, device="meta")})
    assert (tuple(shards.size()), shards.dtype, shards.device.type) == ((4, 3), torch.int8, "meta")
    assert isinstance(shards, torch.Tensor)


def test_without_chunks_the_dtype_is_the_one_given_or_the_default():
    assert LocalShards((4,), {}).dtype == torch.get_default_dtype()
    assert LocalShards((4,), {}, dtype=torch.uint16).dtype == torch.uint16


def test_the_chunks_are_the_callers_tensors_not_copies():
    chunk = torch.zeros(2)
    shards = LocalShards((2,), {(0,): chunk})
    shards.chunks[0,].fill_(3)
    assert chunk.tolist() == [3, 3]


@pytest.mark.parametrize("operation", ["add", "slice", "view", "sum"])
def test_it_does_not_compute(operation):
    shards = LocalShards((4,), {(0,): torch.ones(4)})
    compute = {
        "add": lambda: torch.add(shards, 1),
        "slice": lambda: shards[1:],
        "view": lambda: shards.view(2, 2),
        "sum": lambda: shards.sum(),
    }[operation]
    with pytest.raises(TypeError, match=r"LocalShards only carries chunks .* use its \.chunks"):
        compute()


def test_detach_shares_the_chunks_and_clone_copies_them():
    chunk = torch.zeros(2)
    shards = LocalShards((4,), {(2,): chunk})
    detached, cloned = shards.detach(), shards.clone()
    chunk.fill_(7)
    assert detached.chunks[2,].tolist() == [7, 7]
    assert cloned.chunks[2,].tolist() == [0, 0]
    assert tuple(cloned.size()) == (4,)


def test_to_converts_every_chunk():
    shards = LocalShards((4,), {(0,): torch.ones(1), (3,): torch.full((1,), 2.0)}).to(torch.float16)
    assert shards.dtype == torch.float16
    assert {offsets: chunk.dtype for offsets, chunk in shards.chunks.items()} == {
        (0,): torch.float16,
        (3,): torch.float16,
    }
    assert shards.chunks[3,].item() == 2


def test_to_another_device_moves_every_chunk():
    shards = LocalShards((4,), {(0,): torch.ones(1)}).to("meta")
    assert (shards.device.type, shards.chunks[0,].device.type) == ("meta", "meta")


def test_to_converts_the_dtype_of_a_rank_that_holds_nothing():
    assert LocalShards((4,), {}).to(torch.int32).dtype == torch.int32


def test_zero_and_fill_reach_the_chunks_and_return_the_same_object():
    shards = LocalShards((4,), {(0,): torch.ones(2)})
    assert shards.fill_(5) is shards
    assert shards.chunks[0,].tolist() == [5, 5]
    assert shards.zero_() is shards
    assert shards.chunks[0,].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_survives_pickling_and_deep_copies(dtype):
    whole = whole_tensor("rows", dtype)
    shards = LocalShards(whole.shape, {(0, 0): whole[:3].clone(), (5, 0): whole[5:].clone()})
    copied = copy.deepcopy(shards)
    assert copied.dtype == dtype
    assert all(same_bits(copied.chunks[offsets], chunk) for offsets, chunk in shards.chunks.items())
    assert copied.chunks[0, 0].data_ptr() != shards.chunks[0, 0].data_ptr()
    if dtype in (torch.float8_e4m3fn, torch.uint16):
        return  # torch 2.13 cannot pickle these outside torch.save
    pickled = pickle.loads(pickle.dumps(shards))
    assert (tuple(pickled.size()), pickled.dtype) == (tuple(whole.shape), dtype)
    assert all(same_bits(pickled.chunks[offsets], chunk) for offsets, chunk in shards.chunks.items())


def test_a_rank_that_holds_nothing_survives_pickling_with_its_dtype():
    pickled = pickle.loads(pickle.dumps(LocalShards((4, 2), {}, dtype=torch.int16)))
    assert (tuple(pickled.size()), pickled.dtype, pickled.chunks) == ((4, 2), torch.int16, {})


def test_each_chunk_is_one_item_of_a_save_plan():
    shards = LocalShards((4, 3), {(0, 0): torch.ones(1, 3), (2, 0): torch.ones(2, 3)})
    items = shards.__create_write_items__("w", shards)
    assert [(i.index.fqn, tuple(i.index.offset), tuple(i.tensor_data.chunk.sizes)) for i in items] == [
        ("w", (0, 0), (1, 3)),
        ("w", (2, 0), (2, 3)),
    ]
    assert {i.type for i in items} == {WriteItemType.SHARD}
    assert {tuple(i.tensor_data.size) for i in items} == {(4, 3)}


def test_empty_chunks_are_saved_only_where_the_whole_tensor_is_empty():
    some = LocalShards((4, 3), {(0, 0): torch.ones(0, 3), (2, 0): torch.ones(2, 3)})
    assert [tuple(i.index.offset) for i in some.__create_write_items__("w", some)] == [(2, 0)]
    nothing = LocalShards((0, 3), {(0, 0): torch.ones(0, 3)})
    assert [tuple(i.index.offset) for i in nothing.__create_write_items__("w", nothing)] == [(0, 0)]


def test_a_chunk_is_found_by_its_offsets_and_a_missing_one_is_named():
    chunk = torch.ones(2, 3)
    shards = LocalShards((4, 3), {(2, 0): chunk})
    assert shards.__get_tensor_shard__(MetadataIndex("w", torch.Size((2, 0)))) is chunk
    for offset in (torch.Size((0, 0)), None):
        with pytest.raises(ValueError, match=r"w: this rank holds no chunk at .*; it holds those at \[\(2, 0\)\]"):
            shards.__get_tensor_shard__(MetadataIndex("w", offset))


def test_offsets_and_size_may_be_any_sequence():
    shards = LocalShards(torch.Size([4]), {torch.Size([2]): torch.ones(2)})
    assert list(shards.chunks) == [(2,)]
