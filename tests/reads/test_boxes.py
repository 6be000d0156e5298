"""Reading a box out of a stored chunk: equal to slicing, in pieces of bounded size, never out of bounds."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp as dcp
import ray_dcp.reads.plan.record_read
from ray_dcp import LocalShards
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.checksums import Check
from ray_dcp.format.manifest import Entry, as_table
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.engine import Lane
from ray_dcp.reads.fill import LargeRead, box_of
from ray_dcp.reads.plan.record_read import RecordRead
from ray_dcp.reads.plan.shape import read_shape
from ray_dcp.reads.record_reads import RecordReads
from ray_dcp.reads.wanted import WantedRecord
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import DTYPES, same_bits


def entry_of(tensor: torch.Tensor, block_nbytes: int = BLOCK_NBYTES) -> Entry:
    return Entry(
        fqn="t",
        offsets=(0,) * tensor.dim(),
        sizes=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        file="f",
        record_offset=0,
        record_nbytes=tensor.nbytes,
        payload_offset=0,
        payload_nbytes=tensor.nbytes,
        block_crcs=(0,) * -(-tensor.nbytes // block_nbytes),
        rank=0,
    )


def read_box(payload: Payload, tensor: torch.Tensor, offsets, target: torch.Tensor) -> int:
    """Read a box piece by piece, as one that is not rows; how many bytes it took."""
    check = Check(tensor.nbytes, None, payload.block_nbytes)
    box = dataclasses.replace(box_of(offsets, target, tensor.dtype), is_direct=False)
    dtype = str(tensor.dtype).removeprefix("torch.")
    read = RecordRead("f", "t", 0, tensor.nbytes, check, dtype, tuple(tensor.shape), (box,))
    return LargeRead(read, [target], read_shape(MemoryStore.traits), "c/f").run(payload.fill, Lane().memory)


def sliced(tensor, offsets, lengths):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


class Payload:
    """Bytes as a store gives them, and the ranges that were asked for."""

    def __init__(self, tensor: torch.Tensor, block_nbytes: int) -> None:
        self._content = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        self.block_nbytes = block_nbytes
        self.asked: list[int] = []

    def fill(self, start, buffers):
        (buffer,) = buffers
        nbytes = len(buffer)
        assert start % self.block_nbytes == 0
        assert start + nbytes <= len(self._content)
        assert nbytes % self.block_nbytes == 0 or start + nbytes == len(self._content)
        self.asked.append(nbytes)
        buffer[:] = self._content[start : start + nbytes]


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, [a for a, _ in spans], [b - a for a, b in spans]


@settings(max_examples=300, deadline=None)
@given(boxes(), st.sampled_from(DTYPES), st.sampled_from([1, 2, 5, 100]), st.booleans())
def test_any_box_of_any_shape_equals_slicing(case, dtype, blocks_a_piece, transposed_target):
    shape, offsets, lengths = case
    count = torch.Size(shape).numel()
    tensor = (torch.arange(count * dtype.itemsize) % 2).to(torch.uint8).view(dtype).reshape(shape)
    if dtype != torch.bool:
        tensor = (torch.arange(count * dtype.itemsize) * 37 % 119).to(torch.uint8).view(dtype).reshape(shape)
    target = torch.zeros(lengths[::-1] if transposed_target else lengths).to(dtype)
    target = target.permute(*reversed(range(target.dim()))) if transposed_target and target.dim() else target
    block_nbytes = 16
    payload = Payload(tensor, block_nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_dcp.reads.plan.record_read, "BOX_NBYTES", blocks_a_piece * block_nbytes)
        nbytes = read_box(payload, tensor, offsets, target)
    assert same_bits(target, sliced(tensor, offsets, lengths))
    assert nbytes == sum(payload.asked)
    row = max(shape[-1], 1) * dtype.itemsize if shape else dtype.itemsize
    assert all(asked <= max(blocks_a_piece * block_nbytes, row) + 2 * block_nbytes for asked in payload.asked)


def test_a_box_that_wants_nothing_reads_nothing():
    tensor = torch.arange(12.0).reshape(3, 4)
    payload = Payload(tensor, BLOCK_NBYTES)
    assert read_box(payload, tensor, (1, 1), torch.empty(0, 2)) == 0
    assert payload.asked == []


def test_a_conversion_happens_on_the_way():
    tensor = torch.tensor([1.5, 2.5, 300.0])
    target = torch.zeros(2, dtype=torch.int64)
    read_box(Payload(tensor, BLOCK_NBYTES), tensor, (1,), target)
    assert target.tolist() == [2, 300]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sizes": (4, 3)}, "disagree"),
        ({"sizes": (2, 4)}, "disagree"),
        ({"sizes": (12,)}, "disagree"),
        ({"sizes": None}, "disagree"),
        ({"payload_nbytes": 44}, "disagree"),
        ({"block_crcs": ()}, "disagree"),
        ({"block_crcs": (1, 2)}, "disagree"),
        ({"dtype": "float64"}, "disagree"),
        ({"dtype": "nonsense"}, "dtype 'nonsense'"),
        ({"dtype": "save"}, "dtype 'save'"),
        ({"dtype": None}, "dtype None"),
    ],
    ids=str,
)
def test_an_entry_that_does_not_fit_the_metadata_is_refused_and_nothing_is_filled(wrong, words):
    tensor = torch.arange(12.0).reshape(3, 4)
    target = torch.full((1, 4), 7.0)
    entry = dataclasses.replace(entry_of(tensor), **wrong)
    store = MemoryStore("memory://box")
    reads = RecordReads(CheckpointFiles(store, "c"), {}, shape=read_shape(store.traits), unchecked=False)
    item = types.SimpleNamespace(storage_offsets=torch.Size((2, 0)))
    wanted = WantedRecord("f", 0, entry.payload_nbytes, [item], None, as_table([entry]), 0)
    with pytest.raises(CorruptCheckpointError, match=words) as caught:
        reads.large_read(wanted, [target])
    assert caught.value.file == "c/f"
    assert bool((target == 7).all())


def test_a_large_chunk_is_read_in_pieces_of_bounded_size(tmp_path, monkeypatch):
    values = torch.arange(3 * 2**20, dtype=torch.int32).reshape(3, 1024, 1024)  # rows of 4 blocks
    dcp.save({"w": values}, checkpoint_id=tmp_path, no_dist=True)
    asked = []
    get_into = LocalStore._read_into

    def recording(self, key, descriptor, offset, buffers):
        asked.append(sum(map(len, buffers)))
        get_into(self, key, descriptor, offset, buffers)

    monkeypatch.setattr(LocalStore, "_read_into", recording)
    monkeypatch.setattr(ray_dcp.reads.plan.record_read, "BOX_NBYTES", 2 * BLOCK_NBYTES)
    offsets, lengths = (1, 100, 7), (2, 900, 600)
    template = {"w": LocalShards(values.shape, {offsets: torch.zeros(lengths, dtype=torch.int32)})}
    report = dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(template["w"].chunks[offsets], sliced(values, offsets, lengths))
    assert len(asked) >= 4
    assert max(asked) <= 3 * BLOCK_NBYTES
    assert report.nbytes_read == sum(asked)


def test_ranks_that_share_a_chunk_by_rows_read_it_once_between_them(tmp_path):
    values = torch.arange(2 * 2**20, dtype=torch.int32).reshape(2048, 1024)  # 8 MiB in one stored chunk
    dcp.save({"w": values}, checkpoint_id=tmp_path, no_dist=True)
    spans = [(rank * 256, 256) for rank in range(8)]
    templates = [
        {"w": LocalShards(values.shape, {(a, 0): torch.zeros((n, 1024), dtype=torch.int32)})} for a, n in spans
    ]
    reports = require_no_errors(ThreadRanks(8).load(templates, tmp_path))
    assert all(torch.equal(t["w"].chunks[a, 0], values[a : a + n]) for t, (a, n) in zip(templates, spans, strict=True))
    assert sum(report.nbytes_read for report in reports) <= 1.2 * values.nbytes
