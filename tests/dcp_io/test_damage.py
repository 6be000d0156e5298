"""Damage anywhere in a checkpoint: an error that names file and value, or the right values; never wrong ones."""

from __future__ import annotations

import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.catalog import latest_checkpoint
from ray_dcp.errors import CorruptCheckpointError, RayDcpError
from ray_dcp.manifest import decode_manifest
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state():
    return {
        "w": torch.arange(40, dtype=torch.bfloat16).reshape(8, 5),
        "parts": LocalShards((6,), {(0,): torch.arange(3.0), (3,): torch.arange(3.0, 6.0)}),
        "names": ["a", ("b", 1)],
        "step": torch.tensor(7),
    }


def template():
    return {
        "w": torch.full((8, 5), float("nan"), dtype=torch.bfloat16),
        "parts": torch.full((6,), float("nan")),
        "names": "old",
        "step": torch.tensor(-1),
    }


def is_right(filled) -> bool:
    expected = state() | {"parts": torch.arange(6.0)}
    return filled["names"] == expected["names"] and all(
        same_bits(filled[name], expected[name]) for name in ("w", "parts", "step")
    )


def load_failure(place) -> CheckpointException | None:
    """How a load fails; where it does not, every value is right."""
    filled = template()
    try:
        dcp.load(filled, checkpoint_id=place, no_dist=True)
    except CheckpointException as error:
        return error
    assert is_right(filled)
    return None


def names_file(error: CheckpointException, name: str) -> bool:
    return isinstance(error.__cause__, RayDcpError) and name in str(error)


class Checkpoint:
    """One on disk whose bytes can be changed and changed back."""

    def __init__(self, place) -> None:
        self.place = place
        self.files = {path.name: path.read_bytes() for path in place.iterdir()}
        self.shard = next((name for name in self.files if name.endswith(".distcp")), "")

    def failure_with(self, name: str, place: int, flip: int) -> CheckpointException | None:
        content = bytearray(self.files[name])
        content[place] ^= flip
        (self.place / name).write_bytes(content)
        try:
            return load_failure(self.place)
        finally:
            (self.place / name).write_bytes(self.files[name])


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    place = tmp_path_factory.mktemp("ours")
    dcp.save(state(), checkpoint_id=place, no_dist=True)
    assert load_failure(place) is None
    return Checkpoint(place)


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    place = tmp_path_factory.mktemp("torchs")
    torch_dcp.save(state(), checkpoint_id=place, no_dist=True)
    assert load_failure(place) is None
    return Checkpoint(place)


def entries(checkpoint):
    return decode_manifest(checkpoint.files["manifest.parquet"], file="m").entries


@pytest.mark.parametrize("number", range(5))
def test_a_flipped_bit_in_any_payload_names_file_and_value(ours, number):
    entry = sorted(entries(ours), key=lambda e: e.record_offset)[number]
    for place in range(0, entry.payload_nbytes, max(1, entry.payload_nbytes // 40)):
        error = ours.failure_with(ours.shard, entry.payload_offset + place, 1 << place % 8)
        assert isinstance(error.__cause__, CorruptCheckpointError)
        assert (error.__cause__.fqn, error.__cause__.file) == (entry.fqn, f"{ours.place}/{ours.shard}")
        assert error.__cause__.offset <= entry.payload_offset + place < error.__cause__.offset + error.__cause__.nbytes


def test_a_flipped_bit_anywhere_in_a_shard_file_is_found_or_harmless(ours):
    bits = random.Random(0)
    for place in range(0, len(ours.files[ours.shard]), 29):
        error = ours.failure_with(ours.shard, place, 1 << bits.randrange(8))
        assert error is None or names_file(error, ours.shard)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found_or_harmless(ours):
    size = len(ours.files["manifest.parquet"])
    bits = random.Random(0)
    errors = [ours.failure_with("manifest.parquet", place, 1 << bits.randrange(8)) for place in range(0, size, 11)]
    assert all(names_file(error, "manifest.parquet") for error in errors if error is not None)
    assert sum(error is not None for error in errors) > len(errors) / 2


def test_a_flipped_bit_anywhere_in_the_metadata_is_found(ours):
    """Without exception where the manifest has its digest: that is, unless the attempt's own name is hit."""
    size = len(ours.files[".metadata"])
    bits = random.Random(0)
    errors = [ours.failure_with(".metadata", place, 1 << bits.randrange(8)) for place in range(0, size, 5)]
    assert all(error is not None and names_file(error, ".metadata") for error in errors)


def test_a_flipped_bit_anywhere_in_a_file_of_torchs_is_found_or_harmless(torchs):
    """By the records' own checksums, which torch itself does not look at."""
    bits = random.Random(0)
    errors = [
        torchs.failure_with(torchs.shard, place, 1 << bits.randrange(8))
        for place in range(0, len(torchs.files[torchs.shard]), 13)
    ]
    found = [error for error in errors if error is not None]
    assert all(names_file(error, torchs.shard) for error in found)
    assert len(found) > len(errors) / 3


def test_a_flipped_bit_in_torchs_metadata_never_gives_wrong_values(torchs):
    bits = random.Random(1)
    for place in range(0, len(torchs.files[".metadata"]), 7):
        torchs.failure_with(".metadata", place, 1 << bits.randrange(8))


def test_a_payload_of_torchs_that_is_damaged_names_file_and_value(torchs):
    content = torchs.files[torchs.shard]
    place = content.index(torch.arange(3.0, 6.0).numpy().tobytes())
    error = torchs.failure_with(torchs.shard, place, 1)
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert (error.__cause__.fqn, error.__cause__.file) == ("parts", f"{torchs.place}/{torchs.shard}")


def test_what_torch_wrote_without_checksums_is_read_without(tmp_path):
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        torch_dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    assert load_failure(tmp_path) is None


@pytest.mark.parametrize("left", [0, 1, 100, -1000])
@pytest.mark.parametrize("writer", ["ours", "torchs"])
def test_a_shard_file_cut_short_is_found(request, tmp_path, writer, left):
    checkpoint = request.getfixturevalue(writer)
    place = shutil.copytree(checkpoint.place, tmp_path / "c")
    (place / checkpoint.shard).write_bytes(checkpoint.files[checkpoint.shard][:left])
    error = load_failure(place)
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert names_file(error, checkpoint.shard)
    assert error.__cause__.fqn in state()
    assert error.__cause__.offset + error.__cause__.nbytes > max(0, left)


@pytest.mark.parametrize("writer", ["ours", "torchs"])
def test_a_missing_shard_file_is_named_with_a_value(request, tmp_path, writer):
    checkpoint = request.getfixturevalue(writer)
    place = shutil.copytree(checkpoint.place, tmp_path / "c")
    (place / checkpoint.shard).unlink()
    error = load_failure(place)
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert error.__cause__.file.endswith(checkpoint.shard)
    assert error.__cause__.fqn in state()


def test_a_manifest_of_another_save_is_not_believed_and_the_load_is_verified_without_it(ours, tmp_path):
    place = shutil.copytree(ours.place, tmp_path / "c")
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "other", no_dist=True)
    shutil.copy(tmp_path / "other" / "manifest.parquet", place)
    assert load_failure(place) is None
    (entry,) = [e for e in entries(ours) if e.fqn == "w"]
    content = bytearray(ours.files[ours.shard])
    content[entry.payload_offset] ^= 1
    (place / ours.shard).write_bytes(content)
    error = load_failure(place)
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert (error.__cause__.fqn, error.__cause__.file) == ("w", f"{place}/{ours.shard}")


def test_a_checkpoint_without_its_manifest_loads_and_is_verified(ours, tmp_path):
    place = shutil.copytree(ours.place, tmp_path / "c")
    (place / "manifest.parquet").unlink()
    assert load_failure(place) is None
    for entry in entries(ours):
        content = bytearray(ours.files[ours.shard])
        content[entry.payload_offset + entry.payload_nbytes // 2] ^= 1
        (place / ours.shard).write_bytes(content)
        error = load_failure(place)
        assert isinstance(error.__cause__, CorruptCheckpointError)
        assert error.__cause__.fqn == entry.fqn


def test_a_newer_step_whose_metadata_is_damaged_is_passed_over(ours, tmp_path):
    for step in (1, 2):
        shutil.copytree(ours.place, tmp_path / f"step-0000000{step}")
    path = tmp_path / "step-00000002" / ".metadata"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert latest_checkpoint(tmp_path).step == 1
