"""Each record is a file that torch and any zip tool read; views, large tensors and many small ones pass both ways."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import LocalShards
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.names import BLOCK_NBYTES, PAYLOAD_ALIGNMENT
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import DTYPES, same_bits, whole_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


def bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    found = torch.arange(count * dtype.itemsize) * 37 % (2 if dtype == torch.bool else 119)
    return found.to(torch.uint8).view(dtype)


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(2400.0).reshape(40, 60)
    wide = torch.arange(900_000.0).reshape(900, 1000)
    return {
        "transposed": base.t(),
        "every second": base[::2, 1::3],
        "a slice in the middle": base[10:20],
        "one element": base[3, 4],
        "expanded": base[:1].expand(5, 60),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "needs a gradient": torch.ones(3, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.ones(3)),
        "large and transposed": wide.t(),
        "large columns": wide[:, 100:600],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty and transposed": torch.empty(0, 3).t(),
    }


def large() -> dict[str, torch.Tensor]:
    sizes = (BLOCK_NBYTES - 8, BLOCK_NBYTES, BLOCK_NBYTES + 8, 3 * BLOCK_NBYTES, 7 * BLOCK_NBYTES // 2 + 8)
    return {f"{dtype} {nbytes}": bits(dtype, nbytes // dtype.itemsize) for dtype in DTYPES for nbytes in sizes}


def small() -> dict[str, torch.Tensor]:
    return {f"{n}.{dtype}": bits(dtype, n % 17) for n in range(150) for dtype in DTYPES}


STATES = {"views": views, "large": large, "small": small}
WAYS = {"ours by torch": (dcp.save, torch_dcp.load), "torchs by ours": (torch_dcp.save, dcp.load),
        "ours by ours": (dcp.save, dcp.load)}  # fmt: skip


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def unlike(tensor: torch.Tensor) -> torch.Tensor:
    return (plain(tensor).reshape(-1).view(torch.uint8) ^ 1).view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_values_pass_bit_for_bit(tmp_path, kind, way):
    save, load = WAYS[way]
    saved = STATES[kind]()
    save(saved, checkpoint_id=tmp_path, no_dist=True)
    filled = {name: unlike(tensor) for name, tensor in saved.items()}
    load(filled, checkpoint_id=tmp_path, no_dist=True)
    assert [name for name in saved if not same_bits(filled[name], plain(saved[name]))] == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Two ranks; each has two chunks of a tensor and a part of all else."""
    place = tmp_path_factory.mktemp("records")
    everything = small() | views() | {"big": bits(torch.float32, 700_000), "": torch.ones(2), "zero": torch.tensor(3)}
    strips = whole_tensor("two_chunks", torch.float32)

    def of_rank(rank):
        chunks = {(start, 0): strips[start : start + 4].clone() for start in (4 * rank, 4 * (rank + 2))}
        return everything | {"strips": LocalShards(strips.shape, chunks), "x": (1, {"a": torch.ones(2)}), "n": 5}

    require_no_errors(ThreadRanks(2).save(of_rank, place))
    return place, everything, strips


def records(place):
    for entry in decode_manifest((place / "manifest.parquet").read_bytes(), file="m").entries:
        content = (place / entry.file).read_bytes()
        yield entry, content[entry.record_offset : entry.record_offset + entry.record_nbytes]


def expected(entry, everything, strips):
    if entry.fqn == "strips":
        return strips[entry.offsets[0] : entry.offsets[0] + 4]
    return plain(everything[entry.fqn])


def test_each_record_is_a_zip_file_whose_checksums_are_right(checkpoint):
    count = 0
    for entry, record in records(checkpoint[0]):
        with zipfile.ZipFile(io.BytesIO(record)) as entries:
            assert entries.testzip() is None
            assert all(one.CRC for one in entries.infolist() if one.file_size and one.filename != "a/data/0")
            if entry.dtype is not None:
                assert len(entries.read("a/data/0")) == entry.payload_nbytes
        count += 1
    assert count > 1000


def test_each_record_cut_out_is_a_file_that_torch_reads_and_maps(checkpoint, tmp_path):
    place, everything, strips = checkpoint
    for number, (entry, record) in enumerate(records(place)):
        if entry.dtype is None:
            continue
        value = torch.load(io.BytesIO(record), weights_only=True)
        assert same_bits(value, expected(entry, everything, strips))
        assert type(value) is torch.Tensor
        assert not value.requires_grad
        if number % 20 == 0 or entry.payload_nbytes > 1000:
            (tmp_path / "one.pt").write_bytes(record)
            mapped = torch.load(tmp_path / "one.pt", weights_only=True, mmap=True)
            assert same_bits(mapped, value)
            del mapped


def test_only_the_tensors_own_bytes_are_stored(checkpoint):
    place, everything, strips = checkpoint
    for entry, record in records(place):
        if entry.dtype is not None:
            wanted = expected(entry, everything, strips)
            at = entry.payload_offset - entry.record_offset
            assert entry.payload_nbytes == wanted.nbytes
            assert record[at : at + wanted.nbytes] == wanted.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert len(record) <= max(4096, wanted.nbytes + 1500)


def test_payloads_are_aligned_in_the_file(checkpoint):
    entries = [entry for entry, _ in records(checkpoint[0]) if entry.dtype is not None]
    assert {entry.payload_offset % PAYLOAD_ALIGNMENT for entry in entries} == {0}


def test_several_chunks_a_rank_come_back_in_one_by_both(checkpoint):
    place, _, strips = checkpoint
    for load in (dcp.load, torch_dcp.load):
        filled = {"strips": torch.full_like(strips, -1)}
        load(filled, checkpoint_id=place, no_dist=True)
        assert same_bits(filled["strips"], strips)
