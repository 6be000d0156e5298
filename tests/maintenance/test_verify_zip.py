"""No byte around a record's contents can change without being noticed."""

from __future__ import annotations

import io
import struct

import pytest
import torch

from ray_dcp.format.checksums import crc32
from ray_dcp.format.zip_record import (
    CENTRAL,
    DESCRIPTOR_64,
    END,
    END_64,
    LOCAL,
    LOCAL_SIGNATURE,
    LOCATOR_64,
    ZIP64,
    ZIP64_ID,
    NotARecordError,
    frame_pickle,
    read_entries,
)
from ray_dcp.maintenance.verify.zip_check import find_zip_problems
from tests.format.test_zip_record import BYTES, SparseRecord, framed, read_from, torch_record

RECORDS = {
    "ours": framed(BYTES)[0],
    "ours, checksum behind": framed(BYTES, position=192, described=True)[0],
    "ours, empty": framed(torch.empty(0), described=True)[0],
    "ours, all pickle": frame_pickle(b"a pickle"),
    "torch's": torch_record(BYTES),
    "torch's, of several": torch_record([torch.ones(3), {"a": torch.zeros(2)}]),
}


def problems(record: bytes) -> list[tuple[int, int]]:
    """The ranges that are wrong: in the structure, or by a checksum of contents."""
    try:
        entries = read_entries(read_from(record), len(record))
    except NotARecordError:
        return [(0, len(record))]
    wrong = [(one.start, one.end) for one in find_zip_problems(read_from(record), len(record))]
    contents = [(entry, record[entry.offset : entry.offset + entry.nbytes]) for entry in entries.values()]
    return wrong + [(e.offset, e.offset + e.nbytes) for e, content in contents if crc32(content) != e.crc]


@pytest.mark.parametrize("name", RECORDS)
def test_a_whole_record_has_no_problem(name):
    assert problems(RECORDS[name]) == []


@pytest.mark.parametrize("name", RECORDS)
def test_every_single_bit_that_is_flipped_is_a_problem_that_covers_it(name):
    record = RECORDS[name]
    missed = []
    for place in range(len(record)):
        for bit in range(8) if len(record) < 1000 else (place % 8,):
            damaged = bytearray(record)
            damaged[place] ^= 1 << bit
            if not any(start <= place < end for start, end in problems(bytes(damaged))):
                missed.append((place, bit))
    assert missed == []


def test_what_torch_wrote_without_checksums_is_whole_too():
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        buffer = io.BytesIO()
        torch.save(BYTES, buffer)
    record = buffer.getvalue()
    assert list(find_zip_problems(read_from(record), len(record))) == []


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("nbytes", [(1 << 32) - 300, (1 << 32) - 1, 1 << 32, 1 << 40])
def test_a_record_beyond_four_gib_is_looked_at_without_reading_its_payload(nbytes, described):
    record = SparseRecord(nbytes, described=described)
    assert list(find_zip_problems(record.read, record.frame.nbytes)) == []
    assert record.num_read < 20_000
    record.tail = bytes([record.tail[0] ^ 1]) + record.tail[1:]
    record.num_read = 0
    if described:  # else a byte of the directory's signature
        assert list(find_zip_problems(record.read, record.frame.nbytes)) != []
    else:
        with pytest.raises(NotARecordError):
            list(find_zip_problems(record.read, record.frame.nbytes))
    assert record.num_read < 20_000


class TorchsLargeRecord:
    """As torch writes a payload of zeros beyond 4 GiB, and an entry behind it."""

    def __init__(self, payload_nbytes: int) -> None:
        def header(name: bytes, *large: int) -> bytes:
            extra = struct.pack(f"<2H{len(large)}Q", ZIP64_ID, 8 * len(large), *large) + b"FB\x03\x00ZZZ"
            return LOCAL.pack(LOCAL_SIGNATURE, 0, 2056, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra

        self.head = header(b"archive/data/0", payload_nbytes, 0)
        self.payload_nbytes, at = payload_nbytes, len(self.head) + payload_nbytes + DESCRIPTOR_64.size
        behind = header(b"archive/version", at) + b"3\n"
        entries = [(b"archive/data/0", 5, payload_nbytes, 0), (b"archive/version", crc32(b"3\n"), 2, at)]
        descriptors = [DESCRIPTOR_64.pack(b"PK\x07\x08", crc, nbytes, nbytes) for _, crc, nbytes, _ in entries]
        directory = b""
        for name, crc, nbytes, offset in entries:
            large = [number for number in (nbytes, nbytes, offset) if number >= ZIP64]
            directory += CENTRAL.pack(
                b"PK\x01\x02", 0, 0, 2056, 0, 0, 0, crc, min(nbytes, ZIP64), min(nbytes, ZIP64), len(name),
                4 + 8 * len(large), 0, 0, 0, 0, min(offset, ZIP64),
            ) + name + struct.pack(f"<2H{len(large)}Q", ZIP64_ID, 8 * len(large), *large)  # fmt: skip
        starts_at = at + len(behind) + DESCRIPTOR_64.size
        self.tail = b"".join((descriptors[0], behind, descriptors[1], directory,
                              END_64.pack(b"PK\x06\x06", 44, 0x31E, 45, 0, 0, 2, 2, len(directory), starts_at),
                              LOCATOR_64.pack(b"PK\x06\x07", 0, starts_at + len(directory), 1),
                              END.pack(b"PK\x05\x06", 0, 0, 2, 2, len(directory), ZIP64, 0)))  # fmt: skip

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.payload_nbytes + len(self.tail)

    def read(self, offset: int, nbytes: int) -> bytes:
        assert nbytes < 200_000
        tail_at, end = len(self.head) + self.payload_nbytes, offset + nbytes
        zeros = bytes(max(0, min(end, tail_at) - max(offset, len(self.head))))
        return self.head[offset:end] + zeros + self.tail[max(0, offset - tail_at) : max(0, end - tail_at)]


@pytest.mark.parametrize("nbytes", [1 << 32, (1 << 32) + 12345])
def test_a_record_of_torchs_beyond_four_gib_is_whole_and_each_flipped_byte_is_a_problem(nbytes):
    record = TorchsLargeRecord(nbytes)
    assert read_entries(record.read, record.nbytes)["data/0"].nbytes == nbytes
    assert list(find_zip_problems(record.read, record.nbytes)) == []
    for part in ("head", "tail"):
        whole = getattr(record, part)
        for place in range(len(whole)):
            setattr(record, part, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            try:
                read_entries(record.read, record.nbytes)
                found = list(find_zip_problems(record.read, record.nbytes))
            except NotARecordError:
                found = [None]
            assert found or b"3\n" not in record.tail, "contents are not looked at here"
        setattr(record, part, whole)
