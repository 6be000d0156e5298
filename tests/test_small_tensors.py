"""Many tensors of one number: how much a checkpoint of them takes, and that only equal ones share a record."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.catalog.facts import describe
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.zip_record import SmallFrame
from ray_dcp.maintenance.verify.verification import plan_verify, verify_checkpoint
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUMBER = 5000


def nbytes_of(place: Path) -> int:
    return sum(file.stat().st_size for file in place.iterdir())


def test_five_thousand_steps_take_less_than_a_megabyte_with_all_that_belongs_to_them(tmp_path):
    """As the optimizer of a model of as many parameters has them: equal but for some that were added later."""
    state = {"optim": {"state": {n: {"step": torch.tensor(100.0 if n % 100 else float(n))} for n in range(NUMBER)}}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert nbytes_of(tmp_path / "c") < 1_000_000
    blank = {"optim": {"state": {n: {"step": torch.tensor(float("nan"))} for n in range(NUMBER)}}}
    dcp.load(blank, checkpoint_id=tmp_path / "c", no_dist=True)
    loaded, saved = blank["optim"]["state"], state["optim"]["state"]
    assert all(same_bits(loaded[n]["step"], saved[n]["step"]) for n in range(NUMBER))
    loaded[1]["step"].fill_(7)
    assert loaded[2]["step"] == 100


DIFFERENT = {
    "steps": lambda n: torch.tensor(float(n)),
    "whole numbers": lambda n: torch.tensor(n),
    "tensors and Python numbers": lambda n: float(n) if n % 2 else torch.tensor(float(n)),
    "of no dimension and of one": lambda n: torch.full((1,) * (n % 2), float(n)),
    "of two dtypes": lambda n: torch.tensor(float(n) if n % 2 else n),
}


@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.parametrize("save", ["save", "async_save"])
def test_five_thousand_values_that_all_differ_take_less_than_two_megabytes(tmp_path, kind, save):
    """Whatever the order: those of one dtype and shape are put together, and share what their records begin with."""
    state = {f"optim.state.{n}.step": DIFFERENT[kind](n) for n in range(NUMBER)}
    saved = getattr(dcp, save)(state, checkpoint_id=tmp_path / "c", no_dist=True)
    if save == "async_save":
        saved.upload_completion.result()
    assert nbytes_of(tmp_path / "c") <= 2_000_000
    blank = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in state.items()
    }
    dcp.load(blank, checkpoint_id=tmp_path / "c", no_dist=True)
    assert [name for name, value in state.items() if not _is_same(blank[name], value)] == []


def _is_same(one, other) -> bool:
    return same_bits(one, other) if isinstance(other, torch.Tensor) else one == other


@pytest.mark.parametrize("with_manifest", [True, False])
def test_torch_reads_each_of_many_that_differ_and_so_does_any_zip_tool(tmp_path, with_manifest):
    state = {f"p{n}": torch.tensor(float(n) if n % 3 else n) for n in range(100)} | {"w": torch.arange(100.0)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    if not with_manifest:
        (tmp_path / "c" / "manifest.parquet").unlink()
    for load in (dcp.load, torch_dcp.load):
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        load(blank, checkpoint_id=tmp_path / "c", no_dist=True)
        assert [name for name in state if not same_bits(blank[name], state[name])] == []
    places = torch_dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data
    assert len({place.offset for place in places.values()}) < 12
    for index, place in places.items():
        record = (tmp_path / "c" / place.relative_path).read_bytes()[place.offset :][: place.length]
        assert zipfile.ZipFile(io.BytesIO(record)).testzip() is None
        assert same_bits(torch.load(io.BytesIO(record), weights_only=True), state[index.fqn])


@pytest.mark.parametrize("with_manifest", [True, False])
def test_chunks_of_one_tensor_begin_at_places_of_their_own(tmp_path, with_manifest):
    """A reader may know a record by its file, its name and where it begins."""
    chunks = {(2 * n,): torch.tensor([2.0 * n, 2.0 * n + 1]) for n in range(20)}
    state = {"a": dcp.LocalShards((40,), chunks), "b": dcp.LocalShards((40,), chunks)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    places = torch_dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data
    assert len({(index.fqn, place.offset) for index, place in places.items()}) == 40
    if not with_manifest:
        (tmp_path / "c" / "manifest.parquet").unlink()
    for load in (dcp.load, torch_dcp.load):
        blank = {name: torch.zeros(40) for name in state}
        load(blank, checkpoint_id=tmp_path / "c", no_dist=True)
        assert all(same_bits(value, torch.arange(40.0)) for value in blank.values())


def test_a_checkpoint_from_before_records_shared_their_heads_loads_and_is_whole(tmp_path, monkeypatch):
    state = {f"p{n}": torch.tensor(float(n)) for n in range(20)}
    with monkeypatch.context() as before:
        before.setattr(SmallFrame, "in_row", lambda frame, number: None)
        dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    (shard,) = (tmp_path / "c").glob("*.distcp")
    assert shard.stat().st_size == 448 * len(state) - 1
    assert verify_checkpoint(plan_verify(tmp_path / "c")).faults == []
    blank = {name: torch.zeros(()) for name in state}
    dcp.load(blank, checkpoint_id=tmp_path / "c", no_dist=True)
    assert blank == state


def test_its_size_is_that_of_its_file_where_records_share_their_heads(tmp_path):
    dcp.save({f"p{n}": torch.tensor(float(n)) for n in range(100)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (shard,) = (tmp_path / "c").glob("*.distcp")
    assert shard.stat().st_size - 64 * 7 <= describe(tmp_path / "c").nbytes <= shard.stat().st_size


def test_five_thousand_python_numbers_take_less_than_two_megabytes(tmp_path):
    dcp.save({f"p{n}": n * 1.5 for n in range(NUMBER)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert nbytes_of(tmp_path / "c") < 2_000_000


ALIKE = {
    "one": torch.tensor(1.0),
    "the same": torch.tensor(1.0),
    "of one dimension": torch.tensor([1.0]),
    "of two": torch.tensor([[1.0]]),
    "another dtype": torch.tensor(1.0, dtype=torch.float64),
    "the same bits": torch.tensor(1.0).view(torch.int32),
    "zero": torch.tensor(0.0),
    "minus zero": torch.tensor(-0.0),
    "nan": torch.tensor(float("nan")),
    "nan again": torch.tensor(float("nan")),
    "another nan": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)[0],
    "empty": torch.empty(0),
    "empty too": torch.empty(0),
    "empty otherwise": torch.empty(0, 3),
    "longer": torch.ones(5),
    "longer too": torch.ones(5),
}


def places(place: Path) -> dict[str, int]:
    manifest = decode_manifest((place / "manifest.parquet").read_bytes(), file="m")
    return {entry.fqn: entry.payload_offset for entry in manifest.entries}


def test_only_what_is_equal_to_the_bit_shares_a_record(tmp_path):
    dcp.save(ALIKE, checkpoint_id=tmp_path / "c", no_dist=True)
    at = places(tmp_path / "c")
    assert len(set(at.values())) == len(ALIKE) - 3
    assert at["one"] == at["the same"]
    assert at["nan"] == at["nan again"]
    assert at["empty"] == at["empty too"]


@pytest.mark.parametrize("load", [dcp.load, torch_dcp.load], ids=["ours", "torchs"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_whoever_loads_it_gets_each_by_its_name(tmp_path, load, with_manifest):
    dcp.save(ALIKE, checkpoint_id=tmp_path / "c", no_dist=True)
    if not with_manifest:
        (tmp_path / "c" / "manifest.parquet").unlink()
    filled = {name: torch.full_like(value, 77) for name, value in ALIKE.items()}
    load(filled, checkpoint_id=tmp_path / "c", no_dist=True)
    assert [name for name in ALIKE if not same_bits(filled[name], ALIKE[name])] == []
    assert len({value.data_ptr() for value in filled.values() if value.numel()}) == len(ALIKE) - 3


def test_its_size_counts_a_record_once_and_verify_finds_it_whole(tmp_path):
    dcp.save(ALIKE, checkpoint_id=tmp_path / "c", no_dist=True)
    (shard,) = (tmp_path / "c").glob("*.distcp")
    assert describe(tmp_path / "c").nbytes <= shard.stat().st_size
    report = verify_checkpoint(plan_verify(tmp_path / "c"))
    assert (report.faults, report.unchecked, report.num_items) == ([], [], len(ALIKE))
    content = bytearray(shard.read_bytes())
    manifest = decode_manifest((tmp_path / "c" / "manifest.parquet").read_bytes(), file="m")
    (one,) = [entry for entry in manifest.entries if entry.fqn == "the same"]
    content[one.payload_offset] ^= 1
    shard.write_bytes(content)
    (fault,) = verify_checkpoint(plan_verify(tmp_path / "c")).faults
    assert fault.problem.endswith("its record is that of 1 other item too")
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"the same": torch.zeros(())}, checkpoint_id=tmp_path / "c", no_dist=True)


def test_an_asynchronous_save_keeps_what_was_there_when_it_began(tmp_path):
    state = {f"p{n}": torch.tensor(1.0) for n in range(50)}
    response = dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    response.staging_completion.result()
    for value in state.values():
        value.zero_()
    response.upload_completion.result()
    filled = {name: torch.zeros(()) for name in state}
    dcp.load(filled, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(value == 1 for value in filled.values())
