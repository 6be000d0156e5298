"""Stored bytes into tensors: bit for bit, each block checked, nothing else touched."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.checksums import Check
from ray_dcp.reads.engine import Lane
from ray_dcp.reads.fill import LargeRead, box_of, is_direct, put_small
from ray_dcp.reads.plan.record_read import RecordRead
from ray_dcp.reads.plan.rows import rows_of
from ray_dcp.reads.plan.shape import ReadShape
from tests.shardings import DTYPES, same_bits

IN_FRONT = 24
"""Bytes of the file before the payload."""


def values(sizes, dtype) -> torch.Tensor:
    count = torch.Size(sizes).numel() * dtype.itemsize
    bits = torch.arange(count, dtype=torch.int64) * 37 % (2 if dtype == torch.bool else 119)
    return bits.to(torch.uint8).view(dtype).reshape(sizes)


def payload_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sliced(tensor, offsets, lengths):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


class File:
    """A payload in a file, by what it is checked, and what was read of it."""

    def __init__(self, tensor: torch.Tensor, checked_by: str, block_nbytes: int) -> None:
        self.payload = bytearray(payload_of(tensor))
        self.read: list[tuple[int, int]] = []
        blocks = [self.payload[at : at + block_nbytes] for at in range(0, len(self.payload), block_nbytes)]
        self.tensor = tensor
        self.check = {
            "blocks": Check(tensor.nbytes, tuple(map(zlib.crc32, blocks)), block_nbytes),
            "whole": Check.of_whole(tensor.nbytes, zlib.crc32(self.payload)),
            "nothing": Check(tensor.nbytes, None, block_nbytes),
        }[checked_by]

    def read_of(self, wanted):
        """What is read of it for ``wanted``, pairs of offsets and target."""
        tensor, dtype = self.tensor, str(self.tensor.dtype).removeprefix("torch.")
        boxes = tuple(box_of(offsets, target, tensor.dtype) for offsets, target in wanted)
        return RecordRead("f", "t", IN_FRONT, tensor.nbytes, self.check, dtype, tuple(tensor.shape), boxes)

    def fill_all(self, wanted, unit_nbytes, piece_nbytes):
        """Read all of ``wanted``; how many bytes it took."""
        shape = shape_of(unit_nbytes, piece_nbytes)
        large = LargeRead(self.read_of(wanted), [target for _, target in wanted], shape, "c/f")
        return large.run(self.fill, Lane().memory)

    def put_small(self, wanted, content):
        put_small(self.read_of(wanted), "c/f", [target for _, target in wanted], content)

    def fill(self, offset, buffers):
        (buffer,) = buffers
        at = offset - IN_FRONT
        assert 0 <= at <= at + len(buffer) <= len(self.payload)
        self.read.append((at, at + len(buffer)))
        buffer[:] = self.payload[at : at + len(buffer)]


def shape_of(unit_nbytes, piece_nbytes):
    return ReadShape(
        unit_nbytes=unit_nbytes, piece_nbytes=piece_nbytes, run_nbytes=0, max_gap_nbytes=0, num_in_flight=1
    )


@st.composite
def boxes(draw, sizes):
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in sizes]
    return tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


@st.composite
def reads(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    wanted = [box for box in draw(st.lists(boxes(sizes), min_size=1, max_size=3)) if rows_of(sizes, *box)]
    return sizes, wanted


PIECES = (16, 32, 48, 64, 192)
"""A quarter and half a block, a length that divides none, whole blocks."""
CHECKED_BY = ("blocks", "whole", "nothing")


@settings(max_examples=400, deadline=None)
@given(
    reads(),
    st.sampled_from(DTYPES),
    st.sampled_from(CHECKED_BY),
    st.sampled_from([32, 64, 128, 320, 4096]),
    st.sampled_from(PIECES),
)
def test_any_boxes_are_read_as_slicing_has_them_and_nothing_else_is_touched(case, dtype, checked_by, unit, piece):
    sizes, wanted = case
    tensor = values(sizes, dtype)
    file = File(tensor, checked_by, 64)
    around = [torch.full((torch.Size(lengths).numel() + 2,), 1).to(dtype) for _, lengths in wanted]
    before = [payload_of(one) for one in around]
    targets = [one[1:-1].view(lengths) for one, (_, lengths) in zip(around, wanted, strict=True)]
    pairs = [(offsets, target) for (offsets, _), target in zip(wanted, targets, strict=True)]
    nbytes = file.fill_all(pairs, unit, piece)
    ranges = file.read_of(pairs).ranges(shape_of(unit, piece))
    assert [(a - IN_FRONT, b - IN_FRONT) for a, b in ranges] == file.read, "what is read is what the plan says"
    assert all(same_bits(t, sliced(tensor, *box)) for t, box in zip(targets, wanted, strict=True))
    for one, was in zip(around, before, strict=True):
        assert payload_of(one)[: dtype.itemsize] == was[: dtype.itemsize]
        assert payload_of(one)[-dtype.itemsize :] == was[-dtype.itemsize :]
    assert nbytes == sum(end - start for start, end in file.read)
    assert all(end - start <= max(piece, unit) for start, end in file.read)
    if piece % 64 == 0 and unit % 64 == 0:
        assert all(start % 64 == 0 for start, _ in file.read)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(CHECKED_BY), st.booleans(), st.booleans())
def test_small_payloads_are_put_as_slicing_has_them(data, dtype, checked_by, transposed, other_dtype):
    sizes = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    wanted = data.draw(st.lists(boxes(sizes), min_size=1, max_size=3)) if all(sizes) else [((0,) * len(sizes), sizes)]
    wanted.append(((0,) * len(sizes), sizes))
    tensor = values(sizes, dtype)
    file = File(tensor, checked_by, 64)
    kind = torch.complex128 if other_dtype else dtype
    targets = [
        torch.full(lengths[::-1], 1).to(kind).permute(tuple(reversed(range(len(lengths)))))
        if transposed
        else torch.full(lengths, 1).to(kind)
        for _, lengths in wanted
    ]
    file.put_small(
        [(offsets, target) for (offsets, _), target in zip(wanted, targets, strict=True)],
        memoryview(bytearray(b"x") + file.payload)[1:],  # where it lies in a run, it need not be aligned
    )
    expected = [sliced(tensor, *box).to(kind) for box in wanted]
    assert all(same_bits(t, e) for t, e in zip(targets, expected, strict=True))


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_byte_in_any_block_is_found_and_its_block_named(dtype, piece):
    tensor = values((10, 37), dtype)
    for at in range(0, tensor.nbytes, 5):
        file = File(tensor, "blocks", 64)
        file.payload[at] ^= 4
        with pytest.raises(CorruptCheckpointError) as caught:
            file.fill_all([((0, 0), torch.zeros_like(tensor))], 128, piece)
        start = at // 64 * 64
        assert (caught.value.fqn, caught.value.file) == ("t", "c/f")
        assert (caught.value.offset, caught.value.nbytes) == (IN_FRONT + start, min(64, tensor.nbytes - start))
        with pytest.raises(CorruptCheckpointError) as caught:
            file.put_small([((0, 0), torch.zeros_like(tensor))], memoryview(file.payload))
        assert caught.value.offset == IN_FRONT + start


@pytest.mark.parametrize("box", [((0, 0), (10, 37)), ((3, 5), (4, 20)), ((9, 36), (1, 1))])
def test_a_flipped_byte_anywhere_is_found_where_only_the_whole_is_checked(box):
    tensor = values((10, 37), torch.float32)
    offsets, lengths = box
    for at in range(0, tensor.nbytes, 7):
        file = File(tensor, "whole", 64)
        file.payload[at] ^= 128
        with pytest.raises(CorruptCheckpointError) as caught:
            file.fill_all([(offsets, torch.zeros(lengths))], 128, 32)
        assert (caught.value.offset, caught.value.nbytes) == (IN_FRONT, tensor.nbytes)


def test_a_block_that_no_box_needs_is_not_read():
    tensor = values((8, 64), torch.float32)  # four blocks a row
    file = File(tensor, "blocks", 64)
    target = torch.full((8, 3), float("nan"))
    nbytes = file.fill_all([((0, 20), target)], 64, 32)
    assert same_bits(target, tensor[:, 20:23].contiguous())
    assert nbytes == 8 * 64


NO_PLAIN_MEMORY = {
    "conjugate": lambda: torch.ones(1, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.ones(2, 3).t(),
    "other dtype": lambda: torch.ones(3, dtype=torch.float64),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("kind", NO_PLAIN_MEMORY)
def test_a_target_whose_memory_is_not_its_values_is_not_direct(kind):
    target = NO_PLAIN_MEMORY[kind]()
    dtype = torch.float32 if kind in ("other dtype", "meta") else target.dtype
    assert not is_direct(target, dtype)


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_a_lazy_view_gets_the_values_that_were_stored(kind):
    target = NO_PLAIN_MEMORY[kind]()
    stored = torch.full((1,), 5, dtype=target.dtype)
    file = File(stored, "blocks", 64)
    file.put_small([((0,), target)], memoryview(file.payload))
    assert torch.equal(target, stored)


def test_empty_boxes_are_read_from_nothing():
    file = File(values((4, 4), torch.float32), "blocks", 64)
    wanted = [((2, 4), torch.empty(1, 0))]
    assert file.fill_all(wanted, 64, 32) == 0
    file.put_small(wanted, memoryview(file.payload))
    assert file.read == []
