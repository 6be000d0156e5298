"""A range comes from the nearest place that has it; what a place has lost, or has wrong, comes from the next."""

from __future__ import annotations

import functools
import mmap
import os

import pytest

from ray_dcp.errors import CorruptCheckpointError, ObjectNotFoundError
from ray_dcp.reads import nearby
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.nearby import BufferPlace, NearbyFiles, PeerPlace, PlaceLostError
from ray_dcp.staging.memory_tier import HeldFile
from ray_dcp.staging.peers import peer as peer_module
from ray_dcp.staging.peers.peer import PeerFile, PeerGoneError, PeerLostError
from ray_dcp.staging.shared_buffer import BufferName, SharedBuffer
from ray_dcp.store.memory import MemoryStore
from tests.staging.own_process import descriptors

KEY = "__0_0_00ab.distcp"
RIGHT = bytes(range(200))


class Somewhere:
    """A place with given bytes, which says that it has lost them from its ``loses``-th read on."""

    def __init__(self, kind: str, content: bytes = RIGHT, loses: int = 1000) -> None:
        self.kind, self.content, self.loses = kind, content, loses
        self.reads, self.closed = 0, False

    def fill(self, offset, buffers):
        self.reads += 1
        if self.reads >= self.loses:
            raise PlaceLostError("gone")
        for buffer in buffers:
            buffer[:] = self.content[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self):
        self.closed = True


def store(content: bytes | None = RIGHT) -> MemoryStore:
    store = MemoryStore("memory://nearby")
    store.delete(KEY)
    if content is not None:
        store.put(KEY, content)
    return store


def filled(near: NearbyFiles, offset: int = 3, nbytes: int = 5, content: bytes | None = RIGHT) -> bytes:
    memory = bytearray(nbytes)
    CheckpointFiles(store(content), "c", near).fill(KEY, "w", offset, [memoryview(memory)])
    return bytes(memory)


def test_each_range_comes_from_the_nearest_place():
    near = NearbyFiles({KEY: [Somewhere("memory"), other := Somewhere("peer")]})
    assert filled(near, content=None) == RIGHT[3:8]
    assert (other.reads, near.nbytes) == (0, {"memory": 5})


def test_a_place_that_has_lost_the_bytes_is_left_for_the_next_and_the_last_is_the_store(caplog):
    near = NearbyFiles({KEY: [first := Somewhere("memory", loses=2), second := Somewhere("peer", loses=2)]})
    assert [filled(near, offset=at) for at in range(4)] == [RIGHT[at : at + 5] for at in range(4)]
    assert (first.reads, second.reads) == (2, 2), "what is left is not asked again"
    assert near.nbytes == {"memory": 5, "peer": 5, "storage": 10}
    assert [one.getMessage()[:40] for one in caplog.records] == [
        f"{KEY} is not read from memory"[:40],
        f"{KEY} is not read from peer, "[:40],
    ]


def test_other_files_are_read_where_they_were():
    near = NearbyFiles({KEY: [Somewhere("memory", loses=1)], "other": [place := Somewhere("memory")]})
    filled(near)
    CheckpointFiles(store(), "c", near).fill("other", "w", 0, [memoryview(bytearray(4))])
    assert place.reads == 1
    assert CheckpointFiles(store(), "c", near).is_near("other")
    assert not CheckpointFiles(store(), "c", near).is_near(KEY)


def checked_read(files: CheckpointFiles) -> bytes:
    """What a record's reader does: it reads, and then checks."""
    memory = bytearray(5)

    def read():
        with files.opened(KEY) as fill:
            fill(3, [memoryview(memory)])
        if memory != RIGHT[3:8]:
            raise CorruptCheckpointError("stored bytes fail their checksum", file=KEY)

    files.checked(KEY, read)
    return bytes(memory)


def test_wrong_bytes_come_from_the_next_place():
    wrong, also_wrong = Somewhere("memory", bytes(200)), Somewhere("peer", bytes(200))
    near = NearbyFiles({KEY: [wrong, also_wrong]})
    assert checked_read(CheckpointFiles(store(), "c", near)) == RIGHT[3:8]
    assert checked_read(CheckpointFiles(store(), "c", near)) == RIGHT[3:8]
    assert (wrong.reads, also_wrong.reads) == (1, 1)


def test_wrong_bytes_of_the_store_are_damage():
    near = NearbyFiles({KEY: [Somewhere("memory", bytes(200))]})
    with pytest.raises(CorruptCheckpointError, match="fail their checksum"):
        checked_read(CheckpointFiles(store(bytes(200)), "c", near))


def test_a_file_that_is_in_memory_is_not_even_opened_in_the_store():
    near = NearbyFiles({KEY: [Somewhere("memory", loses=2)]})
    files = CheckpointFiles(store(None), "c", near)
    assert checked_read(files) == RIGHT[3:8]
    with pytest.raises(ObjectNotFoundError):
        checked_read(files)


class AtPeer:
    """A peer that is gone from its ``gone``-th chunk on, and has lost the file from its ``loses``-th."""

    def __init__(self, gone: int = 1000, loses: int = 1000) -> None:
        self.node, self.gone, self.loses, self.asked = "n", gone, loses, 0

    def begin(self, file, offset, nbytes):
        self.asked += 1
        if self.asked >= self.gone:
            raise PeerGoneError("it has not answered")
        if self.asked >= self.loses:
            raise PeerLostError("it does not have the file any more")
        return lambda: RIGHT[offset : offset + nbytes]


def at_peer(peer: AtPeer, lost: set[str]) -> PeerPlace:
    return PeerPlace(PeerFile(HeldFile("/c", KEY, len(RIGHT), BufferName("", 0, 0, 0), 0), peer), lost)


@pytest.mark.parametrize("lengths", [(200,), (1, 0, 9, 10, 11, 160), (7,) * 28])
def test_chunks_of_a_peer_fill_buffers_one_after_the_other(monkeypatch, lengths):
    monkeypatch.setattr(peer_module, "CHUNK_NBYTES", 10)
    buffers = [memoryview(bytearray(length)) for length in lengths]
    at_peer(AtPeer(), set()).fill(0, buffers)
    assert b"".join(buffers) == RIGHT[: sum(lengths)]


def test_a_peer_that_does_not_answer_is_not_asked_again_for_any_file():
    peer, lost = AtPeer(gone=2), set()
    first, other = at_peer(peer, lost), at_peer(peer, lost)
    buffer = memoryview(bytearray(5))
    other.fill(0, [buffer])
    for place in (first, other):
        with pytest.raises(PlaceLostError, match="node n"):
            place.fill(0, [buffer])
    assert peer.asked == 2


def test_a_peer_that_has_lost_one_file_is_asked_for_the_others():
    peer, lost = AtPeer(loses=1), set()
    for place in (at_peer(peer, lost), at_peer(peer, lost)):
        with pytest.raises(PlaceLostError, match="does not have the file"):
            place.fill(0, [memoryview(bytearray(5))])
    assert peer.asked == 2


def test_what_lies_farther_is_looked_for_once_and_when_it_is_wanted():
    looks, far = [], Somewhere("peer")

    def look():
        looks.append(None)
        return {"far": [far]}

    near = NearbyFiles({KEY: [Somewhere("memory", loses=1)]}, look)
    assert filled(near) == RIGHT[3:8], "from the store: what the nearest place has lost is not looked for farther"
    assert looks == []
    assert (near.has("far"), near.has("nowhere")) == (True, False)
    assert len(looks) == 1
    near.close()
    assert far.closed


def test_two_threads_that_find_the_same_damage_both_get_the_next_place(caplog):
    """The second has read from a place that the first has left by the time it looks."""
    near = NearbyFiles({KEY: [Somewhere("memory", bytes(200))]})
    files = CheckpointFiles(store(), "c", near)
    entered = []

    def read():
        memory = bytearray(5)
        files.fill(KEY, "w", 3, [memoryview(memory)])
        if not entered:
            entered.append(True)
            assert checked_read(files) == RIGHT[3:8]  # another one, meanwhile
        if memory != RIGHT[3:8]:
            raise CorruptCheckpointError("stored bytes fail their checksum", file=KEY)
        return bytes(memory)

    assert files.checked(KEY, read) == RIGHT[3:8]
    assert len(caplog.records) == 1, "it is told once"


def test_closing_lets_go_of_all_places_also_of_those_that_were_left():
    near = NearbyFiles({KEY: [left := Somewhere("memory", loses=1), there := Somewhere("peer")]})
    filled(near)
    near.close()
    assert left.closed
    assert there.closed
    assert filled(near) == RIGHT[3:8]


# A staging buffer of this node as a place.


@pytest.fixture
def buffer():
    before = descriptors()
    with SharedBuffer.create(4 << 20) as made:
        made.memory[:] = os.urandom(1 << 20) * 4
        yield made
    assert descriptors() == before


def place_of(buffer: SharedBuffer) -> BufferPlace:
    return BufferPlace(HeldFile("c", KEY, 4 << 20, buffer.name, buffer.version))


def test_any_range_of_a_buffer_in_any_pieces(buffer):
    place = place_of(buffer)
    for offset, lengths in [(0, [4 << 20]), (1, [3, 0, 70_000, 1]), (mmap.PAGESIZE, [5]), ((4 << 20) - 1, [1])]:
        pieces = [bytearray(length) for length in lengths]
        place.fill(offset, [memoryview(piece) for piece in pieces])
        assert b"".join(map(bytes, pieces)) == buffer.memory[offset : offset + sum(lengths)]
    place.close()
    place.close()


def test_a_range_beyond_the_file_is_not_there(buffer):
    with pytest.raises(PlaceLostError, match="shorter"):
        place_of(buffer).fill((4 << 20) - 1, [memoryview(bytearray(2))])


def test_a_buffer_that_was_taken_before_or_is_gone_has_nothing(buffer):
    place = place_of(buffer)
    buffer.renew()
    with pytest.raises(PlaceLostError, match="another file"):
        place.fill(0, [memoryview(bytearray(9))])
    place.close()
    gone = place_of(buffer)
    buffer.close()
    with pytest.raises(PlaceLostError, match="closed it"):
        gone.fill(0, [memoryview(bytearray(9))])


def test_bytes_that_are_overwritten_while_they_are_copied_are_not_taken_for_the_file(buffer, monkeypatch):
    """The rank takes the buffer, and stages into it, between two pieces of a read."""
    place, copy, num_copied = place_of(buffer), nearby._copy, iter(range(100))

    def copy_and_overwrite(target, source):
        if next(num_copied) == 2:
            buffer.renew()
            buffer.memory[2 << 20 :] = bytes(2 << 20)
        copy(target, source)

    monkeypatch.setattr(nearby, "_copy", copy_and_overwrite)
    near = NearbyFiles({KEY: [place]})
    expected, memory = bytes(buffer.memory), bytearray(4 << 20)
    in_store = functools.partial(_fill_from, expected)
    near.fill(KEY, 0, [memoryview(memory)], in_store)
    assert memory == expected
    assert near.nbytes == {"storage": 4 << 20}
    near.close()


def _fill_from(content: bytes, offset: int, buffers) -> None:
    Somewhere("storage", content).fill(offset, buffers)
