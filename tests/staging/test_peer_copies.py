"""An agent's copies of other nodes' files: a buffer for each source, of which nothing is offered that is not whole."""

from __future__ import annotations

import logging
import mmap
from array import array

import pytest

from ray_dcp.format.names import ShardFile
from ray_dcp.staging.buffer_errors import StagingMemoryError
from ray_dcp.staging.memory_tier import HeldFile, MemoryTier
from ray_dcp.staging.peers import peer
from ray_dcp.staging.peers.peer import PeerLostError
from ray_dcp.staging.peers.peer_copies import CopyOffer, PeerCopies
from ray_dcp.staging.sealing import OpenEnds
from ray_dcp.staging.shared_buffer import BufferName, SharedBuffer
from tests.slack import within
from tests.staging.own_process import descriptors

PAGE = mmap.PAGESIZE


class Source:
    """A node whose files are full of one byte, and which sends ``num_chunks`` chunks in all."""

    def __init__(self) -> None:
        self.node, self.byte, self.num_chunks = "a", b"1", 1000
        self.before_chunk = lambda: None

    def begin(self, file, offset, nbytes):
        def received():
            self.before_chunk()
            self.num_chunks -= 1
            if self.num_chunks < 0:
                raise PeerLostError("gone")
            return self.byte * nbytes

        return received


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def copies(source, monkeypatch):
    monkeypatch.setattr(peer, "CHUNK_NBYTES", PAGE)
    before = descriptors()
    copies = PeerCopies(MemoryTier(), lambda node: source)
    copies.took_part("save")
    yield copies
    copies.let_go()
    assert copies.wait(within(30))
    copies._tier.close()
    assert descriptors() == before


def offer(number: int, nbytes: int = 4 * PAGE, *, save: str = "save", rank: int = 0) -> CopyOffer:
    key = ShardFile(rank, 0, f"{number + 1:016x}{'ab' * 4}").key
    file = HeldFile(f"/{number}", key, nbytes, BufferName("", 0, 0, 0), 0)
    return CopyOffer(save, "a", rank, file, OpenEnds(array("q"), array("q"), ()), b"", None)


def taken(copies: PeerCopies, *offers: CopyOffer) -> None:
    for one in offers:
        assert copies.take(one)
    assert copies.wait(within(30))


def content(copies: PeerCopies, number: int) -> list[bytes]:
    found = []
    for file in copies._tier.held(f"/{number}"):
        with SharedBuffer.attach(file.buffer, writable=False) as buffer:
            assert buffer.version == file.version
            found.append(bytes(buffer.memory[: file.nbytes]))
    return found


def test_a_copy_takes_the_place_of_the_one_before(copies, source):
    taken(copies, offer(0))
    assert content(copies, 0) == [b"1" * (4 * PAGE)]
    opened = len(descriptors())
    source.byte = b"2"
    taken(copies, offer(1))
    assert (content(copies, 0), content(copies, 1)) == ([], [b"2" * (4 * PAGE)])
    assert len(descriptors()) == opened


def test_what_is_half_overwritten_is_neither_the_one_nor_the_other(copies, source):
    taken(copies, offer(0))
    source.byte, source.num_chunks = b"2", 2
    taken(copies, offer(1))
    assert (content(copies, 0), content(copies, 1)) == ([], [])
    source.num_chunks = 1000
    taken(copies, offer(2))
    assert content(copies, 2) == [b"2" * (4 * PAGE)]


def test_a_larger_file_has_another_buffer_and_the_smaller_one_is_gone(copies):
    taken(copies, offer(0))
    opened = len(descriptors())
    taken(copies, offer(1, 6 * PAGE))
    assert len(descriptors()) == opened
    taken(copies, offer(2, 2 * PAGE))
    assert content(copies, 2) == [b"1" * (2 * PAGE)]


def test_of_each_rank_there_is_a_buffer(copies):
    taken(copies, offer(0), offer(0, rank=1))
    assert len(content(copies, 0)) == 2


def test_without_memory_there_is_no_copy_and_that_is_said_once(copies, monkeypatch, caplog):
    def create(nbytes):
        raise StagingMemoryError(nbytes=nbytes, available_nbytes=5, reason="it would not fit")

    with monkeypatch.context() as full:
        full.setattr(SharedBuffer, "create", create)
        taken(copies, offer(0))
        taken(copies, offer(1))
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "it would not fit" in caplog.text
    taken(copies, offer(2))
    assert len(content(copies, 2)) == 1


def test_the_next_offer_of_a_rank_ends_the_copy_under_way(copies, source):
    def offer_next():
        source.before_chunk = lambda: None
        assert copies.take(offer(1))

    source.before_chunk = offer_next
    source.num_chunks = 5 + 3
    taken(copies, offer(0))
    assert (content(copies, 0), len(content(copies, 1))) == ([], 1)
    assert source.num_chunks >= 3, "one chunk of the first, four of the second"


def test_whoever_lets_go_gets_the_memory_of_a_copy_under_way(copies, source):
    before = descriptors()
    source.before_chunk = copies.let_go
    taken(copies, offer(0))
    assert content(copies, 0) == []
    assert descriptors() == before


def test_a_buffer_outlives_two_saves_without_an_offer_and_not_three(copies):
    before = descriptors()
    taken(copies, offer(0))
    for number, is_there in ((1, True), (1, True), (2, True), (3, False)):
        copies.committed(offer(number, rank=1).file.key)
        assert copies.wait(within(30))
        copies._tier.close()
        assert (descriptors() != before) is is_there


def test_what_is_offered_of_a_save_in_which_the_node_has_no_part_is_not_taken(copies):
    assert not copies.take(offer(0, save="another"))
    assert copies.wait(0)
    assert content(copies, 0) == []
