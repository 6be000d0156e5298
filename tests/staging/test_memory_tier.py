"""The memory tier offers a sealed file until a newer attempt is committed, and never for bytes that are not there."""

from __future__ import annotations

import mmap

import pytest

from ray_dcp.format.names import ShardFile
from ray_dcp.staging.buffer_errors import StagingLostError
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.staging.memory_tier import MemoryTier
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.staging.own_process import descriptors

PAGE = mmap.PAGESIZE


def key_of(number: int, rank: int = 0) -> str:
    """The shard file of a rank in the attempt that is the ``number``-th to begin."""
    return ShardFile(rank, 0, f"{number + 1:016x}{'ab' * 4}").key


@pytest.fixture
def tier():
    before = descriptors()
    tier = MemoryTier()
    yield tier
    tier.close()
    assert descriptors() == before


@pytest.fixture
def pool(tier):
    pool = BufferPool(spares_newest=True)
    yield pool
    pool.close()


def stage(pool: BufferPool, tier: MemoryTier, number: int, rank: int = 0, place: str = "/a") -> SharedBuffer:
    """A rank stages the file of an attempt, and the agent seals it and keeps it."""
    buffer = pool.take(PAGE)
    buffer.memory[:8] = bytes([number + 1] * 8)
    tier.keep(rank, place, key_of(number, rank), 8, buffer, buffer.version)
    pool.give_back(buffer)
    return buffer


def keys(tier: MemoryTier, place: str = "/a") -> list[str]:
    return [file.key for file in tier.held(place)]


def test_a_file_outlives_the_process_that_staged_it(pool, tier):
    stage(pool, tier, 0)
    pool.close()
    (file,) = tier.held("/a")
    with SharedBuffer.attach(file.buffer, writable=False) as buffer:
        assert (bytes(buffer.memory[: file.nbytes]), buffer.version) == (bytes([1] * 8), file.version)
    assert tier.held("/b") == ()


def test_the_file_before_is_kept_until_the_newer_one_is_committed(pool, tier):
    for number in (0, 1):
        stage(pool, tier, number)
    assert keys(tier) == [key_of(0), key_of(1)]
    tier.committed(key_of(1))
    assert keys(tier) == [key_of(1)]


def test_what_other_ranks_have_of_an_attempt_goes_and_stays_with_it(pool, tier):
    stage(pool, tier, 0, rank=3)
    stage(pool, tier, 1, rank=0)
    tier.committed(key_of(1, rank=7))
    assert keys(tier) == [key_of(1)]
    tier.committed(key_of(0))
    assert keys(tier) == [key_of(1)], "a commit of an older attempt that comes late"


def test_a_file_is_dropped_before_its_buffer_is_overwritten(pool, tier):
    for number in (0, 1):
        stage(pool, tier, number)
    taken = pool.take(PAGE)
    assert bytes(taken.memory[:8]) == bytes([1] * 8), "nothing is written yet"
    assert keys(tier) == [key_of(1)]
    pool.give_back(taken)


def test_a_reader_of_a_buffer_that_is_taken_sees_it(pool, tier):
    stage(pool, tier, 0)
    (file,) = tier.held("/a")
    with SharedBuffer.attach(file.buffer, writable=False) as buffer:
        taken = [pool.take(PAGE)]  # of which there is one more
        assert buffer.version == file.version
        taken.append(pool.take(PAGE))
        assert buffer.version != file.version
    assert tier.held("/a") == ()
    with pytest.raises(StagingLostError):
        SharedBuffer.attach(file.buffer)
    for one in taken:
        pool.give_back(one)


def test_thirty_saves_keep_no_more_than_the_buffers_there_are(pool, tier):
    opened = set()
    for number in range(30):
        stage(pool, tier, number)
        tier.committed(key_of(number))
        assert keys(tier) == [key_of(number)]
        opened.add(len(descriptors()))
    assert len(opened) == 2
    assert pool.nbytes == 2 * PAGE


def test_a_file_that_is_sealed_again_is_kept_once(pool, tier):
    buffer = stage(pool, tier, 0)
    tier.keep(0, "/a", key_of(0), 8, buffer, buffer.version)
    assert keys(tier) == [key_of(0)]


def test_a_group_whose_ranks_have_all_left_asks_for_nothing_later(pool, tier):
    assert not tier.is_for_later
    for rank in (0, 1):
        stage(pool, tier, 0, rank=rank)
    tier.left(0)
    assert tier.is_for_later
    tier.left(1)
    assert not tier.is_for_later
    tier.held("/a")
    assert tier.is_for_later, "ranks are there again"
    tier.all_left()
    assert not tier.is_for_later
    stage(pool, tier, 1, rank=1)
    assert tier.is_for_later
