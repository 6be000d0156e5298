"""No byte around a record's contents can change without being noticed."""

from __future__ import annotations

import io

import pytest
import torch

from ray_dcp.checksums import crc32
from ray_dcp.maintenance.verify_zip import find_zip_problems
from ray_dcp.zip_record import NotARecordError, frame_pickle, read_entries
from tests.test_zip_record import BYTES, SparseRecord, framed, read_from, torch_record

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
