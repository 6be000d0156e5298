"""What reads files is given thousands of damaged ones: it says so or is right, runs nothing, and stays within bounds.

A few hundred of each kind in `make test`, always the same ones; ten thousand new ones in `make nightly`.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import zlib
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

import ray_dcp as dcp
from ray_dcp.errors import CorruptCheckpointError, FormatVersionError, UnsafeDataError
from ray_dcp.format.checksums import crc32
from ray_dcp.format.manifest import Entry, Manifest, decode_facts, decode_manifest, encode_manifest
from ray_dcp.format.metadata_file import decode_metadata, decode_python, encode_metadata
from ray_dcp.format.safetensors_header import encode_header, read_header
from ray_dcp.format.torch_record import find_payload
from ray_dcp.format.zip_record import NotARecordError, frame_payload, frame_pickle, read_entries
from ray_dcp.planning.values.python_record import python_record
from tests.conftest import mutations
from tests.format.mutations import mutated, programs

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

MANY = mutations()


@pytest.fixture(autouse=True)
def _little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.fixture(scope="module")
def marker(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("marker") / "went_off")


def saved_metadata(save) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        save({"w": torch.ones(3, 2), "n": {"x": [1, 2]}, "e": torch.empty(0)}, checkpoint_id=place, no_dist=True)
        with open(f"{place}/.metadata", "rb") as file:
            return file.read()


METADATA = {"ours": saved_metadata(dcp.save), "torchs": saved_metadata(torch_dcp.save)}
either = st.sampled_from(sorted(METADATA))


def decoded_metadata(content: bytes, marker: str) -> Metadata | None:
    found = None
    with suppress(CorruptCheckpointError, UnsafeDataError):
        found = decode_metadata(content, file="f")
    assert not os.path.exists(marker)
    return found


@MANY
@given(st.data())
def test_metadata(marker, data):
    found = decoded_metadata(data.draw(mutated(METADATA[data.draw(either)])), marker)
    if found is not None:
        again = decode_metadata(encode_metadata(found), file="f")
        assert again.state_dict_metadata.keys() == found.state_dict_metadata.keys()


@MANY
@given(st.data())
def test_metadata_that_is_a_program(marker, data):
    program = data.draw(programs(marker))
    decoded_metadata(program, marker)
    content = METADATA["ours"]
    decoded_metadata(content[:-1] + program, marker)
    decoded_metadata(program[:-1] + content[2:], marker)


def test_such_programs_would_go_off_elsewhere(tmp_path):
    marker = tmp_path / "went_off"
    pickle.loads(b"cos\nmkdir\n(" + pickle.dumps(str(marker), protocol=1)[:-1] + b"tR.")
    assert marker.exists()


def torchs_record(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


TENSOR = torch.arange(40, dtype=torch.int16).reshape(5, 8)
PAYLOAD_BYTES = TENSOR.numpy().tobytes()
_frame = frame_payload(b"a pickle", len(PAYLOAD_BYTES))
RECORDS = {
    "torchs": torchs_record(TENSOR),
    "ours": _frame.head + PAYLOAD_BYTES + _frame.tail(crc32(PAYLOAD_BYTES)),
    "python": python_record({"a": [1, 2.5]}),
}


class Counted:
    """A record that is read by range, and how much was."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.nbytes = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(self.content)
        self.nbytes += nbytes
        return self.content[offset : offset + nbytes]


@MANY
@given(st.data())
def test_zip_entries(data):
    content = data.draw(mutated(RECORDS[data.draw(st.sampled_from(sorted(RECORDS)))]))
    record = Counted(content)
    with suppress(NotARecordError):
        for entry in read_entries(record.read, len(content)).values():
            assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(content)
    assert record.nbytes <= 2 * len(content) + 30 * len(content) // 46  # its end, its directory, a header an entry


@MANY
@given(st.data())
def test_payloads_in_torchs_records(data):
    content = data.draw(mutated(RECORDS["torchs"]))
    record = Counted(content)
    with suppress(NotARecordError):
        found = find_payload(record.read, len(content), TENSOR.dtype, tuple(TENSOR.shape))
        if found is not None:
            whole = content[found.offset : found.offset + found.nbytes]
            assert whole == PAYLOAD_BYTES or zlib.crc32(whole) != found.crc
    assert record.nbytes <= 3 * len(content) + 30 * len(content) // 46


@MANY
@given(st.data())
def test_python_objects(marker, data):
    value = {"a": [1, 2.5], "t": (torch.ones(2), None)}
    content = data.draw(mutated(data.draw(st.sampled_from([python_record(value), python_record({"a": [1, 2.5]})]))))
    with suppress(CorruptCheckpointError, UnsafeDataError):
        decode_python(io.BytesIO(content), file="f", fqn="x", trusted=False)
    assert not os.path.exists(marker)


@MANY
@given(st.data())
def test_python_objects_that_are_programs(marker, data):
    program = data.draw(programs(marker))
    for content in (program, frame_pickle(program)):
        with suppress(CorruptCheckpointError, UnsafeDataError):
            decode_python(io.BytesIO(content), file="f", fqn="x", trusted=False)
    assert not os.path.exists(marker)


MANIFEST = Manifest(
    [
        Entry("w", (0, 4), (2, 4), "bfloat16", "__0_0_ab.distcp", 0, 400, 64, 16, (7, 2**32 - 1), 0),
        Entry("n", None, None, None, "__0_0_ab.distcp", 400, 50, 400, 50, (9,), 1),
        Entry("e", (0,), (0,), "float32", "__1_0_ab.distcp", 0, 200, 64, 0, (), 1),
    ],
    2, "ab", "digest", 1.5, 7, {"loss": 0.5}, {"torch": "2"},
)  # fmt: skip
ENCODED_MANIFEST = encode_manifest(MANIFEST)
FACTS = decode_facts(ENCODED_MANIFEST, "m")


@MANY
@given(mutated(ENCODED_MANIFEST))
def test_manifests(content):
    with suppress(CorruptCheckpointError, FormatVersionError):
        assert decode_manifest(content, "m") == MANIFEST
    with suppress(CorruptCheckpointError, FormatVersionError):
        assert decode_facts(content, "m") == FACTS


_front, _ = encode_header([("w", "float32", (2, 3)), ("n", "bfloat16", (5,)), ("e", "int64", (0,))], {"made": "by"})
SAFETENSORS = _front + bytes(range(34))


@MANY
@given(mutated(SAFETENSORS))
def test_safetensors_headers(content):
    file = Counted(content)
    with suppress(CorruptCheckpointError):
        header = read_header(file.read, len(content), file="f")
        ends = [tensor.offset + tensor.nbytes for tensor in header.tensors]
        assert ends == sorted(ends)
        assert all(end <= len(content) for end in ends)
    assert file.nbytes <= len(content) + 8
