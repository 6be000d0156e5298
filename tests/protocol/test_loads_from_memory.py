"""Loads take what a node's agent still has in memory, check it as they check the store, and go there otherwise."""

from __future__ import annotations

import logging

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.names import BLOCK_NBYTES, parse_shard_file
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.protocol.agents_in_process import ThreadAgent
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors
from tests.slack import within
from tests.staging.own_process import descriptors

COLUMNS = 3 * BLOCK_NBYTES // 8
"""So many that a rank's rows are several blocks, and a load of some columns needs parts of all of them."""


class Node:
    """Two ranks that save in the background, and whoever loads after them, with one agent."""

    def __init__(self) -> None:
        coordinator = Coordinator("threads")
        self.deputies = ThreadAgent([coordinator])
        self.ranks = ThreadRanks(2, coordinator=coordinator, deputies=self.deputies)
        self.groups = [ThreadGroup(self.ranks, rank) for rank in range(2)]
        for group in self.groups:
            group.background = BackgroundSaves(spares_newest=True)

    def save(self, place, value: float) -> None:
        def save_rank(rank):
            dcp.async_save(state_of(rank, value), checkpoint_id=place, group=self.groups[rank]).result(within(60))

        require_no_errors(self.ranks.run(save_rank))

    def load(self, place, num_ranks: int, value: float) -> list[dcp.LoadReport]:
        """The reports of a load by other ranks of this node, which takes columns; all values are those of ``value``."""
        loading = ThreadRanks(num_ranks, deputies=self.deputies)
        width = COLUMNS // num_ranks
        templates = [template_of(rank * width, width) for rank in range(num_ranks)]
        reports = require_no_errors(loading.load(templates, place))
        for rank, template in enumerate(templates):
            expected = whole(value)["rows"][:, rank * width : (rank + 1) * width]
            assert torch.equal(template["rows"].chunks[(0, rank * width)], expected)
            assert torch.equal(template["small"], torch.arange(7.0) + value)
            assert template["python"] == {"value": value}
        return reports

    def close(self) -> None:
        for group in self.groups:
            group.background.buffers.close()
        self.deputies.agent.memory.close()


def whole(value):
    rows = torch.arange(4.0 * COLUMNS).reshape(4, COLUMNS) + value
    return {"rows": rows, "small": torch.arange(7.0) + value, "python": {"value": value}}


def state_of(rank, value):
    state = whole(value)
    state["rows"] = dcp.LocalShards((4, COLUMNS), {(2 * rank, 0): state["rows"][2 * rank : 2 * rank + 2].clone()})
    return state


def template_of(first, width):
    rows = dcp.LocalShards((4, COLUMNS), {(0, first): torch.full((4, width), float("nan"))})
    return {"rows": rows, "small": torch.zeros(7), "python": None}


@pytest.fixture
def node():
    before = descriptors()
    node = Node()
    yield node
    node.close()
    assert descriptors() == before


def lose_shards(place, attempt: str | None = None) -> None:
    """Remove the files of ranks from the store: what is loaded then is from memory."""
    for path in place.glob("*.distcp"):
        if attempt is None or attempt in path.name:
            path.unlink()


def entries_of(place):
    return decode_manifest((place / "manifest.parquet").read_bytes(), file="manifest").entries


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_nothing_of_what_is_in_memory_is_read_from_the_store(node, tmp_path, num_ranks, caplog):
    node.save(tmp_path / "c", 1.0)
    lose_shards(tmp_path / "c")
    with caplog.at_level(logging.INFO, logger="ray_dcp"):
        reports = node.load(tmp_path / "c", num_ranks, 1.0)
    for rank, report in enumerate(reports):
        assert report.nbytes_by_place["memory"] >= report.nbytes_loaded
        assert (report.nbytes_by_place["storage"], report.nbytes_read) == (0, 0)
        assert f"rank {rank} has read {report.nbytes_by_place['memory']} B from memory, 0 B from storage" in caplog.text


def test_the_step_before_is_there_until_the_next_one_is_committed_and_not_after(node, tmp_path):
    for step in (0, 1, 2):
        node.save(tmp_path / str(step), float(step))
        held = [len(node.deputies.held(str(tmp_path / str(of)))) for of in (0, 1, 2)]
        assert held == [2 if of == step else 0 for of in (0, 1, 2)]
    (report,) = node.load(tmp_path / "1", 1, 1.0)
    assert report.nbytes_by_place == {"storage": report.nbytes_read}
    lose_shards(tmp_path / "2")
    assert node.load(tmp_path / "2", 1, 2.0)[0].nbytes_read == 0


def test_a_save_that_fails_leaves_the_one_before_in_memory_also_for_the_next(node, tmp_path):
    node.save(tmp_path / "c", 1.0)
    (tmp_path / "fails" / ".metadata").mkdir(parents=True)
    with pytest.raises(dcp.CheckpointException, match="metadata"):
        node.save(tmp_path / "fails", 2.0)
    pools = [group.background.buffers for group in node.groups]
    taken = [(pool, pool.take(1)) for pool in pools]
    lose_shards(tmp_path / "c")
    assert node.load(tmp_path / "c", 2, 1.0)[0].nbytes_read == 0
    for pool, buffer in taken:
        pool.give_back(buffer)


def flip(node, place, offset_of, entry):
    """Flip a bit of an entry's payload in the buffer of the rank that has staged it."""
    for file in node.deputies.held(str(place)):
        if file.key == entry.file:
            with SharedBuffer.attach(file.buffer) as buffer:
                buffer.memory[entry.payload_offset + offset_of(entry)] ^= 4


@pytest.mark.parametrize("fqn", ["rows", "small", "python.value"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_bit_flipped_in_memory_is_found_and_the_file_read_from_the_store(node, tmp_path, fqn, num_ranks, caplog):
    node.save(tmp_path / "c", 1.0)
    entry = next(one for one in entries_of(tmp_path / "c") if one.fqn == fqn)
    flip(node, tmp_path / "c", lambda one: one.payload_nbytes // 2, entry)
    reports = node.load(tmp_path / "c", num_ranks, 1.0)
    assert sum(report.nbytes_by_place["storage"] for report in reports) >= entry.payload_nbytes
    assert sum(report.nbytes_by_place["memory"] for report in reports) > 0, "the other file is as it was"
    assert f"{entry.file} is not read from memory" in caplog.text
    assert "fail their checksum" in caplog.text


def test_damage_in_memory_and_in_the_store_is_told(node, tmp_path):
    node.save(tmp_path / "c", 1.0)
    entry = next(one for one in entries_of(tmp_path / "c") if one.fqn == "rows")
    flip(node, tmp_path / "c", lambda one: 5, entry)
    content = bytearray((tmp_path / "c" / entry.file).read_bytes())
    content[entry.payload_offset + 5] ^= 4
    (tmp_path / "c" / entry.file).write_bytes(content)
    with pytest.raises(dcp.CheckpointException, match="fail their checksum"):
        node.load(tmp_path / "c", 1, 1.0)


def test_a_file_of_another_attempt_is_not_taken(node, tmp_path):
    node.save(tmp_path / "c", 1.0)
    require_no_errors(ThreadRanks(2).save(lambda rank: state_of(rank, 2.0), tmp_path / "c"))
    assert len(node.deputies.held(str(tmp_path / "c"))) == 2
    (report,) = node.load(tmp_path / "c", 1, 2.0)
    assert report.nbytes_by_place == {"storage": report.nbytes_read}


def test_a_file_that_is_shorter_than_the_manifest_says_is_not_taken(node, tmp_path, monkeypatch):
    node.save(tmp_path / "c", 1.0)
    keep, long = type(node.deputies.agent.memory).keep, node.deputies.held(str(tmp_path / "c"))
    for file in long:
        with SharedBuffer.attach(file.buffer) as buffer:
            rank = parse_shard_file(file.key).rank
            keep(node.deputies.agent.memory, rank, file.place, file.key, file.nbytes // 2, buffer, file.version)
    (report,) = node.load(tmp_path / "c", 1, 1.0)
    assert report.nbytes_by_place == {"storage": report.nbytes_read}


def test_a_buffer_that_is_used_again_after_a_rank_was_told_of_it_is_left_for_the_store(node, tmp_path, monkeypatch):
    node.save(tmp_path / "c", 1.0)
    told = node.deputies.held(str(tmp_path / "c"))
    for value in (2.0, 3.0):  # one for each of a rank's buffers
        node.save(tmp_path / f"{value}", value)
    monkeypatch.setattr(node.deputies, "held", lambda place: told)
    (report,) = node.load(tmp_path / "c", 1, 1.0)
    assert report.nbytes_by_place["storage"] >= 4 * 4 * COLUMNS
    assert report.nbytes_by_place.get("memory", 0) == 0


def test_without_a_manifest_nothing_is_taken_from_memory(node, tmp_path):
    node.save(tmp_path / "c", 1.0)
    (tmp_path / "c" / "manifest.parquet").unlink()
    (report,) = node.load(tmp_path / "c", 1, 1.0)
    assert report.nbytes_by_place == {"storage": report.nbytes_read}


def test_ranks_that_keep_nothing_in_memory_leave_nothing_to_read_there(node, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_DCP_MEMORY_TIER", "0")
    node.save(tmp_path / "c", 1.0)
    assert node.deputies.held(str(tmp_path / "c")) == ()
    assert node.load(tmp_path / "c", 1, 1.0)[0].nbytes_read > 0
