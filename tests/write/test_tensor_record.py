"""One record: where its bytes lie, that they are the tensor's own, and that every checksum is right."""

from __future__ import annotations

import io
import tempfile
import zipfile
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ray_dcp.format.checksums import BlockChecksums
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.format.zip_record import MAX_ROW_NBYTES
from ray_dcp.store.local import LocalStore
from ray_dcp.write.tensor_record import JoinedWrites, Payload, PythonRecord, Row, TensorRecord
from tests.shardings import DTYPES, KINDS, same_bits, whole_tensor


def written(folder, *values) -> tuple[bytes, list[Payload]]:
    """A file with a record of each value, and what was said of each. Bytes are Python objects, pickled before."""
    store, row, payloads = LocalStore(folder), Row(), []
    with store.put_new("f") as file:
        sink = JoinedWrites(file)
        for number, value in enumerate(values):
            record = PythonRecord(memoryview(value)) if isinstance(value, bytes) else TensorRecord(value)
            end = record.lay_out(sink.tell(), row, f"value {number}")
            payloads.append(record.write(sink))
            assert sink.tell() == end
        sink.flush()
    return store.get("f"), payloads


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def record_of(content: bytes, payload: Payload) -> bytes:
    return content[payload.record_offset : payload.record_offset + payload.record_nbytes]


def payload_of(content: bytes, payload: Payload) -> bytes:
    return content[payload.payload_offset : payload.payload_offset + payload.payload_nbytes]


def require_right(content: bytes, payload: Payload, tensor: torch.Tensor) -> None:
    """The payload is the tensor's bytes, aligned in the file, all checksums fit, and stock torch reads the record."""
    expected = raw(tensor)
    assert payload_of(content, payload) == expected
    assert payload.record_offset % 64 == 0
    if expected:
        assert payload.payload_offset % 64 == 0
        assert payload.record_offset < payload.payload_offset < payload.record_offset + payload.record_nbytes
    assert payload.block_crcs == tuple(
        zlib.crc32(expected[start : start + BLOCK_NBYTES]) for start in range(0, len(expected), BLOCK_NBYTES)
    )
    record = record_of(content, payload)
    assert zipfile.ZipFile(io.BytesIO(record)).testzip() is None
    assert same_bits(torch.load(io.BytesIO(record), weights_only=True), tensor)


def test_records_of_every_kind_and_dtype_follow_each_other_in_one_file(tmp_path):
    tensors = [whole_tensor(kind, dtype) for kind in KINDS for dtype in DTYPES]
    content, payloads = written(tmp_path, *tensors)
    for payload, tensor in zip(payloads, tensors, strict=True):
        require_right(content, payload, tensor)
    ends = [payload.record_offset + payload.record_nbytes for payload in payloads]
    assert all(0 <= later.record_offset - end < 64 for end, later in zip(ends, payloads[1:], strict=False))
    assert ends[-1] == len(content)


KINDS_OF_TINY = st.tuples(
    st.sampled_from([torch.float32, torch.int64, torch.uint8]), st.sampled_from([(), (1,), (5,), (16,), (0,), (65,)])
)


@settings(deadline=None)
@given(st.lists(KINDS_OF_TINY, max_size=60), st.booleans())
def test_tiny_records_of_one_kind_share_their_head_and_each_is_a_whole_zip_file(kinds, together):
    kinds = sorted(kinds, key=str) if together else kinds
    tensors = [torch.randint(0, 256, sizes).to(dtype) for dtype, sizes in kinds]
    with tempfile.TemporaryDirectory() as folder:
        content, payloads = written(folder, *tensors)
    for payload, tensor in zip(payloads, tensors, strict=True):
        require_right(content, payload, tensor)
        assert payload.record_nbytes <= max(MAX_ROW_NBYTES, 512 + tensor.nbytes)
    for before, payload, this, last in zip(payloads, payloads[1:], tensors[1:], tensors, strict=False):
        shares = payload.record_offset == before.record_offset
        alike = (this.dtype, this.shape) == (last.dtype, last.shape) and 0 < this.nbytes <= 8
        assert shares <= alike
        assert payload.record_offset + payload.record_nbytes > before.record_offset + before.record_nbytes
        if alike and not shares:
            assert before.record_nbytes + 256 > MAX_ROW_NBYTES - 64


def test_in_a_row_a_number_takes_256_bytes(tmp_path):
    content, payloads = written(tmp_path, *torch.arange(100.0))
    assert len(content) == payloads[-1].record_offset + payloads[-1].record_nbytes < 100 * 256 + 7 * 256
    assert len({payload.record_offset for payload in payloads}) == 7


def test_a_record_that_follows_none_of_its_kind_is_as_it_was_alone(tmp_path):
    alone = [written(tmp_path / str(n), tensor)[0] for n, tensor in enumerate(TINY)]
    content, payloads = written(tmp_path, *TINY)
    assert [record_of(content, payload) for payload in payloads] == alone


TINY = [torch.tensor(1.0), torch.tensor(1), torch.tensor(2.0), torch.tensor([2.0]), torch.ones(17), torch.zeros(17)]


@pytest.mark.parametrize("nbytes", [1, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, 2 * BLOCK_NBYTES + 5])
def test_every_block_has_its_checksum(tmp_path, nbytes):
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    content, (payload,) = written(tmp_path, tensor)
    start = payload.payload_offset
    blocks = [content[start + at : start + min(at + BLOCK_NBYTES, nbytes)] for at in range(0, nbytes, BLOCK_NBYTES)]
    assert b"".join(blocks) == tensor.numpy().tobytes()
    assert payload.block_crcs == tuple(map(zlib.crc32, blocks))
    assert zipfile.ZipFile(io.BytesIO(record_of(content, payload))).testzip() is None


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_an_empty_tensor_has_a_record_and_no_payload(tmp_path, shape):
    content, (payload, after) = written(tmp_path, torch.empty(shape, dtype=torch.int16), torch.ones(2))
    assert (payload.payload_nbytes, payload.block_crcs) == (0, ())
    loaded = torch.load(io.BytesIO(record_of(content, payload)), weights_only=True)
    assert (tuple(loaded.shape), loaded.dtype) == (shape, torch.int16)
    require_right(content, after, torch.ones(2))


VIEWS = {
    "row of a big tensor": lambda: torch.arange(4e5).reshape(4, -1)[2],
    "column of a big tensor": lambda: torch.arange(4e5).reshape(-1, 4)[:, 1],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "every other": lambda: torch.arange(20, dtype=torch.int16)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "channels last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "of a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "first of a storage": lambda: torch.arange(9.0)[:3],
    "still arriving": lambda: AsyncCollectiveTensor(torch.ones(3)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_stored_as_its_own_values_and_nothing_else(tmp_path, view):
    tensor = VIEWS[view]()
    before = tensor.detach().clone().resolve_conj().resolve_neg().contiguous()
    content, (payload,) = written(tmp_path, tensor)
    require_right(content, payload, before)
    assert payload.record_nbytes < before.nbytes + 4096


def test_a_subclass_is_stored_as_the_plain_tensor_it_is(tmp_path):
    class Named(torch.Tensor):
        pass

    content, (payload,) = written(tmp_path, torch.ones(3).as_subclass(Named))
    assert type(torch.load(io.BytesIO(record_of(content, payload)), weights_only=True)) is torch.Tensor
    require_right(content, payload, torch.ones(3))


def test_a_python_objects_payload_is_its_whole_record(tmp_path):
    pickled = io.BytesIO()
    torch.save({"a": [1, "x"]}, pickled)
    content, (_, payload) = written(tmp_path, torch.ones(1), pickled.getvalue())
    assert (payload.record_offset, payload.record_nbytes) == (payload.payload_offset, payload.payload_nbytes)
    assert record_of(content, payload) == pickled.getvalue()
    assert payload.block_crcs == (zlib.crc32(pickled.getvalue()),)


@given(st.lists(st.integers(0, 3 * BLOCK_NBYTES // 4), max_size=6))
def test_checksums_do_not_depend_on_how_the_bytes_arrive(lengths):
    content = bytes(range(251)) * (sum(lengths) // 251 + 1)
    checksums, position = BlockChecksums(), 0
    for length in lengths:
        checksums.update(memoryview(content)[position : position + length])
        position += length
    whole = content[:position]
    assert checksums.crcs() == tuple(
        zlib.crc32(whole[start : start + BLOCK_NBYTES]) for start in range(0, position, BLOCK_NBYTES)
    )
