"""Staging buffers are used in turns: no new memory from save to save, and never two saves in one."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from ray_dcp.errors import ForkedProcessError
from ray_dcp.staging.buffer_errors import StagingBusyError, StagingLostError, StagingMemoryError
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.staging.own_process import descriptors, in_fork

PAGE = mmap.PAGESIZE


@pytest.fixture
def pool():
    pool = BufferPool()
    yield pool
    pool.close()


def is_there(buffer: SharedBuffer) -> bool:
    try:
        SharedBuffer.attach(buffer.name).close()
    except StagingLostError:
        return False
    return True


def shared_nbytes() -> int:
    """Shared memory in this process's page table."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem"))


def test_two_are_used_in_turns_from_save_to_save(pool):
    before, inodes, sizes = descriptors(), set(), set()
    last = None
    for number in range(30):
        buffer = pool.take(50 * PAGE - number)
        inodes.add(buffer.name.inode)
        if last is not None:
            pool.give_back(last)
        last = buffer
        sizes.add((len(descriptors() - before), shared_nbytes()) if number > 2 else None)
    assert len(inodes) == 2
    assert len(sizes) == 2, "neither descriptors nor memory grow"
    assert pool.nbytes == 2 * 50 * PAGE


def test_a_buffer_has_what_is_needed_in_whole_pages(pool):
    assert pool.take(3 * PAGE + 1).nbytes == 4 * PAGE
    assert pool.take(0).nbytes == PAGE


def test_all_pages_of_a_new_buffer_are_there(pool):
    before = shared_nbytes()
    pool.prepare(100 * PAGE)
    assert shared_nbytes() - before == 200 * PAGE
    assert pool.nbytes == 200 * PAGE


def test_what_is_prepared_is_what_is_taken(pool, monkeypatch):
    pool.prepare(10 * PAGE)
    monkeypatch.setattr(SharedBuffer, "create", None)
    assert pool.take(10 * PAGE) is not pool.take(9 * PAGE)


def test_to_prepare_again_takes_nothing_and_leaves_out_what_is_in_use(pool):
    pool.prepare(10 * PAGE)
    taken = pool.take(PAGE)
    pool.prepare(20 * PAGE)
    assert taken.nbytes == 10 * PAGE
    assert pool.nbytes == (10 + 21) * PAGE
    pool.prepare(20 * PAGE)
    assert pool.nbytes == (10 + 21) * PAGE


class TestGrowth:
    def test_a_larger_layout_replaces_a_buffer_whose_memory_is_given_back_first(self, pool, monkeypatch):
        small = pool.take(10 * PAGE)
        pool.give_back(small)
        there = []
        create = SharedBuffer.create
        monkeypatch.setattr(SharedBuffer, "create", lambda nbytes: (there.append(is_there(small)), create(nbytes))[1])
        large = pool.take(40 * PAGE)
        assert there == [False]
        assert pool.nbytes == large.nbytes == 42 * PAGE, "a twentieth to grow on"

    def test_room_to_grow_is_left_out_where_there_is_no_memory_for_it(self, pool, monkeypatch):
        pool.give_back(pool.take(PAGE))
        create, asked = SharedBuffer.create, []

        def create_a_little(nbytes):
            asked.append(nbytes)
            if nbytes > 40 * PAGE:
                raise StagingMemoryError(nbytes=nbytes, available_nbytes=40 * PAGE, reason="it would not fit")
            return create(nbytes)

        monkeypatch.setattr(SharedBuffer, "create", create_a_little)
        assert pool.take(40 * PAGE).nbytes == 40 * PAGE
        assert asked == [42 * PAGE, 40 * PAGE]

    def test_less_fits_into_what_is_there_and_the_smallest_that_fits_is_taken(self, pool):
        large, small = pool.take(40 * PAGE), pool.take(10 * PAGE)
        pool.give_back(large)
        pool.give_back(small)
        assert pool.take(5 * PAGE) is small
        assert pool.take(5 * PAGE) is large

    def test_the_smaller_of_two_is_replaced(self, pool):
        large, small = pool.take(40 * PAGE), pool.take(10 * PAGE)
        pool.give_back(large)
        pool.give_back(small)
        pool.take(50 * PAGE)
        assert not is_there(small)
        assert is_there(large)

    def test_a_buffer_that_cannot_be_made_leaves_its_place(self, pool):
        taken = pool.take(PAGE)
        with pytest.raises(StagingMemoryError):
            pool.take(1 << 50)
        assert pool.take(PAGE) is not taken

    def test_what_cannot_be_used_is_closed(self):
        before, made = descriptors(), []

        def refuse(buffer):
            made.append(buffer)
            raise OSError("cannot be pinned")

        pool = BufferPool(on_new=refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="cannot be pinned"):
                pool.take(PAGE)
        made.clear()
        assert descriptors() == before


class TestWaiting:
    def test_a_third_waits_until_one_comes_back(self, pool):
        first, _, got = pool.take(PAGE), pool.take(PAGE), []
        looked = threading.Event()
        thread = threading.Thread(target=lambda: got.append(pool.take(PAGE, look=looked.set)))
        thread.start()
        assert looked.wait(20)
        assert got == []
        pool.give_back(first)
        thread.join(20)
        assert got == [first]

    def test_who_waits_takes_the_place_of_what_is_too_small(self, pool):
        first, _, got = pool.take(PAGE), pool.take(PAGE), []
        thread = threading.Thread(target=lambda: got.append(pool.take(5 * PAGE)))
        thread.start()
        pool.give_back(first)
        thread.join(20)
        assert got[0].nbytes >= 5 * PAGE

    def test_who_waits_for_too_long_is_told(self, pool):
        pool.take(PAGE)
        pool.take(PAGE)
        with pytest.raises(StagingBusyError, match=r"all 2 staging buffers were in use for 0.01 s") as raised:
            pool.take(PAGE, timeout_s=0.01)
        assert (raised.value.num_buffers, raised.value.waited_s) == (2, 0.01)

    def test_who_waits_can_be_interrupted(self, pool):
        pool.take(PAGE)
        pool.take(PAGE)

        def look():
            raise KeyError("the save has failed elsewhere")

        with pytest.raises(KeyError, match="elsewhere"):
            pool.take(PAGE, look=look)

    def test_many_threads_never_have_one_buffer_at_once(self):
        pool, wrong = BufferPool(3), []

        def use(thread):
            for number in range(200):
                buffer = pool.take((thread + number) % 7 * PAGE)
                buffer.memory[0] = thread
                if buffer.memory[0] != thread:
                    wrong.append(number)
                pool.give_back(buffer)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert pool.nbytes <= 3 * 7 * PAGE
        pool.close()


class TestWrongUse:
    def test_to_give_back_twice(self, pool):
        buffer = pool.take(PAGE)
        pool.give_back(buffer)
        with pytest.raises(AssertionError, match="once"):
            pool.give_back(buffer)

    def test_to_give_back_another_s(self, pool):
        with SharedBuffer.create(PAGE) as foreign, pytest.raises(AssertionError, match="from"):
            pool.give_back(foreign)

    def test_a_fork_is_refused_and_does_no_harm(self, pool):
        pool.give_back(pool.take(PAGE))

        def work():
            with pytest.raises(ForkedProcessError):
                pool.take(PAGE)
            pool.close()
            os._exit(0)

        assert in_fork(work) == 0
        assert is_there(pool.take(PAGE))


def test_a_closed_pool_has_nothing_and_closes_what_comes_back():
    before, pool = descriptors(), BufferPool()
    pool.prepare(PAGE)
    buffer = pool.take(PAGE)
    pool.close()
    assert is_there(buffer)
    pool.give_back(buffer)
    pool.close()
    assert not is_there(buffer)
    assert descriptors() == before


def test_what_was_given_back_last_stays_as_it_is_while_another_can_be_had():
    pool, versions = BufferPool(spares_newest=True), []
    inodes, newest = set(), None
    for number in range(6):
        buffer = pool.take(10 * PAGE)
        if newest is not None:
            assert newest.version == versions[-1]
            assert bytes(newest.memory[:4]) == bytes([number - 1] * 4)
        buffer.memory[:4] = bytes([number] * 4)
        versions.append(buffer.version)
        inodes.add(buffer.name.inode)
        newest = buffer
        pool.give_back(buffer)
    assert (len(inodes), len(set(versions))) == (2, 6)
    pool.close()


def test_to_prepare_leaves_what_is_there():
    pool = BufferPool(spares_newest=True)
    newest = pool.take(10 * PAGE)
    version = newest.version
    pool.give_back(newest)
    pool.prepare(10 * PAGE)
    assert newest.version == version
    assert pool.take(10 * PAGE) is not newest
    assert pool.take(10 * PAGE) is newest
    assert newest.version != version
    pool.close()


@pytest.mark.parametrize("nbytes", [10 * PAGE, 11 * PAGE], ids=["it is large enough", "it is too small"])
def test_what_was_given_back_last_is_taken_where_there_is_no_memory_for_another(monkeypatch, nbytes):
    pool = BufferPool(spares_newest=True)
    newest = pool.take(10 * PAGE)
    pool.give_back(newest)
    create = SharedBuffer.create

    def create_where_nothing_else_is(nbytes):
        if pool.nbytes:
            raise StagingMemoryError(nbytes=nbytes, available_nbytes=0, reason="it would not fit")
        return create(nbytes)

    monkeypatch.setattr(SharedBuffer, "create", create_where_nothing_else_is)
    taken = pool.take(nbytes)
    assert (taken is newest) == (nbytes <= 10 * PAGE)
    assert taken.nbytes >= nbytes
    pool.close()


@pytest.mark.parametrize("spares_newest", [False, True])
def test_room_is_asked_for_where_there_is_none_and_it_is_tried_again(monkeypatch, spares_newest):
    create, asked = SharedBuffer.create, []

    def create_where_room_was_made(nbytes):
        if pool.nbytes and not asked:
            raise StagingMemoryError(nbytes=nbytes, available_nbytes=0, reason="it would not fit")
        return create(nbytes)

    pool = BufferPool(spares_newest=spares_newest, make_room=lambda: asked.append(True))
    first = pool.take(10 * PAGE)
    monkeypatch.setattr(SharedBuffer, "create", create_where_room_was_made)
    assert pool.take(10 * PAGE) is not first
    assert asked == [True]
    pool.close()


def test_a_version_is_seen_by_all_who_have_the_buffer_open_and_stays_with_its_memory():
    with SharedBuffer.create(3 * PAGE + 1) as made, SharedBuffer.attach(made.name, writable=False) as reader:
        kept = made.kept_open()
        before = made.version
        assert (reader.version, kept.version) == (before, before)
        made.renew()
        assert made.version == reader.version == kept.version != before
        made.memory[-1] = 7
        assert (reader.memory[-1], made.version) == (7, reader.version)
        with pytest.raises(TypeError, match="read-only"):
            reader.memory[0] = 1
        made.close()
        with SharedBuffer.attach(kept.name) as again:
            assert (again.memory[-1], again.version) == (7, kept.version)
        kept.close()
        with pytest.raises(StagingLostError):
            SharedBuffer.attach(kept.name)


class TestABudget:
    def test_one_buffer_more_than_it_allows_is_waited_for(self, pool):
        first = pool.take(10 * PAGE, max_nbytes=15 * PAGE)
        with pytest.raises(StagingBusyError):
            pool.take(10 * PAGE, max_nbytes=15 * PAGE, timeout_s=0.01)
        taken = []
        waiting = threading.Thread(target=lambda: taken.append(pool.take(10 * PAGE, max_nbytes=15 * PAGE)))
        waiting.start()
        pool.give_back(first)
        waiting.join(60)
        assert taken == [first]
        assert pool.nbytes == 10 * PAGE

    def test_two_that_it_allows_are_used_in_turns(self, pool):
        first, second = (pool.take(10 * PAGE, max_nbytes=20 * PAGE) for _ in range(2))
        assert first is not second
        assert pool.nbytes == 20 * PAGE

    def test_free_ones_make_room_for_a_larger_one(self, pool):
        for buffer in [pool.take(5 * PAGE) for _ in range(2)]:
            pool.give_back(buffer)
        larger = pool.take(12 * PAGE, max_nbytes=12 * PAGE)
        assert pool.nbytes == larger.nbytes == 12 * PAGE

    def test_what_was_given_back_last_makes_room_too(self):
        pool = BufferPool(spares_newest=True)
        newest = pool.take(10 * PAGE)
        pool.give_back(newest)
        assert pool.take(10 * PAGE, max_nbytes=15 * PAGE) is newest
        pool.give_back(newest)
        assert pool.take(10 * PAGE, max_nbytes=20 * PAGE) is not newest
        pool.close()

    def test_one_that_is_more_by_itself_is_refused_by_name(self, pool):
        with pytest.raises(StagingMemoryError, match="RAY_DCP_STAGING_NBYTES") as refused:
            pool.take(10 * PAGE + 1, max_nbytes=10 * PAGE)
        assert (refused.value.nbytes, refused.value.available_nbytes) == (10 * PAGE + 1, 10 * PAGE)
        assert pool.nbytes == 0
