"""Files that are cut short, gone or exchanged: never wrong values, and an error that names file and value."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemWriter

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.catalog.newest import latest_checkpoint
from ray_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, RayDcpError
from tests.ranks import ThreadRanks, require_no_errors
from tests.reads.damaged import Checkpoint
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def values(step: int) -> dict[str, object]:
    return {
        "w": torch.arange(48.0).reshape(8, 6) + 100 * step,
        "small": torch.arange(5, dtype=torch.bfloat16) * step,
        "transposed": (torch.arange(12.0).reshape(3, 4) * step).t(),
        "names": ["a", ("b", step)],
    }


def of_rank(rank: int, step: int) -> dict[str, object]:
    """The rows of ``w`` are cut; rank 1 has the rest."""
    whole = values(step)
    rows = LocalShards((8, 6), {(rank * 4, 0): whole["w"][rank * 4 :][:4].clone()})
    return whole | {"w": rows}


def load_failure(place, step: int) -> CheckpointException | None:
    """How a load fails; where it does not, every value is that step's."""
    expected = values(step)
    filled: dict[str, object] = {
        name: torch.full_like(value, 77) if isinstance(value, torch.Tensor) else None
        for name, value in expected.items()
    }
    try:
        dcp.load(filled, checkpoint_id=place, no_dist=True)
    except CheckpointException as error:
        return error
    assert filled["names"] == expected["names"]
    assert all(same_bits(filled[name], expected[name]) for name in ("w", "small", "transposed"))
    return None


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Two steps of two ranks."""
    root = tmp_path_factory.mktemp("ours")
    for step in (1, 2):
        require_no_errors(ThreadRanks(2).save(lambda rank, step=step: of_rank(rank, step), root / f"step-{step:08d}"))
    return {step: Checkpoint(root / f"step-{step:08d}") for step in (1, 2)}


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """Two steps of two files."""
    root = tmp_path_factory.mktemp("torchs")
    for step in (1, 2):
        writer = FileSystemWriter(root / f"step-{step:08d}", thread_count=2)
        torch_dcp.save(values(step), storage_writer=writer, no_dist=True)
    return {step: Checkpoint(root / f"step-{step:08d}") for step in (1, 2)}


either = pytest.mark.parametrize("writer", ["ours", "torchs"])


def shards(checkpoint: Checkpoint) -> list[str]:
    return sorted(name for name in checkpoint.files if name.endswith(".distcp"))


def num_needed(checkpoint: Checkpoint, name: str) -> int:
    """Bytes of a shard file; what follows the last payload is not read where the manifest says where that is."""
    if "manifest.parquet" not in checkpoint.files:
        return len(checkpoint.files[name])
    return max(e.payload_offset + e.payload_nbytes for e in checkpoint.entries() if e.file == name)


def require_named(error: CheckpointException | None, file: str) -> None:
    assert error is not None
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert error.__cause__.file.endswith(file)
    assert error.__cause__.fqn in values(1)


def test_both_steps_load(ours, torchs):
    for checkpoints in (ours, torchs):
        assert [load_failure(checkpoints[step].place, step) for step in (1, 2)] == [None, None]
        assert all(len(shards(checkpoints[step])) == 2 for step in (1, 2))


@either
def test_a_shard_file_that_ends_at_any_record_or_a_byte_beside_it_is_named_with_a_value(request, writer):
    checkpoint = request.getfixturevalue(writer)[1]
    for name in shards(checkpoint):
        content = checkpoint.files[name]
        starts = [at for at in range(len(content)) if content.startswith(b"PK\x03\x04", at)]
        ends = [at + 22 for at in range(len(content)) if content.startswith(b"PK\x05\x06", at)]
        for boundary in sorted({0, *starts, *ends}):
            for left in {max(0, boundary - 1), boundary, boundary + 1} & set(range(len(content))):
                with checkpoint.holding(name, content[:left]):
                    error = load_failure(checkpoint.place, 1)
                needed = num_needed(checkpoint, name)
                if left < needed:
                    require_named(error, name)
                    assert error.__cause__.offset + error.__cause__.nbytes > left
                else:
                    assert error is None


@either
@pytest.mark.parametrize("more", [b"\0", b"PK\x05\x06" + bytes(18), b"\x80\x04N."], ids=["zero", "zip end", "pickle"])
def test_what_stands_behind_the_last_record_does_not_matter(request, writer, more):
    checkpoint = request.getfixturevalue(writer)[1]
    for name in shards(checkpoint):
        with checkpoint.holding(name, checkpoint.files[name] + more):
            assert load_failure(checkpoint.place, 1) is None


@either
@pytest.mark.parametrize("name", [".metadata", "manifest.parquet"])
def test_a_metadata_or_manifest_that_ends_anywhere_too_early_is_named(request, writer, name):
    checkpoint = request.getfixturevalue(writer)[1]
    if name not in checkpoint.files:
        return
    content = checkpoint.files[name]
    for left in {0, 1, 4, len(content) // 2, *range(len(content) - 9, len(content)), *range(0, len(content), 97)}:
        with checkpoint.holding(name, content[:left]):
            error = load_failure(checkpoint.place, 1)
        assert error is not None
        assert isinstance(error.__cause__, RayDcpError)
        assert name in str(error)


@either
def test_a_shard_file_that_is_gone_is_named_with_a_value(request, tmp_path, writer):
    checkpoint = request.getfixturevalue(writer)[1]
    for name in shards(checkpoint):
        place = shutil.copytree(checkpoint.place, tmp_path / name)
        (place / name).unlink()
        require_named(load_failure(place, 1), name)


@either
def test_without_metadata_there_is_no_checkpoint(request, tmp_path, writer):
    place = shutil.copytree(request.getfixturevalue(writer)[1].place, tmp_path / "c")
    (place / ".metadata").unlink()
    error = load_failure(place, 1)
    assert isinstance(error.__cause__, CheckpointNotFoundError)


def test_without_its_manifest_a_checkpoint_loads_and_is_verified(ours, tmp_path):
    place = shutil.copytree(ours[1].place, tmp_path / "c")
    (place / "manifest.parquet").unlink()
    assert load_failure(place, 1) is None
    for entry in ours[1].entries():
        content = bytearray(ours[1].files[entry.file])
        content[entry.payload_offset + entry.payload_nbytes // 2] ^= 1
        (place / entry.file).write_bytes(content)
        error = load_failure(place, 1)
        (place / entry.file).write_bytes(ours[1].files[entry.file])
        require_named(error, entry.file)
        assert error.__cause__.fqn == entry.fqn


@either
def test_two_shard_files_of_a_checkpoint_that_are_exchanged_are_found(request, tmp_path, writer):
    checkpoint = request.getfixturevalue(writer)[1]
    place = shutil.copytree(checkpoint.place, tmp_path / "c")
    first, second = shards(checkpoint)
    (place / first).write_bytes(checkpoint.files[second])
    (place / second).write_bytes(checkpoint.files[first])
    error = load_failure(place, 1)
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert error.__cause__.file.endswith((first, second))
    assert error.__cause__.fqn in values(1)


def test_a_shard_file_with_the_bytes_of_another_step_is_found(ours, tmp_path):
    """Of torch's nothing tells: its files have the same names and layout at each step."""
    for number in range(2):
        place = shutil.copytree(ours[1].place, tmp_path / f"c{number}")
        name, other = shards(ours[1])[number], shards(ours[2])[number]
        (place / name).write_bytes(ours[2].files[other])
        require_named(load_failure(place, 1), name)


def test_the_manifest_of_another_step_is_not_believed_and_the_load_is_verified_without_it(ours, tmp_path):
    place = shutil.copytree(ours[1].place, tmp_path / "c")
    (place / "manifest.parquet").write_bytes(ours[2].files["manifest.parquet"])
    assert load_failure(place, 1) is None
    entry = next(entry for entry in ours[1].entries() if entry.fqn == "w")
    content = bytearray(ours[1].files[entry.file])
    content[entry.payload_offset] ^= 1
    (place / entry.file).write_bytes(content)
    require_named(load_failure(place, 1), entry.file)


@pytest.mark.parametrize("names", [(".metadata",), (".metadata", "manifest.parquet")], ids=str)
def test_the_metadata_of_another_step_leads_to_files_that_are_not_there(ours, tmp_path, names):
    place = shutil.copytree(ours[1].place, tmp_path / "c")
    for name in names:
        (place / name).write_bytes(ours[2].files[name])
    error = load_failure(place, 1)
    assert isinstance(error.__cause__, CorruptCheckpointError)
    assert error.__cause__.file.endswith(tuple(shards(ours[2])))


def test_all_files_of_another_step_are_that_step(ours, tmp_path):
    place = shutil.copytree(ours[1].place, tmp_path / "c")
    for name, content in ours[2].files.items():
        (place / name).write_bytes(content)
    assert load_failure(place, 2) is None


def test_a_newer_step_whose_metadata_is_damaged_is_passed_over(ours, tmp_path):
    for step in (1, 2):
        shutil.copytree(ours[step].place, tmp_path / f"step-0000000{step}")
    path = tmp_path / "step-00000002" / ".metadata"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert latest_checkpoint(tmp_path).step == 1
