"""Memory that ranks of a node share: in step, never overwritten too early, and nothing stays of it."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ray_dcp.progress import Progress, working
from ray_dcp.reads.sharing import segment
from ray_dcp.reads.sharing.segment import SEGMENT_PREFIX, Counter, NodeMemory, SharedSegment, remove_stale
from tests.slack import within

NBYTES = 1 << 16


@pytest.fixture
def sharing(tmp_path):
    """In a folder of its own, which must be empty in the end."""
    folder = tmp_path / "memory"
    folder.mkdir()
    yield NodeMemory(str(folder), patience_s=0.2)
    assert os.listdir(folder) == []


def opened(sharing, slot=0, num_members=2, nbytes=NBYTES):
    return SharedSegment(sharing, "token", num_members=num_members, slot=slot, nbytes=nbytes)


def test_what_one_writes_the_other_sees(sharing):
    with opened(sharing, 0) as first, opened(sharing, 1) as second:
        first.part(100, 3)[:] = b"abc"
        assert bytes(second.memory[99:104]) == b"\0abc\0"
        assert len(second.memory) == NBYTES
        assert not second.everyone_reaches(Counter.READ, 1, [0])
        first.tell(Counter.READ, 1)
        assert second.everyone_reaches(Counter.READ, 1, [0])
        assert second.everyone_reaches(Counter.READ, 0)


def test_the_name_goes_with_whoever_leaves_and_the_memory_stays_for_the_others(sharing):
    with opened(sharing, 1) as second:
        with opened(sharing, 0) as first:
            first.part(0, 1)[:] = b"x"
            assert os.listdir(sharing.folder) == [f"{SEGMENT_PREFIX}token"]
        assert os.listdir(sharing.folder) == []
        assert second.memory[0] == ord("x")


def test_one_that_leaves_before_another_has_come_is_found_out_by_that_one(sharing):
    patient = NodeMemory(sharing.folder, patience_s=60)
    with opened(patient, 0):
        pass
    with opened(patient, 1) as second:
        assert not second.everyone_reaches(Counter.READ, 1)


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_name_goes_when_one_never_comes(sharing, interrupted):
    progress = Progress()
    if interrupted:
        progress.interrupt(InterruptedError("the call has failed"))
    with opened(sharing) as first, working(progress, "read"), suppress(InterruptedError):
        assert not first.everyone_reaches(Counter.SIGNS, 1)
        assert not interrupted


def test_one_that_left_is_not_waited_for_unless_it_got_there_before(sharing):
    patient = NodeMemory(sharing.folder, patience_s=60)
    with opened(patient, 1) as second:
        with opened(patient, 0) as first:
            first.tell(Counter.READ, 2)
        began_s = time.monotonic()
        assert second.everyone_reaches(Counter.READ, 2, [0])
        assert not second.everyone_reaches(Counter.READ, 3, [0])
        assert time.monotonic() - began_s < within(10)


def test_one_that_gives_signs_is_waited_for_beyond_the_patience(sharing):
    sharing = NodeMemory(sharing.folder, patience_s=1)  # a busy machine may stop a thread for a while
    with opened(sharing, 0) as first, opened(sharing, 1) as second, ThreadPoolExecutor(1) as threads:
        waits = threads.submit(second.everyone_reaches, Counter.READ, 1, [0])
        until_s = time.monotonic() + 1.5 * sharing.patience_s
        while time.monotonic() < until_s:
            first.sign()
            time.sleep(0.01)
        assert not waits.done()
        first.tell(Counter.READ, 1)
        assert waits.result(within(10))


def test_one_that_waits_for_a_slow_one_gives_signs_to_those_who_wait_for_it(sharing):
    sharing = NodeMemory(sharing.folder, patience_s=1)
    with (
        opened(sharing, 0, 3) as slow,
        opened(sharing, 1, 3) as between,
        opened(sharing, 2, 3) as last,
        ThreadPoolExecutor(2) as threads,
    ):
        waits = threads.submit(between.everyone_reaches, Counter.READ, 1, [0])
        waits_for_it = threads.submit(last.everyone_reaches, Counter.TAKEN, 1, [1])
        until_s = time.monotonic() + 1.5 * sharing.patience_s
        while time.monotonic() < until_s:
            slow.sign()
            time.sleep(0.01)
        assert not waits_for_it.done()
        slow.tell(Counter.READ, 1)
        assert waits.result(within(10))
        between.tell(Counter.TAKEN, 1)
        assert waits_for_it.result(within(10))


def test_a_rank_that_waits_can_be_interrupted(sharing):
    progress = Progress()
    progress.interrupt(InterruptedError("the call has failed"))
    with opened(sharing, 1), opened(sharing) as first, working(progress, "read"), pytest.raises(InterruptedError):
        first.everyone_reaches(Counter.READ, 1)


def test_no_room_is_an_error_that_the_others_hear_of(sharing, monkeypatch):
    """Only the kernel may say so: what a mapped file has no memory for kills the process that writes it."""
    patient = NodeMemory(sharing.folder, patience_s=60)
    fallocate = os.posix_fallocate

    def full(descriptor, offset, nbytes):
        if threading.current_thread() is not threading.main_thread() and nbytes > 4096:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with opened(patient, 0) as first, ThreadPoolExecutor(1) as threads:
        with pytest.raises(OSError, match="No space"):
            threads.submit(opened, patient, 1).result(within(10))
        assert not first.everyone_reaches(Counter.READ, 1)
        assert first.everyone_reaches(Counter.SIGNS, 1)


def test_a_file_of_another_size_is_refused(sharing):
    with opened(sharing, 0, nbytes=2 * NBYTES), pytest.raises(OSError, match="another size"):
        opened(sharing, 1)


def test_there_is_no_memory_to_share_where_there_is_no_folder(tmp_path):
    nowhere = NodeMemory(str(tmp_path / "nowhere"))
    assert nowhere.memory() is None
    assert nowhere.free_nbytes() == 0


def test_memory_is_named_by_the_mount_and_not_by_the_process(tmp_path):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(NodeMemory().memory) == NodeMemory().memory()
    assert NodeMemory(str(tmp_path)).memory() != NodeMemory("/proc").memory()


def aged(path, age_s):
    os.utime(path, (time.time() - age_s,) * 2)


@pytest.mark.parametrize("left_behind", [True, False])
def test_only_an_old_file_that_nobody_has_open_is_removed(tmp_path, left_behind, caplog):
    path, young = tmp_path / f"{SEGMENT_PREFIX}old", tmp_path / f"{SEGMENT_PREFIX}young"
    for one in (path, young, tmp_path / "other"):
        one.write_bytes(b"x")
    aged(path, segment.STALE_S + 1)
    aged(tmp_path / "other", segment.STALE_S + 1)
    with path.open() as held, caplog.at_level(logging.INFO):
        if not left_behind:
            fcntl.flock(held, fcntl.LOCK_SH)
        remove_stale(str(tmp_path))
    assert path.exists() == (not left_behind)
    assert young.exists()
    assert (tmp_path / "other").exists()
    remove_stale(str(tmp_path / "nowhere"))


def be_a_member(sharing, num_members, slot, num_windows, die_at):
    """Write my number to my place in each window; check that all others' are there."""
    with opened(sharing, slot, num_members) as segment:
        for window in range(num_windows):
            if window == die_at and slot == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if not segment.everyone_reaches(Counter.TAKEN, window):
                raise SystemExit(3)
            segment.part(slot * 8, 8)[:] = (window * num_members + slot).to_bytes(8, "little")
            segment.tell(Counter.READ, window + 1)
            if not segment.everyone_reaches(Counter.READ, window + 1):
                raise SystemExit(3)
            segment.unlink()
            for other in range(num_members):
                seen = int.from_bytes(segment.part(other * 8, 8), "little")
                if seen != window * num_members + other:
                    raise SystemExit(4)
            segment.tell(Counter.TAKEN, window + 1)


@pytest.mark.parametrize("die_at", [None, 0, 7])
def test_processes_keep_step_and_go_their_own_way_when_one_is_killed(sharing, die_at):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)

    def member(slot):
        barrier.wait()
        be_a_member(NodeMemory(sharing.folder, patience_s=1), 3, slot, 200, die_at)

    processes = [context.Process(target=member, args=(slot,)) for slot in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    assert codes == ([0, 0, 0] if die_at is None else [-signal.SIGKILL, 3, 3])
