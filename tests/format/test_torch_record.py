"""The payload in torch's own records: found where it is the tensor, else left to torch; never something else."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
import torch.utils.serialization

from ray_dcp.format.torch_record import find_payload
from ray_dcp.format.zip_record import NotARecordError
from tests.shardings import DTYPES, whole_tensor

ALL_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


def record_of(value, **settings) -> bytes:
    buffer = io.BytesIO()
    with torch.utils.serialization.config.patch({f"save.{name}": setting for name, setting in settings.items()}):
        torch.save(value, buffer)
    return buffer.getvalue()


def found_in(record: bytes, dtype: torch.dtype, sizes) -> bytes | None:
    """The payload's bytes."""
    found = find_payload(lambda offset, nbytes: record[offset : offset + nbytes], len(record), dtype, tuple(sizes))
    return None if found is None else record[found.offset : found.offset + found.nbytes]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Marked(torch.Tensor):
    """A class of a user's."""


FOUND = {f"{kind} {dtype}": whole_tensor(kind, dtype) for kind in ("rows", "scalar", "no_rows") for dtype in DTYPES}
FOUND |= {
    "large": torch.arange(2**19 + 3),
    "a view of all of its storage": torch.arange(6.0).view(2, 3),
}


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize("checksums", [True, False])
def test_a_contiguous_tensor_is_found(kind, checksums):
    tensor = FOUND[kind]
    assert found_in(record_of(tensor, compute_crc32=checksums), tensor.dtype, tensor.shape) == bytes_of(tensor)


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_any_alignment_is_found(alignment):
    tensor = torch.arange(1000.0)
    assert found_in(record_of(tensor, storage_alignment=alignment), tensor.dtype, tensor.shape) == bytes_of(tensor)


LEFT_TO_TORCH = {
    "one row with the strides of a column": lambda: torch.arange(6.0).reshape(6, 1).t(),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "a slice of a larger storage": lambda: torch.arange(10.0)[2:5],
    "a slice that begins with its storage": lambda: torch.arange(10.0)[:5],
    "every second": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "needs a gradient": lambda: torch.ones(3, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "a class": lambda: torch.ones(3).as_subclass(Marked),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "with attributes": lambda: with_attributes(torch.ones(3)),
    "a number": lambda: 5,
    "a list of tensors": lambda: [torch.ones(3), torch.ones(3)],
    "a list of one": lambda: [torch.ones(3)],
    "a storage": lambda: torch.ones(3).untyped_storage(),
}


def with_attributes(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "remember"
    return tensor


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", LEFT_TO_TORCH)
def test_what_is_more_than_its_bytes_is_left_to_torch(kind):
    value = LEFT_TO_TORCH[kind]()
    dtype, sizes = (value.dtype, value.shape) if isinstance(value, torch.Tensor) else (torch.float32, (3,))
    assert found_in(record_of(value), dtype, sizes) is None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_tensor_is_left_to_torch():
    value = torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.quint8)
    assert found_in(record_of(value), value.dtype, value.shape) is None


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(), (6,), (2, 3), (3, 2), (12,), (2**61, 0, 2**61), (2**62, 2**62), (-2, -3)], ids=str
)
def test_a_description_that_is_not_the_tensors_finds_nothing(dtype, sizes):
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    found = found_in(record_of(tensor), dtype, sizes)
    assert found == (bytes_of(tensor) if (dtype, sizes) == (torch.int32, (2, 3)) else None)


def rewritten(record: bytes, change, **options) -> bytes:
    """The same entries, as ``change`` has them, in a zip file of Python's."""
    source, buffer = zipfile.ZipFile(io.BytesIO(record)), io.BytesIO()
    contents = {entry.filename: source.read(entry) for entry in source.infolist()}
    change(contents)
    with zipfile.ZipFile(buffer, "w", **options) as target:
        for name, content in contents.items():
            target.writestr(name, content)
    return buffer.getvalue()


TENSOR = torch.arange(6, dtype=torch.int32).reshape(2, 3)


def test_another_programs_zip_of_the_same_entries_is_as_good():
    record = rewritten(record_of(TENSOR), lambda contents: None)
    assert found_in(record, TENSOR.dtype, TENSOR.shape) == bytes_of(TENSOR)


@pytest.mark.parametrize(
    "change",
    [
        lambda contents: contents.update({"archive/byteorder": b"big"}),
        lambda contents: contents.update({"archive/byteorder": bytes(1 << 17)}),
        lambda contents: contents.pop("archive/version"),
        lambda contents: contents.pop("archive/data.pkl"),
        lambda contents: contents.pop("archive/data/0"),
        lambda contents: contents.update({"archive/data/0": bytes(20)}),
        lambda contents: contents.update({"archive/data/0": bytes(28)}),
        lambda contents: contents.update({"archive/data.pkl": contents["archive/data.pkl"] + b"."}),
    ],
    ids=["big-endian", "no byte order", "no version", "no pickle", "no payload", "short", "long", "more pickle"],
)
def test_a_record_that_is_not_quite_one_is_left_to_torch(change):
    assert found_in(rewritten(record_of(TENSOR), change), TENSOR.dtype, TENSOR.shape) is None


@pytest.mark.parametrize("record", [b"", b"x" * 300, bytes(5000), record_of(TENSOR)[:-1], record_of(TENSOR) + b"x"])
def test_what_is_no_zip_file_is_told(record):
    with pytest.raises(NotARecordError):
        found_in(record, TENSOR.dtype, TENSOR.shape)


def test_a_compressed_one_is_told():
    with pytest.raises(NotARecordError, match="compressed"):
        found_in(
            rewritten(record_of(TENSOR), lambda _: None, compression=zipfile.ZIP_DEFLATED), TENSOR.dtype, TENSOR.shape
        )


def test_each_flipped_bit_is_told_or_leaves_the_payload_where_it_is():
    """Or leaves it to torch, which is told of it by the record's own checksums."""
    record = record_of(TENSOR)
    for at in range(len(record)):
        for bit in range(8):
            flipped = bytearray(record)
            flipped[at] ^= 1 << bit
            try:
                found = find_payload(lambda o, n, c=flipped: bytes(c[o : o + n]), len(flipped), TENSOR.dtype, (2, 3))
            except NotARecordError:
                continue
            if found is None:
                continue
            whole = bytes(flipped[found.offset : found.offset + found.nbytes])
            assert found.crc is not None
            assert whole == bytes_of(TENSOR) or zipfile.crc32(whole) != found.crc
