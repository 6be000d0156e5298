"""A flipped bit anywhere in a checkpoint: an error that names file and value, or the right values; never wrong ones.

Of each file some bytes in `make test`, every byte in `make nightly`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch.utils.serialization

import ray_dcp as dcp
from ray_dcp.errors import CorruptCheckpointError
from tests.reads.damaged import Checkpoint, every, load_failure, names_file, state

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


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


def bit(at: int) -> int:
    """Another one for each of eight neighbours, and in no step with the stride."""
    return 1 << (at * 5 + at // 8) % 8


@pytest.mark.parametrize("number", range(5))
def test_a_flipped_bit_in_any_payload_names_file_value_and_place(ours, number):
    entry = ours.entries()[number]
    for at in every(entry.payload_nbytes, 3):
        error = ours.failure_with(ours.shard, entry.payload_offset + at, bit(at))
        assert isinstance(error.__cause__, CorruptCheckpointError)
        assert (error.__cause__.fqn, error.__cause__.file) == (entry.fqn, f"{ours.place}/{ours.shard}")
        assert error.__cause__.offset <= entry.payload_offset + at < error.__cause__.offset + error.__cause__.nbytes


def test_a_flipped_bit_anywhere_else_in_a_shard_file_is_harmless(ours):
    """Record headers, paddings, descriptors and directories: the manifest says where the payloads lie."""
    payloads = [range(e.payload_offset, e.payload_offset + e.payload_nbytes) for e in ours.entries()]
    for at in every(len(ours.files[ours.shard]), 17):
        if not any(at in payload for payload in payloads):
            assert ours.failure_with(ours.shard, at, bit(at)) is None


def test_a_flipped_bit_anywhere_in_the_manifest_is_found_or_harmless(ours):
    errors = [
        ours.failure_with("manifest.parquet", at, bit(at)) for at in every(len(ours.files["manifest.parquet"]), 11)
    ]
    assert all(names_file(error, "manifest.parquet") for error in errors if error is not None)
    assert sum(error is not None for error in errors) > len(errors) / 2


def test_a_flipped_bit_anywhere_in_the_metadata_is_found(ours):
    """The manifest has its digest."""
    for at in every(len(ours.files[".metadata"]), 5):
        error = ours.failure_with(".metadata", at, bit(at))
        assert isinstance(error.__cause__, CorruptCheckpointError)
        assert error.__cause__.file == f"{ours.place}/.metadata"


def test_a_flipped_bit_anywhere_in_a_file_without_its_manifest_is_found_or_harmless(ours, tmp_path):
    (ours.place / "manifest.parquet").rename(tmp_path / "manifest.parquet")
    try:
        require_found_or_harmless(ours)
    finally:
        (tmp_path / "manifest.parquet").rename(ours.place / "manifest.parquet")


def test_a_flipped_bit_anywhere_in_a_file_of_torchs_is_found_or_harmless(torchs):
    """By the records' own checksums, which torch itself does not look at."""
    require_found_or_harmless(torchs)


def require_found_or_harmless(checkpoint):
    places = every(len(checkpoint.files[checkpoint.shard]), 13)
    errors = [checkpoint.failure_with(checkpoint.shard, at, bit(at)) for at in places]
    found = [error.__cause__ for error in errors if error is not None]
    assert all(isinstance(error, CorruptCheckpointError) for error in found)
    assert {error.file for error in found} == {f"{checkpoint.place}/{checkpoint.shard}"}
    assert {error.fqn for error in found} == state().keys()
    assert len(found) > len(errors) / 3


def test_a_flipped_bit_in_torchs_metadata_never_gives_wrong_values(torchs):
    for at in every(len(torchs.files[".metadata"]), 7):
        torchs.failure_with(".metadata", at, bit(at))


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
