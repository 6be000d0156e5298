"""Actors of one node that read for each other: what the kernel counts, and one that is killed meanwhile."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray
import torch

import ray_dcp as dcp
from ray_dcp.reads.record_reads import RecordReads
from tests.shared_memory import require_none_left
from tests.slack import within

pytestmark = pytest.mark.ray

SHAPE = (2048, 1024)
NAMES = [f"layer.{number}" for number in range(8)]
NBYTES = len(NAMES) * 4 * SHAPE[0] * SHAPE[1]


def value(name):
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) + NAMES.index(name)


def save_rows(rank, world_size, place):
    rows = SHAPE[0] // world_size
    state = {n: dcp.LocalShards(SHAPE, {(rows * rank, 0): value(n)[rows * rank :][:rows].clone()}) for n in NAMES}
    dcp.save(state, checkpoint_id=place)


def nbytes_read_by_process():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar"))


def load_columns(rank, world_size, place):
    """Names that are wrong, bytes the kernel read for this process, bytes the report says were read and loaded."""
    width = SHAPE[1] // world_size
    template = {n: dcp.LocalShards(SHAPE, {(0, width * rank): torch.full((SHAPE[0], width), torch.nan)}) for n in NAMES}
    before = nbytes_read_by_process()
    report = dcp.load(template, checkpoint_id=place)
    counted = nbytes_read_by_process() - before
    wrong = [
        n
        for n in NAMES
        if not torch.equal(template[n].chunks[(0, width * rank)], value(n)[:, width * rank :][:, :width])
    ]
    return wrong, counted, report.nbytes_read, report.nbytes_loaded


def test_four_actors_that_load_columns_of_what_two_saved_by_rows_read_each_byte_once(ranks, tmp_path):
    ranks.ok(2, save_rows, tmp_path / "c")
    ranks.ok(4, load_columns, tmp_path / "c")  # the first one imports what is imported at the first use
    outcomes = ranks.ok(4, load_columns, tmp_path / "c")
    assert [wrong for wrong, *_ in outcomes] == [[]] * 4
    counted, read, loaded = (sum(column) for column in list(zip(*outcomes, strict=True))[1:])
    assert (read, loaded) == (NBYTES, NBYTES)
    assert counted < 1.1 * NBYTES
    require_none_left()


def load_and_kill(rank, world_size, place, die_at):
    read_blocks, count = RecordReads.read_blocks, 0

    def read(self, record, start, into, lane):
        nonlocal count
        count += 1
        if rank == 1 and count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        read_blocks(self, record, start, into, lane)

    RecordReads.read_blocks = read
    began_s = time.monotonic()
    try:
        load_columns(rank, world_size, place)
    except dcp.CheckpointException as error:
        return list(error.failed_ranks), time.monotonic() - began_s, str(error)
    finally:
        RecordReads.read_blocks = read_blocks
    return "loaded"


# At its first block by night: a process that was killed takes seconds to replace.
@pytest.mark.parametrize("die_at", [pytest.param(1, marks=pytest.mark.soak), 6])
def test_a_rank_that_is_killed_while_it_reads_for_others_is_named_by_all(ranks, tmp_path, die_at):
    ranks.ok(2, save_rows, tmp_path / "c")
    ranks.ok(4, load_columns, tmp_path / "c")
    actors = ranks.actors(4)
    calls = [
        actor.run.remote(r, 4, ranks.group_name(4), load_and_kill, tmp_path / "c", die_at)
        for r, actor in enumerate(actors)
    ]
    try:
        for rank in (0, 2, 3):
            failed, took_s, told = ray.get(calls[rank], timeout=within(60))
            assert failed == [1], told
            assert took_s < within(5)
        require_none_left()
    finally:
        ranks.bury(actors[1])
