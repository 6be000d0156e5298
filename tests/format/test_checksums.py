"""Checksums are zlib's, of whatever pieces they are put together from."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.format.checksums import Check, RunningCheck, block_crcs, combined_crc, crc32, crc_of_blocks
from ray_dcp.format.names import BLOCK_NBYTES

SIZES = [0, 1, 100, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 2 * BLOCK_NBYTES, 3 * BLOCK_NBYTES + 17]


@given(st.binary(), st.binary())
def test_a_crc_is_zlibs_and_goes_on_where_another_one_ended(first, second):
    assert crc32(first) == zlib.crc32(first)
    assert crc32(bytearray(second), crc32(memoryview(first))) == zlib.crc32(first + second)


@given(st.binary(), st.binary())
def test_two_crcs_are_combined_to_that_of_both(first, second):
    assert combined_crc(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("nbytes", SIZES)
def test_blocks_have_a_crc_each_and_together_that_of_the_whole(nbytes, kind):
    content = random.Random(nbytes).randbytes(nbytes)
    crcs = block_crcs(kind(content))
    assert crcs == tuple(zlib.crc32(content[at : at + BLOCK_NBYTES]) for at in range(0, nbytes, BLOCK_NBYTES))
    assert crc_of_blocks(crcs, nbytes) == zlib.crc32(content)


def test_the_crc_of_more_than_four_gib_comes_from_its_blocks():
    """Of zeros, so that it can be had in another way: by doubling."""
    nbytes = (5 << 30) + 3
    crcs = [zlib.crc32(bytes(BLOCK_NBYTES))] * (nbytes // BLOCK_NBYTES) + [zlib.crc32(bytes(3))]
    doubled, length = crcs[0], BLOCK_NBYTES
    while length < 1 << 32:
        doubled, length = combined_crc(doubled, doubled, length), 2 * length
    rest = zlib.crc32(bytes(3), zlib.crc32(bytes(BLOCK_NBYTES)))
    for _ in range((nbytes - length) // BLOCK_NBYTES):
        doubled, length = combined_crc(doubled, crcs[0], BLOCK_NBYTES), length + BLOCK_NBYTES
    assert crc_of_blocks(crcs, nbytes) == combined_crc(doubled, crcs[-1], 3)
    assert rest == crc_of_blocks([crcs[0], crcs[-1]], BLOCK_NBYTES + 3)


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20), st.lists(st.integers(0, 59)), st.integers(0, 59))
def test_damage_is_found_in_its_block_however_the_bytes_pass(content, block_nbytes, cuts, at):
    blocks = [content[start : start + block_nbytes] for start in range(0, len(content), block_nbytes)]
    by_blocks = Check(len(content), tuple(map(zlib.crc32, blocks)), block_nbytes)
    assert by_blocks.is_complete
    assert not Check(len(content), by_blocks.crcs[1:], block_nbytes).is_complete
    assert [(start, nbytes) for start, nbytes, _ in by_blocks.blocks()] == [
        (number * block_nbytes, len(block)) for number, block in enumerate(blocks)
    ]
    at %= len(content)
    damaged = bytearray(content)
    damaged[at] ^= 1
    start = at // block_nbytes * block_nbytes
    places = {by_blocks: (start, min(block_nbytes, len(content) - start)), Check(len(content), None): None,
              Check.of_whole(len(content), zlib.crc32(content)): (0, len(content))}  # fmt: skip
    bounds = sorted({0, len(content), *(cut % len(content) for cut in cuts)})
    for check, place in places.items():
        for stored, found in ((content, None), (damaged, place)):
            passing = RunningCheck(check)
            seen = [passing.damage(memoryview(stored)[a:b], a) for a, b in itertools.pairwise(bounds)]
            assert next(filter(None, seen), None) == found
            assert check.damage(memoryview(stored)) == found


def test_a_part_is_checked_from_block_to_block():
    content = random.Random(0).randbytes(100)
    check = Check(100, tuple(zlib.crc32(content[at : at + 16]) for at in range(0, 100, 16)), 16)
    assert check.damage(memoryview(content)[32:64], 32) is None
    assert check.damage(memoryview(content)[96:], 96) is None
    assert check.damage(memoryview(content)[32:64], 16) == (16, 16)
    assert check.needs_all is False
    assert Check.of_whole(100, 0).needs_all
