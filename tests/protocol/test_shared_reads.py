"""Loads in which the ranks of a node read for each other: every byte once, bit for bit, whatever goes wrong."""

from __future__ import annotations

import logging
import os
import pickle
import threading

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.reads.reader import StoreReader
from ray_dcp.reads.record_reads import RecordReads
from ray_dcp.reads.sharing.segment import NodeMemory
from ray_dcp.settings import Limits
from tests.ranks import ThreadRanks, require_no_errors
from tests.shared_memory import require_none_left
from tests.slack import within
from tests.store.failing import Faults

SHAPE = (4096, 640)
"""10 MiB of float32: each of two ranks writes five blocks of it."""
NAMES = ("a", "b", "c")
NBYTES = len(NAMES) * 4 * SHAPE[0] * SHAPE[1]


def value(name):
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) + NAMES.index(name)


def rows(rank, world_size):
    height = SHAPE[0] // world_size
    return {n: dcp.LocalShards(SHAPE, {(height * rank, 0): value(n)[height * rank :][:height].clone()}) for n in NAMES}


def columns(rank, world_size):
    width = SHAPE[1] // world_size
    return {n: dcp.LocalShards(SHAPE, {(0, width * rank): torch.full((SHAPE[0], width), torch.nan)}) for n in NAMES}


def are_right(template):
    return all(
        torch.equal(chunk, value(name)[at[0] : at[0] + chunk.shape[0], at[1] : at[1] + chunk.shape[1]])
        for name, shards in template.items()
        for at, chunk in shards.chunks.items()
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("rows")
    require_no_errors(ThreadRanks(2).save(lambda rank: rows(rank, 2), place))
    return place


@pytest.fixture
def memory(tmp_path):
    """A folder in place of /dev/shm; nothing may be left in it."""
    folder = tmp_path / "memory"
    folder.mkdir()
    yield folder
    assert os.listdir(folder) == []


def load_sharing(ranks, templates, place, sharing_of):
    """Outcome of each rank; ``sharing_of(rank)`` says how it shares."""
    return ranks.run(
        lambda rank: ranks.load_rank(rank, templates[rank], place, reader=StoreReader(sharing=sharing_of(rank)))
    )


def load_columns(place, sharing, world_size=8):
    """Reports of loads that are right."""
    templates = [columns(rank, world_size) for rank in range(world_size)]
    reports = require_no_errors(load_sharing(ThreadRanks(world_size), templates, place, lambda rank: sharing))
    assert all(map(are_right, templates))
    assert [report.nbytes_loaded for report in reports] == [NBYTES // world_size] * world_size
    return reports


def nbytes_read(reports):
    return sum(report.nbytes_read for report in reports)


def test_columns_of_what_was_saved_by_rows_are_read_once(saved, memory):
    reports = load_columns(saved, NodeMemory(str(memory)))
    assert nbytes_read(reports) == NBYTES
    assert max(report.nbytes_read for report in reports) < 1.5 * NBYTES / 8
    assert nbytes_read(load_columns(saved, None)) == 8 * NBYTES


def test_it_is_so_without_being_asked_for_and_nothing_stays_in_shared_memory(saved):
    templates = [columns(rank, 4) for rank in range(4)]
    assert nbytes_read(require_no_errors(ThreadRanks(4).load(templates, saved))) == NBYTES
    assert all(map(are_right, templates))
    require_none_left()


def test_replicated_values_are_read_once_by_all_ranks_together(saved, memory):
    templates = [{name: torch.full(SHAPE, torch.nan) for name in NAMES} for _ in range(4)]
    reports = require_no_errors(load_sharing(ThreadRanks(4), templates, saved, lambda _: NodeMemory(str(memory))))
    assert nbytes_read(reports) == NBYTES
    assert all(torch.equal(template[name], value(name)) for template in templates for name in NAMES)


@pytest.mark.parametrize("far_away", [False, True], ids=["near", "far away"])
def test_two_ranks_share_blocks_out_of_which_each_takes_rows_and_all_that_is_far_away(saved, memory, far_away):
    sharing = NodeMemory(str(memory))
    place = Faults().url(saved) if far_away else saved  # a scheme of its own: who knows where that leads
    assert nbytes_read(load_columns(place, sharing, 2)) == NBYTES
    whole = [{name: torch.full(SHAPE, torch.nan) for name in NAMES} for _ in range(2)]
    reports = require_no_errors(load_sharing(ThreadRanks(2), whole, place, lambda _: sharing))
    assert nbytes_read(reports) == (NBYTES if far_away else 2 * NBYTES)
    assert all(torch.equal(template[name], value(name)) for template in whole for name in NAMES)


def test_each_node_reads_once(saved, memory):
    templates = [columns(rank, 8) for rank in range(8)]
    reports = require_no_errors(
        load_sharing(ThreadRanks(8), templates, saved, lambda rank: NodeMemory(str(memory), node=f"node {rank % 2}"))
    )
    assert nbytes_read(reports) == 2 * NBYTES
    assert all(map(are_right, templates))


def test_what_is_shared_and_what_is_not_load_together(tmp_path, memory):
    def state(rank):
        return {
            "by rows": rows(rank, 2),
            "replicated": value("a"),
            "turned": value("b"),
            "half": value("c").bfloat16(),
            "small": torch.arange(10.0),
            "scattered": dcp.LocalShards((2, 2**20), {(rank, 0): torch.arange(2.0**20)[None] + rank}),
            "step": 7,
            "of rank": dcp.PerRank(rank, reshard=lambda of_all, *_: sum(of_all)),
        }

    def template(rank):
        return {
            "by rows": columns(rank, 4),
            "replicated": torch.zeros(SHAPE, device="meta"),
            "turned": torch.zeros(SHAPE).t().contiguous().t(),
            "half": torch.zeros(SHAPE, dtype=torch.bfloat16),
            "small": torch.zeros(10),
            "scattered": dcp.LocalShards((2, 2**20), {(0, 5 * rank): torch.zeros(2, 5)}),
            "step": 0,
            "of rank": dcp.PerRank(None, reshard=lambda of_all, *_: sum(of_all)),
        }

    require_no_errors(ThreadRanks(2).save(state, tmp_path / "c"))
    templates = [template(rank) for rank in range(4)]
    reports = require_no_errors(
        load_sharing(ThreadRanks(4), templates, tmp_path / "c", lambda _: NodeMemory(str(memory)))
    )
    for rank, filled in enumerate(templates):
        assert are_right(filled["by rows"])
        assert torch.equal(filled["replicated"], value("a"))
        assert torch.equal(filled["turned"], value("b"))
        assert torch.equal(filled["half"], value("c").bfloat16())
        assert torch.equal(filled["small"], torch.arange(10.0))
        expected = torch.stack([torch.arange(2.0**20), torch.arange(2.0**20) + 1])[:, 5 * rank : 5 * rank + 5]
        assert torch.equal(filled["scattered"].chunks[(0, 5 * rank)], expected)
        assert (filled["step"], filled["of rank"].value) == (7, 1)
    one = value("a").nbytes
    turned_alone = 4 * one
    assert NBYTES + one + one // 2 + turned_alone <= nbytes_read(reports) < 1.02 * (NBYTES + 1.7 * one + turned_alone)


def test_other_dtypes_are_converted_on_the_way(saved, memory):
    templates = [{name: torch.zeros(SHAPE, dtype=torch.float64) for name in NAMES} for _ in range(3)]
    ranks = ThreadRanks(3)
    reports = require_no_errors(
        ranks.run(
            lambda r: ranks.load_rank(
                r, templates[r], saved, cast=True, reader=StoreReader(sharing=NodeMemory(str(memory)))
            )
        )
    )
    assert nbytes_read(reports) == NBYTES
    assert all(torch.equal(template[name], value(name).double()) for template in templates for name in NAMES)


def test_safetensors_files_are_shared_too(tmp_path, memory):
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({name: value(name) for name in NAMES}, tmp_path / "model.safetensors")
    assert nbytes_read(load_columns(tmp_path / "model.safetensors", NodeMemory(str(memory)))) < 1.001 * NBYTES


def test_a_rank_that_does_not_share_reads_by_itself(saved, memory):
    templates = [columns(rank, 8) for rank in range(8)]
    reports = require_no_errors(
        load_sharing(ThreadRanks(8), templates, saved, lambda rank: NodeMemory(str(memory)) if rank else None)
    )
    assert reports[0].nbytes_read == NBYTES
    assert nbytes_read(reports[1:]) == NBYTES
    assert all(map(are_right, templates))


def test_a_reader_of_the_users_own_is_left_alone(saved, memory):
    class OwnReader(StoreReader):
        def read_data(self, plan, planner):
            return super().read_data(plan, planner)

    ranks, templates = ThreadRanks(4), [columns(rank, 4) for rank in range(4)]
    sharing = NodeMemory(str(memory))
    reports = require_no_errors(
        ranks.run(lambda rank: ranks.load_rank(rank, templates[rank], saved, reader=OwnReader(sharing=sharing)))
    )
    assert nbytes_read(reports) == 4 * NBYTES
    assert all(map(are_right, templates))


def test_a_reader_can_be_used_again_by_one_rank_alone(saved, memory):
    ranks, readers = ThreadRanks(4), [StoreReader(sharing=NodeMemory(str(memory))) for _ in range(4)]
    require_no_errors(ranks.run(lambda rank: ranks.load_rank(rank, columns(rank, 4), saved, reader=readers[rank])))
    before = readers[0].nbytes_read
    template = columns(0, 4)
    dcp.load(template, checkpoint_id=saved, storage_reader=readers[0], no_dist=True)
    assert are_right(template)
    assert readers[0].nbytes_read == before + NBYTES


@pytest.mark.parametrize("lacking", ["room", "folder"])
def test_without_shared_memory_every_rank_reads_by_itself(saved, memory, monkeypatch, caplog, lacking):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.INFO):
        sharing = NodeMemory(str(memory) if lacking == "room" else str(memory / "nowhere"))
        assert nbytes_read(load_columns(saved, sharing)) == 8 * NBYTES
    assert ("No space left on device" in caplog.text) == (lacking == "room")


# What goes wrong.


@pytest.fixture
def at_read(monkeypatch):
    """Have something called with (name of the value, start) before each read of shared blocks."""

    def install(hook):
        read_blocks = RecordReads.read_blocks

        def read(self, record, start, into, lane):
            hook(record.fqn, start)
            read_blocks(self, record, start, into, lane)

        monkeypatch.setattr(RecordReads, "read_blocks", read)

    return install


class Once:
    """Lets one caller through, the n-th."""

    def __init__(self, number):
        self.number = number
        self.lock = threading.Lock()

    def __call__(self):
        with self.lock:
            self.number -= 1
            return self.number == 0


@pytest.mark.parametrize("fail_at", [1, 6, 12, 16])
def test_a_store_that_fails_in_one_rank_fails_all_and_the_next_load_is_right(saved, memory, at_read, fail_at):
    due = Once(fail_at)

    def fail(fqn, start):
        if due():
            raise OSError(5, f"Input/output error in {fqn}")

    at_read(fail)
    ranks, sharing = ThreadRanks(8), NodeMemory(str(memory), patience_s=20)
    templates = [columns(rank, 8) for rank in range(8)]
    outcomes = load_sharing(ranks, templates, saved, lambda _: sharing)
    assert all(isinstance(outcome, dcp.CheckpointException) for outcome in outcomes)
    assert all("Input/output error" in str(outcome) for outcome in outcomes)
    assert os.listdir(memory) == []
    require_no_errors(load_sharing(ranks, templates, saved, lambda _: sharing))
    assert all(map(are_right, templates))


def test_a_damaged_block_is_named_with_its_file_and_value_and_gets_nowhere(tmp_path, memory):
    require_no_errors(ThreadRanks(2).save(lambda rank: rows(rank, 2), tmp_path / "c"))
    entries = decode_manifest((tmp_path / "c" / "manifest.parquet").read_bytes(), "m").entries
    entry = next(entry for entry in entries if (entry.fqn, entry.offsets) == ("b", (SHAPE[0] // 2, 0)))
    file = tmp_path / "c" / entry.file
    content = bytearray(file.read_bytes())
    content[entry.payload_offset + 3 * 2**20 + 5] ^= 4
    file.write_bytes(content)
    templates = [columns(rank, 8) for rank in range(8)]
    outcomes = load_sharing(ThreadRanks(8), templates, tmp_path / "c", lambda _: NodeMemory(str(memory), patience_s=20))
    for outcome in outcomes:
        assert isinstance(outcome, dcp.CheckpointException)
        ((failure, _),) = outcome.failures.values()
        assert isinstance(failure, CorruptCheckpointError)
        assert (failure.fqn, failure.file, failure.nbytes) == ("b", str(file), 2**20)
    flipped = value("b").view(torch.int32)
    for template in templates:
        ((at, chunk),) = template["b"].chunks.items()
        loaded = ~torch.isnan(chunk)
        assert torch.equal(chunk.view(torch.int32)[loaded], flipped[:, at[1] : at[1] + chunk.shape[1]][loaded])


def test_a_rank_that_stands_still_is_the_one_that_is_named(saved, memory, at_read):
    wake, blocked, stands_still = threading.Event(), threading.Event(), Once(13)

    def stop(fqn, start):
        if stands_still():
            blocked.rank = threading.current_thread()
            blocked.set()
            assert wake.wait(60)

    at_read(stop)
    ranks = ThreadRanks(8, limits=Limits(stall_timeout_s=within(0.5)))
    who = {}

    def on_rank(rank):
        who[threading.current_thread()] = rank
        reader = StoreReader(sharing=NodeMemory(str(memory), patience_s=0.2))
        try:
            return ranks.load_rank(rank, columns(rank, 8), saved, reader=reader)
        finally:
            if threading.current_thread() is not blocked.rank:
                wake.set()  # the others have failed: the one that stands still may go on

    done = threading.Event()

    def watch():
        while not done.wait(0.05):
            ranks.coordinator.check_limits()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        outcomes = ranks.run(on_rank)
    finally:
        done.set()
        watching.join()
    assert blocked.is_set()
    for outcome in outcomes:
        assert isinstance(outcome, dcp.CheckpointException)
        assert list(outcome.failures) == [who[blocked.rank]]
        assert "no progress" in str(outcome)


def test_a_rank_that_is_slow_costs_no_more_than_reading_by_oneself(saved, memory, at_read):
    wake, stands_still = threading.Event(), Once(13)

    def stop(fqn, start):
        if stands_still():
            assert wake.wait(60)

    at_read(stop)
    ranks = ThreadRanks(8)
    templates = [columns(rank, 8) for rank in range(8)]
    coordinator, waiting = ranks.coordinator, []
    contribute = coordinator.contribute

    def noting(call_id, rank, phase, message, **options):
        if phase == "read":
            waiting.append(rank)
            if len(waiting) == 7:
                wake.set()  # all others have what they want
        return contribute(call_id, rank, phase, message, **options)

    coordinator.contribute = noting
    sharing = NodeMemory(str(memory), patience_s=0.2)
    require_no_errors(load_sharing(ranks, templates, saved, lambda _: sharing))
    assert all(map(are_right, templates))


class Restarting:
    """Stands for a coordinator that starts over at some moment, and knows its members but no calls."""

    def __init__(self):
        self.now = Coordinator("threads")
        self.num_restarts = 0

    def start_over(self):
        after = Coordinator("threads")
        after.restore(pickle.loads(pickle.dumps(self.now.record)))
        self.now = after
        self.num_restarts += 1

    def contribute(self, *args, **options):
        return self.now.contribute(*args, **options)

    def join(self, request):
        return self.now.join(request)

    def fail(self, *args):
        self.now.fail(*args)


def test_a_coordinator_that_starts_over_meanwhile_gives_the_same_answers(saved, memory, at_read):
    coordinator, due = Restarting(), Once(10)

    def start_over(fqn, start):
        if due():
            coordinator.start_over()

    at_read(start_over)
    ranks = ThreadRanks(8, coordinator=coordinator)
    templates = [columns(rank, 8) for rank in range(8)]
    reports = require_no_errors(load_sharing(ranks, templates, saved, lambda _: NodeMemory(str(memory))))
    assert all(map(are_right, templates))
    assert nbytes_read(reports) == NBYTES
    assert coordinator.num_restarts == 1


def test_a_variable_that_says_neither_yes_nor_no_is_refused(saved, monkeypatch):
    monkeypatch.setenv("RAY_DCP_SHARE_READS", "no")
    with pytest.raises(dcp.CheckpointException, match="RAY_DCP_SHARE_READS"):
        dcp.load({name: torch.zeros(SHAPE) for name in NAMES}, checkpoint_id=saved, no_dist=True)
