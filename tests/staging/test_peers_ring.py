"""Which node keeps whose copies, files that come in chunks, and what an agent sends of its memory."""

from __future__ import annotations

import mmap
from array import array

import pytest

from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.zip_record import frame_payload
from ray_dcp.settings import ConfigError
from ray_dcp.staging.memory_tier import HeldFile, MemoryTier
from ray_dcp.staging.peers import peer
from ray_dcp.staging.peers.peer import PeerLostError, chunks, peers_of
from ray_dcp.staging.peers.peer_offers import replicas_from
from ray_dcp.staging.sealing import OpenEnds, is_sealed_with, sealed_pieces
from ray_dcp.staging.shared_buffer import BufferName, SharedBuffer
from tests.staging.own_process import descriptors

KEY = "__0_0_" + "0" * 15 + "1" + "ab" * 4 + ".distcp"


def first_of(zones: dict[str, str]) -> dict[str, str]:
    return {node: peers_of(node, zones)[0] for node in zones}


def test_without_zones_all_nodes_go_round_a_ring():
    assert first_of(dict.fromkeys("cab", "")) == {"a": "b", "b": "c", "c": "a"}
    assert peers_of("b", dict.fromkeys("abcd", "")) == ["c", "d", "a"]
    assert peers_of("a", {"a": "x"}) == []


def test_copies_are_in_another_zone_and_no_node_keeps_more_than_one_where_zones_are_even():
    zones = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "y", "f": "y"}
    first = first_of(zones)
    assert all(zones[node] != zones[other] for node, other in first.items())
    assert sorted(first.values()) == sorted(zones)


def test_a_zone_of_one_node_keeps_what_all_others_have_and_no_node_is_left_out():
    zones = {"a": "x", "b": "x", "c": "x", "d": "y"}
    assert [first_of(zones)[node] for node in "abc"] == ["d"] * 3
    assert first_of(zones)["d"] in "abc"
    assert sorted(peers_of("a", zones)) == ["b", "c", "d"]


class Content:
    """A peer with a file of these bytes, of which it sends fewer from chunk ``cut`` on."""

    node = "n"

    def __init__(self, content: bytes, cut: int = 1000) -> None:
        self.content, self.cut, self.open, self.most_open = content, cut, 0, 0

    def begin(self, file, offset, nbytes):
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.cut -= 1
        content = self.content[offset : offset + nbytes - (self.cut < 0)]

        def received():
            self.open -= 1
            return content

        return received


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 100), (3, 90), (7, 10), (99, 1), (20, 0)])
def test_a_file_comes_in_order_in_chunks_of_which_a_few_are_under_way(monkeypatch, offset, nbytes):
    monkeypatch.setattr(peer, "CHUNK_NBYTES", 10)
    of, file = Content(bytes(range(100))), HeldFile("/c", KEY, 100, BufferName("", 0, 0, 0), 0)
    assert b"".join(chunks(of, file, offset, nbytes, in_flight=3)) == bytes(range(100))[offset : offset + nbytes]
    assert of.most_open == min(3, -(-nbytes // 10))
    assert of.open == 0


def test_fewer_bytes_than_there_should_be_are_a_lost_peer(monkeypatch):
    monkeypatch.setattr(peer, "CHUNK_NBYTES", 10)
    file = HeldFile("/c", KEY, 100, BufferName("", 0, 0, 0), 0)
    with pytest.raises(PeerLostError, match="it sent 9 of 10 bytes"):
        list(chunks(Content(bytes(100), cut=4), file, 0, 100))
    with pytest.raises(PeerLostError, match="shorter"):
        list(chunks(Content(bytes(100)), file, 50, 51))


def test_what_is_sent_of_memory_is_of_the_file_that_was_told_of():
    before = descriptors()
    tier = MemoryTier()
    with SharedBuffer.create(mmap.PAGESIZE) as buffer:
        buffer.memory[:10] = b"0123456789"
        file = tier.keep(0, "/c", KEY, 10, buffer, buffer.version)
        assert tier.read(file, 2, 5) == b"23456"
        assert tier.read(file, 8, 5) == b"89", "not what lies behind the file"
        buffer.renew()
        assert tier.read(file, 2, 5) is None
        buffer.memory[:10] = b"abcdefghij"
        again = tier.keep(0, "/d", KEY, 10, buffer, buffer.version)
        assert (tier.read(file, 0, 10), tier.read(again, 0, 10)) == (None, b"abcdefghij")
    tier.close()
    assert tier.read(again, 0, 1) is None
    assert descriptors() == before


def test_a_file_is_sealed_with_its_checksums_and_with_no_others():
    frame = frame_payload(b"pickled", BLOCK_NBYTES + 5)
    ends = OpenEnds(array("q", [100]), array("q", [0]), (frame,))
    memory = memoryview(bytearray(BLOCK_NBYTES * 2))
    memory[100:108] = b"contents"
    crcs: array[int] = array("I")
    assert sum(map(len, sealed_pieces(memory, len(memory), ends, crcs))) == len(memory)
    assert is_sealed_with(memory, ends, crcs)
    assert not is_sealed_with(memory, ends, crcs[:1])
    assert not is_sealed_with(memory, ends, crcs + array("I", [0]))
    memory[100 + BLOCK_NBYTES] ^= 1
    assert not is_sealed_with(memory, ends, crcs)


def test_how_many_copies_there_are():
    assert replicas_from({}) == replicas_from({"RAY_DCP_REPLICAS": ""}) == 0
    assert replicas_from({"RAY_DCP_REPLICAS": "1"}) == replicas_from({}, 1) == 1
    assert replicas_from({"RAY_DCP_REPLICAS": "1"}, 0) == 0
    for variables, replicas, message in [
        ({"RAY_DCP_REPLICAS": "2"}, None, "RAY_DCP_REPLICAS: 2 copies are too many"),
        ({"RAY_DCP_REPLICAS": "one"}, None, "RAY_DCP_REPLICAS: 'one' is not a whole number"),
        ({}, -1, "replicas: must be a whole number, 0 or more, not -1"),
        ({}, True, "replicas: must be a whole number"),
        ({"RAY_DCP_AGENTS": "0"}, 1, "replicas: .*RAY_DCP_AGENTS turns that off"),
        ({"RAY_DCP_MEMORY_TIER": "0"}, 1, "replicas: .*RAY_DCP_MEMORY_TIER turns that off"),
    ]:
        with pytest.raises(ConfigError, match=message):
            replicas_from(variables, replicas)
