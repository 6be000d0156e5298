"""Sealing, without torch: pieces in file order, each whole when it comes, and a file in a store or none."""

from __future__ import annotations

import zlib
from array import array

import pytest

from ray_dcp.errors import StoreError
from ray_dcp.format.checksums import block_crcs, crc32
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.zip_record import frame_payload
from ray_dcp.staging.sealing import OpenEnds, sealed_pieces, write_sealed
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.trace_points import Point, observed_by

PAYLOADS = [bytes(range(256)) * (nbytes // 256) + b"end" for nbytes in (BLOCK_NBYTES, 3 * BLOCK_NBYTES, BLOCK_NBYTES)]
FRAMES = [frame_payload(b"a pickle", len(payload)) for payload in PAYLOADS]


def file_with(gap: bytes) -> tuple[bytes, memoryview, OpenEnds]:
    """A file with ``gap`` around each record: as it is to be, and as it is staged."""
    whole, opened, offsets = bytearray(gap), bytearray(gap), array("q")
    for frame, payload in zip(FRAMES, PAYLOADS, strict=True):
        tail = frame.tail(zlib.crc32(payload))
        offsets.append(len(opened) + len(frame.head))
        whole += frame.head + payload + tail + gap
        opened += frame.head + payload + b"\xee" * len(tail) + gap
    frames = tuple(dict.fromkeys(FRAMES))
    return bytes(whole), memoryview(opened), OpenEnds(offsets, array("I", map(frames.index, FRAMES)), frames)


@pytest.mark.parametrize("gap", [b"", b"small records", b"s" * (2 * BLOCK_NBYTES + 5)], ids=len)
def test_pieces_are_the_file_in_order_and_stay_as_they_were(gap):
    whole, memory, open_ends = file_with(gap)
    crcs: array[int] = array("I")
    pieces = [(piece, bytes(piece)) for piece in sealed_pieces(memory, len(whole), open_ends, crcs)]
    assert b"".join(content for _, content in pieces) == whole == memory
    assert all(piece == content for piece, content in pieces)
    assert all(0 < len(content) <= BLOCK_NBYTES for _, content in pieces)
    assert tuple(crcs) == sum(map(block_crcs, PAYLOADS), ())


def test_to_seal_again_changes_nothing():
    whole, memory, open_ends = file_with(b"small")
    once, again = array("I"), array("I")
    assert b"".join(sealed_pieces(memory, len(whole), open_ends, once)) == whole
    assert b"".join(sealed_pieces(memory, len(whole), open_ends, again)) == whole
    assert once == again


def test_a_file_without_large_payloads():
    empty = OpenEnds(array("q"), array("I"), ())
    crcs: array[int] = array("I")
    assert b"".join(sealed_pieces(memoryview(bytearray(b"file and more")), 4, empty, crcs)) == b"file"
    assert not crcs
    assert list(sealed_pieces(memoryview(bytearray(b"more")), 0, empty, crcs)) == []


def test_a_payload_is_read_once_when_its_piece_is_asked_for():
    """So that its checksum is computed while the CPU's cache has what is then written."""
    whole, memory, open_ends = file_with(b"")
    crcs: array[int] = array("I")
    for piece in sealed_pieces(memory, len(whole), open_ends, crcs):
        if len(piece) == BLOCK_NBYTES:
            assert crcs[-1] == crc32(piece)
            break
    assert len(crcs) == 1


@pytest.mark.parametrize("make", [lambda folder: LocalStore(folder), lambda folder: MemoryStore(f"memory://{folder}")])
def test_a_sealed_file_is_written(tmp_path, make):
    whole, memory, open_ends = file_with(b"small")
    store, moved, points = make(tmp_path), [], []
    with observed_by(points.append):
        crcs = write_sealed(store, "f", memory, len(whole), open_ends, moved.append)
    assert store.get("f") == whole
    assert tuple(crcs) == sum(map(block_crcs, PAYLOADS), ())
    assert sum(moved) == len(whole)
    assert points == [Point.MID_WRITE]


def test_a_write_can_be_stopped_and_leaves_nothing(tmp_path):
    whole, memory, open_ends = file_with(b"small")
    store = LocalStore(tmp_path)

    def stop(nbytes):
        raise KeyError("the save has failed elsewhere")

    with pytest.raises(KeyError, match="elsewhere"):
        write_sealed(store, "f", memory, len(whole), open_ends, stop)
    assert store.list() == []
    write_sealed(store, "f", memory, len(whole), open_ends)
    with pytest.raises(StoreError):
        write_sealed(store, "f", memory, len(whole), open_ends)


def test_room_is_made_before_the_first_byte(tmp_path, monkeypatch):
    whole, memory, open_ends = file_with(b"small")
    store, reserved = LocalStore(tmp_path), []
    real = store.put_new

    def put_new(key):
        context = real(key)

        class Watched:
            def __enter__(self):
                writer = context.__enter__()
                preallocate = writer.preallocate
                writer.preallocate = lambda nbytes: (reserved.append((writer.tell(), nbytes)), preallocate(nbytes))
                return writer

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Watched()

    monkeypatch.setattr(store, "put_new", put_new)
    write_sealed(store, "f", memory, len(whole), open_ends)
    assert reserved == [(0, len(whole))]
