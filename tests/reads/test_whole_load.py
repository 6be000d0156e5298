"""What a load would read is what it reads."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import defaultdict

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import LocalShards
from ray_dcp.catalog.committed import open_manifest
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import Entry
from ray_dcp.reads.plan.shape import ReadShape, read_shape
from ray_dcp.reads.plan.whole_load import plan_load
from ray_dcp.store.local import LocalStore
from ray_dcp.store.open import open_store
from ray_dcp.store.store import StoreTraits
from tests.ranks import ThreadRanks, require_no_errors

NUM_SAVED_BY = 2
TENSORS = {"large": (1025, 700), "wide": (6, 500_000), "small": (7, 5), "one": (1, 3), "scalar": ()}


def part(name: str, rank: int, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of the rows that a rank has of a tensor; the scalar is on all."""
    sizes = TENSORS[name]
    if not sizes:
        return (), ()
    each = -(-sizes[0] // world_size)
    first, end = min(rank * each, sizes[0]), min((rank + 1) * each, sizes[0])
    return (first, *(0 for _ in sizes[1:])), (end - first, *sizes[1:])


def state(rank: int, world_size: int) -> dict[str, object]:
    shards: dict[str, object] = {"note": "n" * 100, "steps": [1, 2]}
    for name, sizes in TENSORS.items():
        offsets, lengths = part(name, rank, world_size)
        chunks = {offsets: torch.zeros(lengths)} if torch.Size(lengths).numel() else {}
        shards[name] = LocalShards(sizes, chunks, dtype=torch.float32)
    return shards


@pytest.fixture
def recorded(monkeypatch) -> dict[int, list[tuple[str, int, int]]]:
    """(file, start, end) of what each thread reads, and in which order."""
    seen: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    read_into = LocalStore._read_into

    def recording(self, key, descriptor, offset, buffers):
        seen[threading.get_ident()].append((key, offset, offset + sum(map(len, buffers))))
        read_into(self, key, descriptor, offset, buffers)

    monkeypatch.setattr(LocalStore, "_read_into", recording)
    return seen


@pytest.mark.parametrize("traits", [LocalStore.traits, StoreTraits(request_nbytes=1 << 20)], ids=["local", "bucket"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_plan_of_a_load_is_what_it_reads(tmp_path, monkeypatch, recorded, num_ranks, traits):
    require_no_errors(ThreadRanks(NUM_SAVED_BY).save(lambda rank: state(rank, NUM_SAVED_BY), tmp_path))
    # One read at a time, so that each rank's thread is the one that reads.
    shape = dataclasses.replace(read_shape(traits), num_in_flight=1)
    monkeypatch.setattr("ray_dcp.reads.reader.read_shape", lambda traits: shape)
    planned = plan_load(str(tmp_path), open_manifest(open_store(tmp_path)).entries, shape, num_ranks)
    seen = {}

    def load(rank: int):
        report = ranks.load_rank(rank, state(rank, num_ranks), tmp_path, reader=dcp.StoreReader(tmp_path, sharing=None))
        seen[rank] = recorded[threading.get_ident()]
        return report

    ranks = ThreadRanks(num_ranks)
    reports = require_no_errors(ranks.run(load))
    for rank, plan in enumerate(planned.ranks):
        assert plan.num_requests == len(seen[rank])
        assert plan.nbytes_read == sum(end - start for _, start, end in seen[rank]) == reports[rank].nbytes_read
        read = {key: sorted((a, b) for k, a, b in seen[rank] if k == key) for key, _, _ in seen[rank]}
        assert {file.file: bytes_of(file.ranges) for file in plan.files} == {k: bytes_of(v) for k, v in read.items()}
        assert {file.file: file.num_requests for file in plan.files} == {k: len(v) for k, v in read.items()}
    assert sum(plan.nbytes_wanted for plan in planned.ranks) == sum(report.nbytes_loaded for report in reports)


def bytes_of(ranges) -> list[tuple[int, int]]:
    """The same bytes as ranges that lie apart."""
    found: list[list[int]] = []
    for start, end in ranges:
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(a, b) for a, b in found]


def test_a_plan_needs_no_file_but_the_manifest(tmp_path):
    dcp.save({"w": torch.zeros(3 << 20)}, checkpoint_id=tmp_path, no_dist=True)
    manifest = open_manifest(open_store(tmp_path))
    (shard,) = tmp_path.glob("*.distcp")
    os.unlink(shard)
    (rank,) = plan_load("c", manifest.entries, read_shape(LocalStore.traits), 1).ranks
    assert (rank.nbytes_read, rank.nbytes_wanted, len(rank.files)) == (12 << 20, 12 << 20, 1)


@pytest.mark.parametrize(
    "wrong", [{"sizes": (5, 3)}, {"block_crcs": (1, 2)}, {"payload_offset": -1}, {"payload_nbytes": 47}], ids=str
)
def test_numbers_that_do_not_fit_together_are_damage(wrong):
    entry = Entry("w", (0, 0), (4, 3), "float32", "f", 0, 400, 64, 48, (1,), 0)
    shape = ReadShape(unit_nbytes=10, piece_nbytes=10, run_nbytes=50, max_gap_nbytes=5, num_in_flight=1)
    plan_load("c", [entry], shape, 2)
    with pytest.raises(CorruptCheckpointError) as caught:
        plan_load("c", [dataclasses.replace(entry, **wrong)], shape, 2)
    assert (caught.value.fqn, caught.value.file) == ("w", "f")
