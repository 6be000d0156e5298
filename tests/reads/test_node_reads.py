"""What ranks read for each other: once, bit for bit, and whatever goes wrong with one of them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_dcp.format.checksums import Check
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.planning.node_sharing import ShareOffer, ShareRules, pack_wants, plan_shares, windows_of
from ray_dcp.progress import Progress, advance, working
from ray_dcp.reads.engine import Lane
from ray_dcp.reads.fill import LargeRead, box_of
from ray_dcp.reads.plan.record_read import RecordRead
from ray_dcp.reads.plan.shape import ReadShape
from ray_dcp.reads.sharing.node_reads import Passing, SharedReads, share_rules, want_of
from ray_dcp.reads.sharing.segment import SEGMENT_PREFIX, NodeMemory
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.parallel import ParallelStore
from ray_dcp.store.store import StoreTraits, traits_of

NUM_MEMBERS = 4
SIZES = ((1500, 1000), (5000, 1001), (1300, 4 * 251))
"""Of int16 records: some three to ten blocks, none of which ends with one."""
NUM_WINDOWS = 4
SHAPE = ReadShape(
    unit_nbytes=BLOCK_NBYTES, piece_nbytes=BLOCK_NBYTES, run_nbytes=4 * BLOCK_NBYTES, max_gap_nbytes=0, num_in_flight=1
)
UNTOUCHED = -1


class BrokenRead(Exception):
    pass


class Scene:
    """Some records; each of four members wants columns of each. ``at_read`` may make the n-th read go wrong."""

    def __init__(self, folder, *, patience_s=60.0, shape=SHAPE):
        torch.manual_seed(0)
        self.sharing = NodeMemory(str(folder), patience_s)
        self.shape = shape
        self.records = [torch.randint(0, 2**15, sizes, dtype=torch.int16) for sizes in SIZES]
        self.lock = threading.Lock()
        self.reads = Counter()
        self.num_reads = Counter()
        wants = [want_of(number, read_of(record, self._boxes(0)[number])) for number, record in enumerate(self.records)]
        rules = ShareRules(min_repeats=3, rank_nbytes=BLOCK_NBYTES)
        offers = [ShareOffer("node", 1 << 40, "token", rules, pack_wants(wants))] * NUM_MEMBERS
        self.share = plan_shares(offers)[0]
        assert len(list(windows_of(self.share))) == NUM_WINDOWS

    def _boxes(self, slot):
        self.targets = getattr(self, "targets", {})
        boxes = []
        for number, record in enumerate(self.records):
            first, end = (record.shape[1] * part // NUM_MEMBERS for part in (slot, slot + 1))
            target = torch.full((record.shape[0], end - first), UNTOUCHED, dtype=torch.int16)
            self.targets[slot, number] = target, record[:, first:end]
            boxes.append([((0, first), target)])
        return boxes

    def at_read(self, slot, count):
        pass

    def at_take(self, slot):
        pass

    def member(self, slot):
        """What it has filled, or what it raises; and how many bytes it read."""

        def read(number, start, into, lane):
            with self.lock:
                self.num_reads[slot] += 1
                count = self.num_reads[slot]
            self.at_read(slot, count)
            advance(len(into))  # as stores do
            into[:] = memoryview(self.records[number].view(torch.uint8).flatten().numpy())[start : start + len(into)]
            with self.lock:
                self.reads.update(
                    (number, block) for block in range(start // BLOCK_NBYTES, -(-(start + len(into)) // BLOCK_NBYTES))
                )

        scene = self

        class Watched(Passing):
            def take(self, piece, content):
                scene.at_take(slot)
                super().take(piece, content)

        boxes = self._boxes(slot)
        targets = {n: passing(record, boxes[n], Watched) for n, record in enumerate(self.records)}
        shared = SharedReads(self.share, slot, self.sharing, read, self.shape)
        try:
            return shared.fill(targets)
        except BrokenRead as error:
            return error
        finally:
            with self.lock:
                self.num_reads["nbytes"] += shared.nbytes_read

    def run(self):
        """Of each member."""
        with ThreadPoolExecutor(NUM_MEMBERS) as threads:
            return list(threads.map(self.member, range(NUM_MEMBERS)))

    def require_right(self, outcomes):
        """Whatever was said to be filled is right, and nothing of the memory stays."""
        for slot, filled in enumerate(outcomes):
            for number in filled if isinstance(filled, list) else ():
                assert torch.equal(*self.targets[slot, number]), (slot, number)
        assert os.listdir(self.sharing.folder) == []


def read_of(record, wanted):
    """What is read of a record for ``wanted``, pairs of offsets and target."""
    boxes = tuple(box_of(offsets, target, record.dtype) for offsets, target in wanted)
    dtype = str(record.dtype).removeprefix("torch.")
    return RecordRead("file", "w", 0, record.nbytes, Check(record.nbytes, None), dtype, tuple(record.shape), boxes)


def passing(record, wanted, kind=Passing):
    return kind(read_of(record, wanted), [target for _, target in wanted])


EVERYTHING = [0, 1, 2]


@pytest.mark.parametrize("num_in_flight", [1, 3])
def test_each_block_is_read_once_and_all_members_get_theirs(tmp_path, num_in_flight):
    scene = Scene(
        tmp_path,
        shape=ReadShape(
            unit_nbytes=BLOCK_NBYTES,
            piece_nbytes=BLOCK_NBYTES,
            run_nbytes=0,
            max_gap_nbytes=0,
            num_in_flight=num_in_flight,
        ),
    )
    outcomes = scene.run()
    assert outcomes == [EVERYTHING] * NUM_MEMBERS
    scene.require_right(outcomes)
    assert set(scene.reads.values()) == {1}
    assert len(scene.reads) == sum(-(-record.nbytes // BLOCK_NBYTES) for record in scene.records)
    assert scene.num_reads["nbytes"] == sum(record.nbytes for record in scene.records)


def test_a_read_that_fails_anywhere_fails_that_member_and_the_others_know_what_is_missing(tmp_path):
    for fail_at in range(1, 100):
        scene = Scene(tmp_path)

        def break_(slot, count, fail_at=fail_at):
            if (slot, count) == (1, fail_at):
                raise BrokenRead

        scene.at_read = break_
        outcomes = scene.run()
        scene.require_right(outcomes)
        if not any(isinstance(outcome, BrokenRead) for outcome in outcomes):
            break
        assert isinstance(outcomes[1], BrokenRead)
        # One it lacks is the last; what came before the failure may have been taken.
        assert all(2 not in outcomes[slot] for slot in (0, 2, 3))
    assert outcomes == [EVERYTHING] * NUM_MEMBERS
    assert fail_at == NUM_WINDOWS, "one read a window was to fail, and then none"


@pytest.mark.parametrize("stop_at", range(1, NUM_WINDOWS))
@pytest.mark.parametrize("where", ["at_read", "at_take"])
def test_one_that_stands_still_keeps_nobody_and_finds_what_it_expects_when_it_wakes_up(tmp_path, where, stop_at):
    scene = Scene(tmp_path, patience_s=0.3)
    others_are_done, counts = threading.Event(), Counter()

    def stop(slot, *_):
        counts[slot] += 1
        if (slot, counts[slot]) == (1, stop_at):
            assert others_are_done.wait(30)

    setattr(scene, where, stop)
    with ThreadPoolExecutor(NUM_MEMBERS) as threads:
        members = [threads.submit(scene.member, slot) for slot in range(NUM_MEMBERS)]
        outcomes = {slot: members[slot].result(30) for slot in (0, 2, 3)}
        assert not members[1].done()
        others_are_done.set()
        outcomes[1] = members[1].result(30)
    assert outcomes[0] != EVERYTHING
    assert outcomes[1] != EVERYTHING
    scene.require_right([outcomes[slot] for slot in range(NUM_MEMBERS)])


def test_the_name_is_gone_before_anything_is_taken(tmp_path):
    scene, left = Scene(tmp_path), []
    scene.at_take = lambda slot: left.extend(os.listdir(tmp_path))
    scene.require_right(scene.run())
    assert left == [], "a process that is killed from here on would leave it"


def test_what_killed_processes_left_goes_with_the_next_load(tmp_path):
    old = tmp_path / f"{SEGMENT_PREFIX}of another load"
    old.write_bytes(b"x")
    os.utime(old, (0, 0))
    scene = Scene(tmp_path)
    scene.require_right(scene.run())


@pytest.mark.parametrize("where", ["at_read", "at_take"])
def test_a_member_stops_at_once_when_its_load_has_failed_elsewhere(tmp_path, where):
    scene, progress, counts = Scene(tmp_path), Progress(), Counter()

    def interrupt(slot, *_):
        counts[slot] += 1
        if slot == 1:
            progress.interrupt(BrokenRead())

    setattr(scene, where, interrupt)

    def member(slot):
        with working(progress if slot == 1 else Progress(), "read"):
            return scene.member(slot)

    with ThreadPoolExecutor(NUM_MEMBERS) as threads:
        outcomes = list(threads.map(member, range(NUM_MEMBERS)))
    assert isinstance(outcomes[1], BrokenRead)
    assert counts[1] == 1
    scene.require_right(outcomes)


def test_one_that_never_comes_keeps_nobody(tmp_path):
    scene = Scene(tmp_path, patience_s=0.3)
    with ThreadPoolExecutor(NUM_MEMBERS) as threads:
        assert list(threads.map(scene.member, (0, 2, 3))) == [[]] * 3
    assert scene.member(1) == [], "and if it comes after all, it reads by itself"
    assert os.listdir(tmp_path) == []


def test_without_room_nothing_is_shared(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    scene = Scene(tmp_path)
    assert scene.run() == [[]] * NUM_MEMBERS
    assert scene.reads == {}
    scene.require_right([])


@st.composite
def boxes(draw):
    sizes = draw(st.sampled_from([(7, 200_000), (3, 5, 70_000), (2_000_000,), (3000, 700)]))
    chosen = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = [draw(st.integers(0, size - 1)) for size in sizes]
        lengths = [draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
        chosen.append((tuple(offsets), torch.zeros(lengths, dtype=torch.int16)))
    return sizes, chosen


@settings(max_examples=80, deadline=None)
@given(drawn=boxes())
def test_a_rank_wants_just_the_blocks_that_it_would_read(drawn):
    sizes, wanted = drawn
    read = read_of(torch.empty(sizes, dtype=torch.int16), wanted)
    direct = set()

    def note(offset, buffers):
        direct.update(range(offset // BLOCK_NBYTES, -(-(offset + len(buffers[0])) // BLOCK_NBYTES)))

    assume(not read.in_pieces)
    LargeRead(read, [target for _, target in wanted], SHAPE, "c/file").run(note, Lane().memory)
    want = want_of(5, read)
    is_one_run = direct == set(range(min(direct), max(direct) + 1))
    if want is not None:
        assert (want.number, want.nbytes) == (5, read.nbytes)
        assert set(range(want.first, want.end)) == direct
    elif is_one_run:
        # Rows so wide apart that whole blocks lie between them, which other rows then fill: rare, and read as ever.
        assert any(target.shape != sizes for _, target in wanted)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64], ids=str)
@pytest.mark.parametrize("as_dtype", [torch.int16, torch.float32], ids=str)
def test_bytes_that_pass_are_converted_as_a_copy_does(dtype, as_dtype):
    stored = (torch.arange(2 * BLOCK_NBYTES // dtype.itemsize) % 999).to(dtype).view(64, -1)
    target = torch.zeros((64, 100), dtype=as_dtype)
    taken = passing(stored, [((0, 77), target), ((3, 0), torch.empty(0, 5, dtype=dtype))])
    packed = pack_wants([want_of(0, read_of(stored, [((0, 77), target)]))])
    share = plan_shares([ShareOffer("n", 1 << 30, "t", ShareRules(2, 2 * BLOCK_NBYTES), packed)] * 2)[0]
    (window,) = windows_of(share)
    content = memoryview(stored.view(torch.uint8).flatten().numpy())
    for piece in window:
        assert taken.touches(piece)
        taken.take(piece, content[piece.start : piece.end])
    assert torch.equal(target, stored[:, 77:177].to(as_dtype))


def test_a_store_that_reads_through_the_page_cache_has_rules_of_its_own(tmp_path):
    local = share_rules(LocalStore.traits)
    assert local == share_rules(MemoryStore.traits)
    assert local.straight_weight < share_rules(StoreTraits()).straight_weight
    assert share_rules(traits_of(ParallelStore(LocalStore(tmp_path)))) == local
    assert share_rules(StoreTraits()).min_repeats < 2
