"""A record is a zip file that torch and every zip tool can read, and a reader finds in it what was put there."""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.format.checksums import crc32, crc_of_blocks
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.zip_record import (
    PAYLOAD,
    PICKLE,
    VERSION,
    NotARecordError,
    Read,
    RecordFrame,
    frame_payload,
    frame_pickle,
    read_directory,
    read_entries,
)
from tests.shardings import same_bits

BYTES = torch.arange(200, dtype=torch.uint8)


def read_from(content: bytes) -> Read:
    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(content), "a reader is asked for what is there only"
        return content[offset : offset + nbytes]

    return read


def torch_record(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickle_of(value) -> bytes:
    """What torch itself puts into ``data.pkl``."""
    with zipfile.ZipFile(io.BytesIO(torch_record(value))) as record:
        return record.read("archive/data.pkl")


def framed(tensor: torch.Tensor, *, position: int = 0, described: bool = False) -> tuple[bytes, RecordFrame]:
    payload = tensor.view(torch.uint8).numpy().tobytes()
    crc = crc32(payload)
    frame = frame_payload(pickle_of(tensor), len(payload), position=position, crc=None if described else crc)
    return frame.head + payload + frame.tail(crc), frame


@given(st.integers(0, 1 << 50), st.booleans(), st.integers(1, 300))
def test_a_record_loads_with_torch_wherever_it_begins_in_its_file(position, described, numel):
    tensor = torch.arange(numel, dtype=torch.int16)
    record, frame = framed(tensor, position=position, described=described)
    assert len(record) == frame.nbytes
    assert (position + frame.payload_at) % 64 == 0
    assert len(frame.head) == frame.payload_at < 1024
    assert same_bits(torch.load(io.BytesIO(record), weights_only=True), tensor)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 1000])
def test_a_record_loads_from_the_middle_of_its_file(tmp_path, position):
    record, _ = framed(BYTES, position=position)
    (tmp_path / "f").write_bytes(b"x" * position + record)
    with open(tmp_path / "f", "rb") as file:
        file.seek(position)
        assert same_bits(torch.load(io.BytesIO(file.read()), weights_only=True), BYTES)


@pytest.mark.parametrize("described", [False, True])
def test_any_zip_tool_reads_a_record_and_finds_no_error(described):
    record, frame = framed(BYTES, described=described)
    with zipfile.ZipFile(io.BytesIO(record)) as opened:
        assert opened.testzip() is None
        assert opened.read("a/data/0") == BYTES.numpy().tobytes()
    damaged = bytearray(record)
    damaged[frame.payload_at] ^= 1
    with zipfile.ZipFile(io.BytesIO(damaged)) as opened:
        assert opened.testzip() == "a/data/0"


@pytest.mark.parametrize("described", [False, True])
def test_a_payload_without_bytes_is_a_record_too(described):
    empty = torch.empty(0, 3)
    record, _ = framed(empty, described=described)
    assert same_bits(torch.load(io.BytesIO(record), weights_only=True), empty)
    assert read_entries(read_from(record), len(record))[PAYLOAD].nbytes == 0


def test_equal_values_make_equal_records():
    assert framed(BYTES)[0] == framed(BYTES.clone())[0]


@given(st.binary(max_size=2000))
def test_a_record_that_is_all_pickle_has_it(pickled):
    record = frame_pickle(pickled)
    entries = read_entries(read_from(record), len(record))
    assert set(entries) == {PICKLE, VERSION}
    assert record[entries[PICKLE].offset :][: entries[PICKLE].nbytes] == pickled
    assert entries[PICKLE].crc == crc32(pickled)


def test_a_pickled_value_loads_with_torch():
    assert torch.load(io.BytesIO(frame_pickle(pickle_of({"a": [1, "b"]}))), weights_only=True) == {"a": [1, "b"]}


@given(st.binary(max_size=3000), st.binary(max_size=3000), st.integers(0, 5000), st.booleans())
def test_a_reader_finds_what_was_framed(pickled, payload, position, described):
    crc = crc32(payload)
    frame = frame_payload(pickled, len(payload), position=position, crc=None if described else crc)
    record = frame.head + payload + frame.tail(crc)
    entries = read_entries(read_from(record), len(record))
    assert {name: record[e.offset :][: e.nbytes] for name, e in entries.items()} == {
        PICKLE: pickled,
        PAYLOAD: payload,
        VERSION: b"3\n",
    }
    assert entries[PAYLOAD].offset == frame.payload_at
    assert all(crc32(record[e.offset :][: e.nbytes]) == e.crc for e in entries.values())


@pytest.mark.parametrize("value", [BYTES, {"a": [1, "b"]}, [torch.ones(3), torch.zeros(2, 2)], torch.empty(0)])
def test_a_reader_finds_the_same_as_zipfile_in_what_torch_wrote(value):
    record = torch_record(value)
    entries = read_entries(read_from(record), len(record))
    with zipfile.ZipFile(io.BytesIO(record)) as opened:
        expected = {info.filename.partition("/")[2]: opened.read(info) for info in opened.infolist()}
    assert {name: record[e.offset :][: e.nbytes] for name, e in entries.items()} == expected


@given(st.binary(max_size=300))
def test_what_is_no_zip_file_is_said_to_be_none(content):
    with pytest.raises(NotARecordError):
        read_entries(read_from(content), len(content))


RECORDS = [framed(BYTES)[0], framed(BYTES, described=True)[0], torch_record(BYTES), frame_pickle(b"abc")]


@given(st.sampled_from(RECORDS), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6))
def test_whatever_is_damaged_a_reader_never_breaks_nor_reads_beyond(record, damage):
    changed = bytearray(record)
    for place, value in damage:
        changed[place % len(record)] = value
    with suppress(NotARecordError):
        for entry in read_entries(read_from(bytes(changed)), len(changed)).values():
            assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(changed)


@given(st.sampled_from(RECORDS), st.integers(0, 2000))
def test_a_record_that_is_cut_short_is_none(record, left):
    short = record[: left % len(record)]
    with pytest.raises(NotARecordError):
        read_entries(read_from(short), len(short))


def zip_file(*entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as written:
        warnings.simplefilter("ignore")  # that a name comes twice
        for name, content in entries:
            written.writestr(name, content)
        written.comment = comment
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zip_file(("a/b", bytes(100)), compression=zipfile.ZIP_DEFLATED), "compressed"),
        (zip_file(("a/b", b"x"), comment=b"hello"), "no end of a zip file"),
        (zip_file(("a/b", b"x"), ("a/b", b"y")), "two entries"),
        (zip_file(("a/b", b"x"), ("c/b", b"y")), "two entries"),
        (zip_file(("a/b", b"x")).replace(b"PK\x03\x04", b"PK\x03\x05"), "no header"),
        (zip_file(("a/b", b"x"))[1:], "right in front of its end"),
        (b"x" + zip_file(("a/b", b"x")), "right in front of its end"),
    ],
)
def test_a_zip_file_that_is_no_record_is_refused_with_the_reason(content, said):
    with pytest.raises(NotARecordError, match=said):
        read_entries(read_from(content), len(content))


class SparseRecord:
    """A record whose payload is zeros, as many as one likes: only what stands around it is there."""

    def __init__(self, payload_nbytes: int, *, described: bool) -> None:
        zeros = crc32(bytes(BLOCK_NBYTES))
        count, rest = divmod(payload_nbytes, BLOCK_NBYTES)
        self.crc = crc_of_blocks([zeros] * count + ([crc32(bytes(rest))] if rest else []), payload_nbytes)
        self.frame = frame_payload(b"pickle", payload_nbytes, position=64, crc=None if described else self.crc)
        self.tail = self.frame.tail(self.crc)
        self.num_read = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= self.frame.nbytes
        self.num_read += nbytes
        head, tail_at = self.frame.head, self.frame.nbytes - len(self.tail)
        zeros = bytes(max(0, min(offset + nbytes, tail_at) - max(offset, len(head))))
        return (
            head[offset : offset + nbytes]
            + zeros
            + self.tail[max(0, offset - tail_at) : max(0, offset + nbytes - tail_at)]
        )


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("nbytes", [(1 << 32) - 300, (1 << 32) - 2, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 40])
def test_payloads_around_and_beyond_four_gib_are_found(nbytes, described):
    record = SparseRecord(nbytes, described=described)
    entries = read_entries(record.read, record.frame.nbytes)
    payload = entries[PAYLOAD]
    assert (payload.offset, payload.nbytes, payload.crc) == (record.frame.payload_at, nbytes, record.crc)
    assert (64 + payload.offset) % 64 == 0
    assert record.num_read < 10_000


class SparseFile(io.RawIOBase):
    """``SparseRecord`` as a file."""

    def __init__(self, record: SparseRecord) -> None:
        self._record, self._at = record, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._record.frame.nbytes}[whence]
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        content = self._record.read(self._at, min(len(buffer), self._record.frame.nbytes - self._at))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("nbytes", [(1 << 32) - 300, (1 << 32) - 1, 1 << 32, (1 << 36) + 1])
def test_zipfile_and_torch_find_payloads_around_and_beyond_four_gib(nbytes, described):
    record = SparseRecord(nbytes, described=described)
    with zipfile.ZipFile(io.BufferedReader(SparseFile(record))) as opened:
        info = opened.getinfo("a/data/0")
        assert (info.file_size, info.CRC) == (nbytes, record.crc)
        with opened.open(info) as content:
            assert content.read(100) == bytes(100)
    reader = torch._C.PyTorchFileReader(io.BufferedReader(SparseFile(record)))
    assert reader.get_record_offset("data/0") == record.frame.payload_at
    assert reader.get_record("data.pkl") == b"pickle"


def test_a_directory_whose_numbers_are_damaged_does_not_make_a_reader_read_all_there_is():
    record = SparseRecord(1 << 40, described=True)
    rng = random.Random(0)
    for place in range(len(record.tail)):
        record.num_read, whole = 0, record.tail
        record.tail = whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]
        with suppress(NotARecordError):
            read_directory(record.read, record.frame.nbytes)
        assert record.num_read < 10_000
        record.tail = whole
