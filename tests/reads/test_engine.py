"""Reads of a rank: what is read together, and what happens when one of several fails or is no longer wanted."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp as dcp
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.progress import Progress, StoppedError, advance, working
from ray_dcp.reads import reader
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.engine import Lane, Task, finished, read_run
from ray_dcp.reads.plan.shape import ReadShape, batches, read_shape, runs
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.parallel import ParallelStore
from ray_dcp.store.retry import RetryStore
from ray_dcp.store.store import StoreTraits, as_folders, as_renaming, traits_of


@dataclass(frozen=True)
class Piece:
    offset: int
    nbytes: int
    key: str = "f"

    @property
    def fqn(self) -> str:
        return f"at {self.offset}"


SHAPE = ReadShape(unit_nbytes=10, piece_nbytes=10, run_nbytes=50, max_gap_nbytes=5, num_in_flight=1)


class TestJoined:
    @settings(max_examples=400, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), max_size=20))
    def test_every_part_is_in_one_run_within_the_limits(self, places):
        parts = [Piece(*place) for place in sorted(places)]
        found = list(runs(parts, SHAPE))
        assert [part for run in found for part in run] == parts
        for run in found:
            ends = list(itertools.accumulate((p.offset + p.nbytes for p in run), max))
            assert len(run) == 1 or ends[-1] - run[0].offset <= SHAPE.run_nbytes
            assert all(part.offset - end <= SHAPE.max_gap_nbytes for part, end in zip(run[1:], ends[:-1], strict=True))

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), max_size=20))
    def test_runs_end_only_where_the_next_part_would_break_a_limit(self, places):
        found = list(runs([Piece(*place) for place in sorted(places)], SHAPE))
        for run, after in itertools.pairwise(found):
            end = max(p.offset + p.nbytes for p in run)
            until = max(end, after[0].offset + after[0].nbytes)
            assert after[0].offset - end > SHAPE.max_gap_nbytes or until - run[0].offset > SHAPE.run_nbytes

    def test_parts_that_lie_over_each_other_are_read_once(self):
        parts = [Piece(0, 30), Piece(10, 10), Piece(20, 5), Piece(33, 7)]
        assert list(runs(parts, SHAPE)) == [parts]

    def test_nothing_is_no_run(self):
        assert list(runs([], SHAPE)) == []


class TestReadRun:
    @staticmethod
    def files(content: bytes) -> CheckpointFiles:
        store = MemoryStore("memory://read-run")
        store.put("f", content)
        return CheckpointFiles(store, "memory://read-run")

    def test_the_bytes_of_all_parts_are_at_their_address(self):
        content = bytes(range(100))
        run = [Piece(10, 5), Piece(12, 0), Piece(12, 20), Piece(40, 1)]
        seen: list[bytes] = []

        def use(held: memoryview, address: int) -> None:
            seen.extend((bytes(held), ctypes.string_at(address, len(held))))

        assert read_run(self.files(content), run, use, Lane()) == 31
        assert seen == [content[10:41]] * 2

    def test_the_part_that_is_missing_is_named_and_not_the_first_of_the_run(self):
        run = [Piece(10, 5), Piece(20, 5), Piece(28, 5)]
        with pytest.raises(CorruptCheckpointError, match="ends too early") as caught:
            read_run(self.files(bytes(30)), run, lambda held, address: pytest.fail("not whole"), Lane())
        assert (caught.value.fqn, caught.value.offset, caught.value.nbytes) == ("at 28", 28, 5)

    def test_a_length_that_no_memory_holds_is_damage_of_the_part_that_has_it(self):
        run = [Piece(10, 5), Piece(15, 1 << 61)]
        with pytest.raises(CorruptCheckpointError) as caught:
            read_run(self.files(bytes(30)), run, lambda held, address: None, Lane())
        assert caught.value.fqn == "at 15"

    def test_a_lane_has_its_memory_on_the_host_whatever_the_default_device_is(self):
        with torch.device("meta"):
            assert Lane().memory(5).device.type == "cpu"


def test_a_local_store_is_read_block_by_block_and_a_bucket_with_requests_in_flight(tmp_path):
    bucket = read_shape(traits_of(object()))
    assert read_shape(traits_of(LocalStore(tmp_path))).unit_nbytes < bucket.unit_nbytes
    assert bucket.num_in_flight > 1


def test_a_store_says_itself_how_it_is_read(tmp_path):
    class Mounted(MemoryStore):
        traits = StoreTraits(request_nbytes=5 << 20)

    assert read_shape(traits_of(Mounted("memory://m"))).unit_nbytes == 5 << 20
    wrapped = ParallelStore(RetryStore(LocalStore(tmp_path)))
    assert read_shape(traits_of(wrapped)) == read_shape(traits_of(LocalStore(tmp_path)))
    assert (as_folders(wrapped), as_renaming(wrapped)) == (None, None), "it does not have their methods"


@pytest.mark.parametrize("num_cpus", [1, 2, 7, 8, 16, 64])
def test_threads_that_read_a_gibibyte_all_find_something_to_do(monkeypatch, num_cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cpus)))
    shape = read_shape(LocalStore.traits)
    parts = [Piece(n << 23, 1 << 23) for n in range(128)]
    assert len(list(batches(parts, shape.batch_nbytes))) >= 4 * shape.num_in_flight or shape.num_in_flight == 1


IN_FLIGHT = pytest.mark.parametrize("num", [1, 2, 4])


class TestFinished:
    @IN_FLIGHT
    def test_all_are_carried_out_and_told_with_their_bytes(self, num):
        tasks = (Task(lambda _, n=n: n * 10, n) for n in range(50))
        assert sorted(finished(tasks, num)) == [(n, n * 10) for n in range(50)]

    @IN_FLIGHT
    def test_none_is_none(self, num):
        assert list(finished([], num)) == []

    @IN_FLIGHT
    def test_no_more_run_at_once_than_may_and_no_more_are_taken_than_needed(self, num):
        lock, running, most, taken, done = threading.Lock(), 0, 0, 0, 0
        together = threading.Barrier(num)

        def read(_):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            together.wait(30)  # all of them at once: as many as may do run
            with lock:
                running -= 1
            return 1

        def tasks():
            nonlocal taken
            for _ in range(num * 10):
                taken += 1
                assert taken - done <= num + 1
                yield Task(read, None)

        for _ in finished(tasks(), num):
            done += 1
        assert (most, done) == (num, num * 10)

    @IN_FLIGHT
    def test_a_lane_is_used_by_one_at_a_time_and_again(self, num):
        lock, in_use, seen = threading.Lock(), set(), []

        def read(lane):
            with lock:
                assert id(lane) not in in_use
                in_use.add(id(lane))
                seen.append(lane)
            lane.memory(100).fill_(1)
            with lock:
                in_use.remove(id(lane))
            return 1

        list(finished((Task(read, None) for _ in range(60)), num))
        assert len({id(lane) for lane in seen}) <= num

    @IN_FLIGHT
    def test_the_first_failure_ends_all_and_is_raised(self, num):
        begun = []

        def read(number):
            begun.append(number)
            if number == 5:
                raise CorruptCheckpointError("damaged", file="f")
            return 1

        tasks = (Task(lambda _, n=n: read(n), n) for n in range(1000))
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            list(finished(tasks, num))
        assert len(begun) < 5 + 3 * (num + 1)
        count = len(begun)
        assert next(tasks).done <= count + num  # and no more of them were taken

    def test_those_under_way_when_one_fails_are_stopped_at_their_next_piece_and_over_when_it_is_raised(self):
        under_way, over = threading.Event(), []

        def long(_):
            under_way.set()
            until = time.monotonic() + 60
            try:
                while time.monotonic() < until:
                    advance(1)
            except StoppedError:
                over.append("stopped")
                raise
            return 1

        def failing(_):
            assert under_way.wait(30)
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            list(finished([Task(long, 0), Task(failing, 1), Task(long, 2)], 2))
        assert over in (["stopped"], ["stopped", "stopped"])

    def test_one_that_is_closed_early_reads_nothing_any_more(self):
        ended = 0

        def read(_):
            nonlocal ended
            for _ in range(100):
                advance(1)
            ended += 1
            return 1

        reads = finished((Task(read, None) for _ in range(10_000)), 3)
        next(reads)
        reads.close()
        count = ended
        assert count < 20
        assert not [one for one in threading.enumerate() if one.name.startswith("ray_dcp_read") and one.is_alive()]
        assert ended == count

    def test_a_failure_to_make_the_next_task_ends_all_too(self):
        def tasks():
            yield Task(lambda _: 1, 0)
            raise LookupError("the planner has no such tensor")

        with pytest.raises(LookupError, match="no such tensor"):
            list(finished(tasks(), 3))

    @IN_FLIGHT
    def test_progress_counts_for_the_call_of_this_thread(self, num):
        progress = Progress()

        def read(_):
            advance(7)
            return 7

        with working(progress, "read"):
            list(finished((Task(read, None) for _ in range(20)), num))
        assert progress.nbytes == 140

    @IN_FLIGHT
    def test_an_interruption_of_the_call_reaches_whatever_reads(self, num):
        progress = Progress()

        def read(_):
            for _ in range(100_000):
                advance(1)
            return 1

        progress.interrupt(RuntimeError("rank 3 has failed"))
        with working(progress, "read"), pytest.raises(RuntimeError, match="rank 3 has failed"):
            list(finished((Task(read, None) for _ in range(20)), num))

    @IN_FLIGHT
    def test_tensors_that_were_made_in_inference_mode_can_be_filled(self, num):
        with torch.inference_mode():
            targets = [torch.zeros(3) for _ in range(5)]
            tasks = [Task(lambda lane, t=t: t.copy_(lane.memory(3).fill_(2)).numel(), None) for t in targets]
            assert sum(nbytes for _, nbytes in finished(tasks, num)) == 15
        assert all(target.tolist() == [2, 2, 2] for target in targets)


def test_a_planner_that_fails_in_the_middle_leaves_no_reads_behind(tmp_path, monkeypatch):
    """Else they would go on filling tensors that the caller has back."""
    dcp.save({f"w{n}": torch.ones(3 << 18) for n in range(30)}, checkpoint_id=tmp_path, no_dist=True)
    shape = ReadShape(
        unit_nbytes=1 << 20, piece_nbytes=1 << 20, run_nbytes=4 << 20, max_gap_nbytes=1 << 14, num_in_flight=4
    )
    monkeypatch.setattr(reader, "read_shape", lambda store: shape)

    class Failing(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            raise ValueError("no")

    template = {f"w{n}": torch.zeros(3 << 18) for n in range(30)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template, checkpoint_id=tmp_path, planner=Failing(), no_dist=True)
    filled = sum(int(one.sum()) for one in template.values())
    assert not [one for one in threading.enumerate() if one.name.startswith("ray_dcp_read")]
    assert caught.value is not None  # its traceback, which holds the frames, is still there
    assert filled < 30 * (3 << 18)


class TestBatches:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 30), max_size=20), st.integers(0, 40))
    def test_each_but_the_last_is_just_as_long_as_it_has_to_be(self, lengths, nbytes):
        parts = [Piece(n, length) for n, length in enumerate(lengths)]
        found = list(batches(parts, nbytes))
        assert [part for batch in found for part in batch] == parts
        for batch in found[:-1]:
            assert sum(part.nbytes for part in batch) >= nbytes
        for batch in found:
            assert sum(part.nbytes for part in batch[:-1]) < max(1, nbytes) or len(batch) == 1
