"""Files in the memory of other nodes: read there, copied there, and left for the store where they are lost or wrong."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from ray_dcp import LocalShards
from ray_dcp.format.names import parse_shard_file
from ray_dcp.staging.peers import peer
from ray_dcp.staging.shared_buffer import SharedBuffer
from tests.protocol.nodes_in_process import COLUMNS, Nodes, RanksOnNodes, whole
from tests.protocol.test_loads_from_memory import entries_of, lose_shards
from tests.ranks import require_no_errors
from tests.slack import within
from tests.staging.own_process import descriptors


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(peer, "CHUNK_NBYTES", 1 << 18)
    monkeypatch.setenv("RAY_DCP_REPLICAS", "1")
    before, threads = descriptors(), set(threading.enumerate())
    nodes = Nodes(3)
    yield nodes
    nodes.close()
    assert descriptors() == before
    assert {one.name for one in set(threading.enumerate()) - threads} <= {"agent-writer"}


def held_by(nodes, name, place) -> set[int]:
    """The ranks whose files are in the memory of a node."""
    return {parse_shard_file(file.key).rank for file in nodes.by_name[name].held(str(place))}


# Reads.


def test_what_other_nodes_have_in_memory_is_read_there_and_not_in_the_store(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_DCP_REPLICAS", "0")
    nodes.save(tmp_path / "c", 1.0)
    assert [held_by(nodes, name, tmp_path / "c") for name in "abc"] == [{0}, {1}, {2}]
    lose_shards(tmp_path / "c")
    for on_nodes in ("a", "ab", "abc"):
        for report in nodes.load(tmp_path / "c", on_nodes, 1.0):
            by_place = report.nbytes_by_place
            assert (by_place["storage"], report.nbytes_read) == (0, 0)
            assert by_place["memory"] > 0
            assert by_place["peer"] > by_place["memory"], "two of three rows"
            assert by_place["memory"] + by_place["peer"] >= report.nbytes_loaded


def test_peers_are_asked_once_and_only_for_what_the_own_node_does_not_have(nodes, tmp_path):
    nodes.save(tmp_path / "c", 1.0)
    by_itself = RanksOnNodes(nodes.nodes)
    templates = [{"rows": LocalShards((3, COLUMNS), {(rank, 0): torch.zeros(1, COLUMNS)})} for rank in range(3)]
    reports = require_no_errors(by_itself.load(templates, tmp_path / "c", strict=False))
    assert [report.nbytes_by_place["storage"] for report in reports] == [0] * 3
    assert [torch.equal(template["rows"].chunks[(rank, 0)][0], whole(3, 1.0)["rows"][rank])
            for rank, template in enumerate(templates)] == [True] * 3  # fmt: skip
    assert [node.asked for node in nodes.nodes] == [0] * 3
    nodes.load(tmp_path / "c", "abc", 1.0)
    assert [node.asked for node in nodes.nodes] == [1] * 3


def test_peers_are_asked_where_the_own_node_has_nothing(nodes, tmp_path):
    nodes.save(tmp_path / "c", 1.0)
    nodes.by_name["a"].agent.memory.close()
    assert nodes.sources(tmp_path / "c", "a", 1.0) == [{"peer"}]
    for node in nodes.nodes:
        node.agent.memory.close()
    (report,) = nodes.load(tmp_path / "c", "a", 1.0)
    assert report.nbytes_by_place == {"storage": report.nbytes_read}


def test_a_peer_that_is_gone_is_left_at_once_for_all_its_files(nodes, tmp_path, caplog):
    nodes.save(tmp_path / "c", 1.0)
    peers = nodes.by_name["a"].held_by_peers(str(tmp_path / "c"))
    nodes.lose("b")
    before = nodes.by_name["b"].num_reads
    nodes.by_name["a"].held_by_peers = lambda place, keys: [one for one in peers if one.peer.node == "b"]
    assert nodes.sources(tmp_path / "c", "a", 1.0) == [{"memory", "storage"}]
    assert nodes.by_name["b"].num_reads <= 8 + before, "one for each thread"
    assert "node b: it has not answered for 5 s" in caplog.text


def test_a_buffer_that_is_used_again_after_a_peer_told_of_it_is_left_for_the_store(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_DCP_REPLICAS", "0")
    nodes.save(tmp_path / "c", 1.0)
    peers = nodes.by_name["a"].held_by_peers(str(tmp_path / "c"))
    here = nodes.by_name["a"].held(str(tmp_path / "c"))
    for value in (2.0, 3.0):  # one for each of a rank's buffers
        nodes.save(tmp_path / f"{value}", value)
    monkeypatch.setattr(nodes.by_name["a"], "held", lambda place: here)
    monkeypatch.setattr(nodes.by_name["a"], "held_by_peers", lambda place, keys: peers)
    assert nodes.sources(tmp_path / "c", "a", 1.0) == [{"storage"}]


# Copies.


@pytest.mark.parametrize("lost", ["a", "b", "c"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_node_is_lost_and_nothing_is_read_from_storage(nodes, tmp_path, lost, num_ranks, caplog):
    for step in (0, 1):
        nodes.save(tmp_path / str(step), float(step))
    nodes.lose(lost)
    lose_shards(tmp_path / "1")
    left = "abc".replace(lost, "")
    with caplog.at_level(logging.INFO, logger="ray_dcp"):
        reports = nodes.load(tmp_path / "1", (left + left)[:num_ranks], 1.0)
    for report in reports:
        assert report.nbytes_by_place["storage"] == 0
        assert report.nbytes_by_place["memory"] > 0
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_each_node_has_its_own_file_and_that_of_the_one_before(nodes, tmp_path):
    opened = []
    for step in range(4):
        nodes.save(tmp_path / str(step), float(step))
        assert [held_by(nodes, name, tmp_path / str(step)) for name in "abc"] == [{0, 2}, {0, 1}, {1, 2}]
        assert [held_by(nodes, name, tmp_path / str(step - 1)) for name in "abc"] == [set()] * 3
        opened.append(len(descriptors()))
    assert opened[1] == opened[2] == opened[3], "of each rank that it covers a node has one buffer, used again"


def test_without_replicas_nothing_is_offered(nodes, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_DCP_REPLICAS")
    nodes.save(tmp_path / "c", 1.0)
    assert [held_by(nodes, name, tmp_path / "c") for name in "abc"] == [{0}, {1}, {2}]


@pytest.mark.parametrize("when", ["before", "during", "before the next step's"])
@pytest.mark.parametrize("who", ["source", "keeper"])
def test_a_node_is_lost_around_its_copy(nodes, tmp_path, when, who, caplog):
    """Node b is lost: its file is in the store alone then, unless it was copied, and no save waits for that."""
    a, b, c = nodes.nodes
    if when == "before the next step's":
        nodes.save(tmp_path / "0", 0.0)

    def lose():
        nodes.lose("b")

    if who == "source" and when == "during":
        b.on_read = lambda number: lose() if number == 3 else None
    elif who == "source":
        c.on_offer = lose
    elif when == "during":
        a.on_read = lambda number: lose() if number == 3 else None
    else:
        b.on_offer = lose
    nodes.save(tmp_path / "1", 1.0)
    assert b.is_lost
    held = [held_by(nodes, name, tmp_path / "1") for name in "ac"]
    sources = nodes.sources(tmp_path / "1", "ac", 1.0)
    assert held[0] == {0, 2}
    assert ["storage" in of_rank for of_rank in sources] == [1 not in held[1]] * 2
    if who == "source":
        assert 1 not in held[1]
        assert f"1 of the 3 files of {tmp_path / '1'} are in no node's memory any more, and are read" in caplog.text
    elif when != "during":
        assert 0 in held[1], "where b does not answer the next node is asked"


def test_both_nodes_of_a_pair_are_lost(nodes, tmp_path, caplog):
    nodes.save(tmp_path / "c", 1.0)
    nodes.lose("a")
    nodes.lose("b")
    (report,) = nodes.load(tmp_path / "c", "c", 1.0)
    assert report.nbytes_by_place["storage"] > 0
    assert report.nbytes_by_place["memory"] > report.nbytes_by_place["storage"], "two files are on the node itself"
    assert "1 of the 3 files of" in caplog.text


def test_a_file_whose_buffer_is_used_again_while_it_is_copied_is_given_up_and_the_next_copied(nodes, tmp_path, caplog):
    renewed = []

    def stage_again(number):
        if number == 3:
            held = nodes.by_name["a"].held(str(tmp_path / "0"))
            (file,) = [one for one in held if parse_shard_file(one.key).rank == 0]
            with SharedBuffer.attach(file.buffer) as buffer:
                buffer.renew()
                buffer.memory[:] = bytes(len(buffer.memory))
            renewed.append(file)

    nodes.by_name["a"].on_read = stage_again
    nodes.save(tmp_path / "0", 0.0)
    assert len(renewed) == 1
    assert held_by(nodes, "b", tmp_path / "0") == {1}
    assert "it does not have the file in memory any more" in caplog.text
    nodes.save(tmp_path / "1", 1.0)
    assert held_by(nodes, "b", tmp_path / "1") == {0, 1}


def test_bytes_that_change_on_their_way_are_no_copy(nodes, tmp_path, caplog):
    nodes.by_name["a"].on_read = lambda number: bytes(1 << 18) if number == 2 else None
    nodes.save(tmp_path / "c", 1.0)
    assert held_by(nodes, "b", tmp_path / "c") == {1}
    assert "what has come fails its checksums" in caplog.text


@pytest.mark.parametrize("fqn", ["rows", "small", "python.value"])
def test_a_bit_that_flips_in_a_copy_is_found_and_the_file_read_from_the_store(nodes, tmp_path, fqn, caplog):
    nodes.save(tmp_path / "c", 1.0)
    entry = next(one for one in entries_of(tmp_path / "c") if one.fqn == fqn)
    source = parse_shard_file(entry.file).rank
    nodes.lose("abc"[source])
    keeper = "abc"[(source + 1) % 3]
    (file,) = [one for one in nodes.by_name[keeper].held(str(tmp_path / "c")) if one.key == entry.file]
    with SharedBuffer.attach(file.buffer) as buffer:
        buffer.memory[entry.payload_offset + entry.payload_nbytes // 2] ^= 4
    (report,) = nodes.load(tmp_path / "c", "abc"[(source + 2) % 3], 1.0)
    assert report.nbytes_by_place["storage"] >= entry.payload_nbytes
    assert f"{entry.file} is not read from peer" in caplog.text
    assert "fail their checksum" in caplog.text


def test_a_node_without_ranks_in_the_save_keeps_no_copy(nodes, tmp_path, caplog):
    nodes.save(tmp_path / "0", 0.0)
    nodes.by_name["b"].agent.copies.took_part = lambda save: None
    nodes.save(tmp_path / "1", 1.0)
    assert [held_by(nodes, name, tmp_path / "1") for name in "abc"] == [{0, 2}, {1}, {0, 1, 2}]


def test_a_node_alone_has_no_copy_and_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RAY_DCP_REPLICAS", "1")
    nodes = Nodes(1)
    for step in (0, 1):
        nodes.save(tmp_path / str(step), 1.0)
    nodes.close()
    assert [one.getMessage().rpartition(": ")[2] for one in caplog.records] == [
        "its group has no other node with an agent"
    ]


def test_copies_of_a_source_that_offers_nothing_any_more_are_let_go(nodes, tmp_path):
    nodes.save(tmp_path / "0", 0.0)
    before = len(descriptors())
    nodes.by_name["a"].agent.offers.offer = lambda offer: None
    for step in (1, 2, 3):
        nodes.save(tmp_path / str(step), float(step))
    assert held_by(nodes, "b", tmp_path / "3") == {1}
    assert nodes.by_name["b"].agent.copies._copies == {}
    assert before > 0


def test_a_rank_that_leaves_in_order_leaves_nothing_to_be_kept_for_it_on_any_node(nodes, tmp_path):
    nodes.save(tmp_path / "c", 1.0)
    assert [node.agent.memory.is_for_later for node in nodes.nodes] == [True] * 3
    nodes.by_name["a"].agent.left(0)
    assert [node.agent.memory.is_for_later for node in nodes.nodes] == [True] * 3
    for rank in (1, 2):
        nodes.nodes[rank].agent.left(rank)
    assert [node.agent.memory.is_for_later for node in nodes.nodes] == [False] * 3


def test_a_copy_that_hangs_holds_up_neither_saves_nor_other_copies(nodes, tmp_path):
    going_on = threading.Event()
    nodes.by_name["a"].on_read = lambda number: going_on.wait(within(60)) and None

    def finished():
        going_on.set()

    timer = threading.Timer(0.2, finished)
    nodes.settle = lambda: None
    timer.start()
    for step in (0, 1):
        nodes.save(tmp_path / str(step), float(step))
    timer.join()
    del nodes.settle
    nodes.settle()
    assert held_by(nodes, "c", tmp_path / "1") == {1, 2}


@pytest.mark.parametrize("name", ["agent-offers", "agent-copies"])
def test_without_a_thread_for_copies_saves_are_what_they_were(nodes, tmp_path, monkeypatch, name, caplog):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        nodes.save(tmp_path / "0", 0.0)
    assert [held_by(nodes, node, tmp_path / "0") for node in "abc"] == [{0}, {1}, {2}]
    assert "can't start new thread" in caplog.text
    nodes.save(tmp_path / "1", 1.0)
    assert [held_by(nodes, node, tmp_path / "1") for node in "abc"] == [{0, 2}, {0, 1}, {1, 2}]
