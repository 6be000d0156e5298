"""Verify and copy on a real S3 server."""

import pytest
import torch

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.names import METADATA
from ray_dcp.maintenance.checkpoint_copy import copy_checkpoint, plan_copy
from ray_dcp.maintenance.verify.verification import plan_verify, verify_checkpoint
from ray_dcp.store.open import open_store
from tests.maintenance.damage import changed, entries_of, flipped, save_ours, save_torchs, shard_of, state
from tests.store.conftest import s3_url, seaweed  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def content(store):
    return {one.key: store.get(one.key) for one in store.list()}


@pytest.mark.parametrize("save", [save_ours, save_torchs])
def test_a_checkpoint_goes_to_a_bucket_and_back_and_is_verified_there(s3_url, tmp_path, save):  # noqa: F811
    source = save(tmp_path / "c", state() | {"large": torch.arange(5 << 20)})
    there, back = open_store(f"{s3_url}/step-1"), open_store(tmp_path / "back")
    copy_checkpoint(plan_copy(source.url, there.url))
    report = verify_checkpoint(plan_verify(there.url))
    assert (report.faults, report.num_blocks_checked) == ([], report.num_blocks)
    assert report.num_blocks == verify_checkpoint(plan_verify(source.url)).num_blocks
    copy_checkpoint(plan_copy(there.url, back.url))
    assert content(back) == content(source)


def test_damage_in_a_bucket_is_found_and_not_copied(s3_url, tmp_path):  # noqa: F811
    store = save_ours(f"{s3_url}/step-1", {"w": torch.arange(3 << 20), "b": torch.ones(3)})
    entry = next(entry for entry in entries_of(store) if entry.fqn == "w")
    with flipped(store, entry.file, entry.payload_offset + (5 << 20)):
        (fault,) = verify_checkpoint(plan_verify(store.url)).faults
        assert (fault.fqn, fault.file, fault.problem) == ("w", entry.file, "block 5 of its payload fails its checksum")
        with pytest.raises(CorruptCheckpointError, match="block 5"):
            copy_checkpoint(plan_copy(store.url, f"{s3_url}/copy"))
    assert METADATA not in content(open_store(f"{s3_url}/copy"))
    whole = store.get(entry.file)
    with changed(store, entry.file, whole[:-1]):
        assert any("ends too early" in fault.problem for fault in verify_checkpoint(plan_verify(store.url)).faults)
    with changed(store, shard_of(store), None):
        assert {fault.fqn for fault in verify_checkpoint(plan_verify(store.url)).faults} == {"w", "b"}
