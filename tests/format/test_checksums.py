"""Checksums are zlib's, of whatever pieces they are put together from."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.format.checksums import block_crcs, combined_crc, crc32, crc_of_blocks
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
