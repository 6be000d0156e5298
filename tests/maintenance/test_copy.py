"""A copy is the same byte for byte, or it is not there."""

from __future__ import annotations

import dataclasses
import os
import uuid

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, StoreError
from ray_dcp.format.manifest import decode_manifest, encode_manifest
from ray_dcp.format.names import MANIFEST, METADATA, POINTER
from ray_dcp.maintenance import checkpoint_copy as copy_module
from ray_dcp.maintenance.checkpoint_copy import CopyReport, copy_checkpoint, plan_copy
from ray_dcp.maintenance.verify import pieces
from ray_dcp.maintenance.verify.verification import plan_verify, verify_checkpoint
from ray_dcp.store.open import open_store
from tests.maintenance.damage import (
    WRITERS,
    changed,
    entries_of,
    flipped,
    records_of,
    regions_of,
    save_ours,
    save_torchs,
    shard_of,
)
from tests.store.failing import Faults

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def content(store):
    return {one.key: store.get(one.key) for one in store.list()}


def copied(source, destination, **wanted) -> CopyReport:
    return copy_checkpoint(plan_copy(source.url, destination.url, **wanted))


@pytest.fixture(scope="module", params=WRITERS)
def source(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param) / "c")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return save_ours(tmp_path_factory.mktemp("only ours") / "c")


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    return open_store(tmp_path / "copy" if request.param == "local" else f"memory://{uuid.uuid4().hex}/copy")


@pytest.fixture
def small_pieces(monkeypatch):
    for module in (pieces, copy_module):
        monkeypatch.setattr(module, "READ_NBYTES", 100)


def test_a_copy_is_the_same_byte_for_byte(source, place):
    done = []
    report = copy_checkpoint(plan_copy(source.url, place.url), on_bytes=done.append)
    expected = content(source)
    assert content(place) == expected
    assert (report.source, report.destination, report.replaced) == (source.url, place.url, False)
    assert report.num_files == len(expected)
    assert report.nbytes == sum(done) == sum(map(len, expected.values()))
    assert report.num_blocks_checked == verify_checkpoint(plan_verify(source.url)).num_blocks


@pytest.mark.usefixtures("small_pieces")
def test_records_larger_than_a_piece_are_copied_piece_by_piece(source, place):
    copied(source, place)
    assert content(place) == content(source)


def test_a_copy_loads(source, place, tmp_path):
    copied(source, place)
    filled = {"step": torch.tensor(0)}
    dcp.load(filled, checkpoint_id=place.url, no_dist=True)
    assert filled["step"] == 7
    if not place.url.startswith("memory"):
        filled = {"step": torch.tensor(0)}
        torch_dcp.load(filled, checkpoint_id=place.url, no_dist=True)
        assert filled["step"] == 7


def test_only_files_that_belong_to_the_checkpoint_are_copied(source, place):
    expected = content(source)
    source.put("__9_0_abc.distcp", b"what a failed save left")
    source.put("notes.txt", b"of the user")
    copied(source, place)
    for key in ("__9_0_abc.distcp", "notes.txt"):
        source.delete(key)
    assert content(place) == expected


def require_nothing_there(store):
    assert content(store) == {}
    if not store.url.startswith("memory"):
        assert not os.path.lexists(store.url)


def test_a_byte_of_any_kind_that_is_damaged_is_named_and_nothing_is_copied(source, tmp_path):
    place = open_store(tmp_path / "copy")
    key = shard_of(source)
    for where in regions_of(source).values():
        record = next(record for record in records_of(source) if where < record.end)
        with flipped(source, key, where), pytest.raises(CorruptCheckpointError, match="nothing was copied") as raised:
            copied(source, place)
        assert (raised.value.file, raised.value.fqn) == (f"{source.url}/{key}", record.fqn)
        require_nothing_there(place)


@pytest.mark.usefixtures("small_pieces")
def test_damage_in_the_middle_of_a_large_record_is_named_and_nothing_is_copied(source, place):
    end = 0
    for record in records_of(source):
        middle, end = (max(record.start, end) + record.end) // 2, record.end  # of what is its own
        with flipped(source, shard_of(source), middle), pytest.raises(CorruptCheckpointError) as raised:
            copied(source, place)
        assert raised.value.fqn == record.fqn
        require_nothing_there(place)


def test_what_damages_the_file_while_it_is_copied_is_found(ours, place, monkeypatch):
    """Bytes around the contents are read once for what they say and once to be copied: they must be the same."""
    monkeypatch.setattr(copy_module, "READ_NBYTES", 100)
    monkeypatch.setattr(pieces, "READ_NBYTES", 100)
    inspect = copy_module.inspect_all
    record = records_of(ours)[-1]
    damage = []

    def inspect_then_damage(*arguments):
        found = list(inspect(*arguments))
        damage.append(flipped(ours, shard_of(ours), record.start))
        damage[0].__enter__()
        return found

    monkeypatch.setattr(copy_module, "inspect_all", inspect_then_damage)
    with pytest.raises(CorruptCheckpointError, match="differ"):
        copied(ours, place)
    damage[0].__exit__(None, None, None)
    require_nothing_there(place)


@pytest.mark.parametrize("key", [MANIFEST, METADATA, "shard"])
def test_a_file_that_is_damaged_or_missing_is_named_before_anything_is_copied(ours, place, key):
    key = shard_of(ours) if key == "shard" else key
    whole = ours.get(key)
    for wrong in (whole[: len(whole) // 2], None):
        if (key, wrong) == (METADATA, None):
            continue
        with changed(ours, key, wrong), pytest.raises(CorruptCheckpointError, match=key.replace(".", r"\.")):
            plan_copy(ours.url, place.url)
    with changed(ours, METADATA, None), pytest.raises(CheckpointNotFoundError):
        plan_copy(ours.url, place.url)


def test_items_in_files_of_other_checkpoints_are_refused_by_name(tmp_path):
    first, second = save_ours(tmp_path / "step-1"), save_ours(tmp_path / "step-2", {"x": torch.arange(5.0)})
    manifest = decode_manifest(second.get(MANIFEST), file=MANIFEST)
    entry = next(entry for entry in entries_of(first) if entry.fqn == "model.b")
    shared = dataclasses.replace(entry, file=f"../step-1/{entry.file}")
    second.put(MANIFEST, encode_manifest(dataclasses.replace(manifest, entries=[*manifest.entries, shared])))
    for there in (entry.file, None):
        with changed(first, entry.file, None if there is None else first.get(entry.file)):
            with pytest.raises(ConfigError, match=r"model\.b \(\.\./step-1/__0_0_") as raised:
                plan_copy(second.url, tmp_path / "copy")
            assert raised.value.exit_code == 2


def test_a_committed_checkpoint_is_replaced_only_where_that_is_asked_for(source, place):
    save_ours(place.url, {"x": torch.arange(5.0)})
    before = content(place)
    with pytest.raises(ConfigError, match="--overwrite replaces it"):
        plan_copy(source.url, place.url)
    assert content(place) == before
    report = copied(source, place, overwrite=True)
    assert report.replaced
    after = content(place)
    assert {key: after[key] for key in content(source)} == content(source)
    assert (MANIFEST in after) == (MANIFEST in content(source))
    assert verify_checkpoint(plan_verify(place.url)).faults == []


def test_a_checkpoint_that_is_replaced_stays_until_the_commit(ours, tmp_path):
    replaced = save_ours(tmp_path / "copy", {"x": torch.arange(5.0)})
    before = content(replaced)
    with flipped(ours, shard_of(ours), records_of(ours)[-1].start), pytest.raises(CorruptCheckpointError):
        copied(ours, replaced, overwrite=True)
    assert content(replaced) == before
    faults = Faults(only=("put",), fail_at=2)  # the manifest is there, .metadata is not
    plan = plan_copy(ours.url, faults.url(replaced.url), overwrite=True)
    with pytest.raises(StoreError):
        copy_checkpoint(plan)
    assert content(replaced) == before


def test_copying_again_replaces_files_of_the_same_names(source, place):
    copied(source, place)
    key = shard_of(source)
    with flipped(place, key, 5):
        with pytest.raises(ConfigError, match="--overwrite"):
            plan_copy(source.url, place.url)
        copied(source, place, overwrite=True)
        assert content(place) == content(source)


def test_files_of_a_killed_copy_are_replaced_only_where_that_is_asked_for(source, place):
    place.put(shard_of(source), b"half")
    with pytest.raises(ConfigError, match="killed copy; --overwrite"):
        plan_copy(source.url, place.url)
    report = copied(source, place, overwrite=True)
    assert not report.replaced
    assert content(place) == content(source)


@pytest.mark.parametrize("other_name", ["same", "link", "file"])
def test_a_checkpoint_is_never_copied_onto_itself(source, tmp_path, other_name):
    os.symlink(source.url, tmp_path / "link")
    names = {"same": source.url + "/", "link": str(tmp_path / "link"), "file": f"file://{tmp_path}/link"}
    before = content(source)
    with pytest.raises(ConfigError, match="is the checkpoint that is to be copied"):
        copy_checkpoint(plan_copy(source.url, names[other_name], overwrite=True))
    assert content(source) == before


def test_a_pointer_is_followed_and_none_is_in_the_way(ours, tmp_path):
    open_store(tmp_path / "ray").put(POINTER, f'{{"checkpoint_id": "{ours.url}"}}'.encode())
    copy = open_store(tmp_path / "copy")
    assert copied(open_store(tmp_path / "ray"), copy).source == ours.url
    assert content(copy) == content(ours)
    with pytest.raises(ConfigError, match="pointer"):
        plan_copy(ours.url, tmp_path / "ray")


@pytest.mark.parametrize("when", ["before", "after", "part"])
@pytest.mark.parametrize("before", ["nothing", "another", "the same"])
def test_a_copy_that_fails_anywhere_is_there_as_a_whole_or_not_at_all(ours, tmp_path, when, before):
    expected = content(ours)
    for number in range(1, 60):
        place = open_store(tmp_path / f"copy{number}")
        if before == "another":
            save_ours(place.url, {"x": torch.arange(5.0)})
        elif before == "the same":
            copied(ours, place)
        there = content(place)
        faults = Faults(when=when)
        plan = plan_copy(ours.url, faults.url(place.url), overwrite=True)
        faults.fail_at = faults.count + number
        try:
            copy_checkpoint(plan)
        except StoreError:
            after = content(place)
            committed = METADATA in after and after[METADATA] == expected[METADATA]
            if committed:
                assert {key: after[key] for key in expected} == expected
            elif before == "another":
                assert after == there
            elif before == "nothing":
                assert METADATA not in after
                # What the failing operation itself was to remove may be left; it is no part of anything.
                assert not after or faults.hit[-1].startswith("delete")
        else:
            if not faults.hit:
                assert {key: content(place)[key] for key in expected} == expected
                return
    pytest.fail("it never got through")


def test_an_interrupt_leaves_nothing(ours, place):
    def interrupt(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint(plan_copy(ours.url, place.url), on_bytes=interrupt)
    require_nothing_there(place)


def test_somebody_who_commits_there_meanwhile_is_not_overwritten(ours, tmp_path):
    plan = plan_copy(ours.url, tmp_path / "copy")
    other = save_ours(tmp_path / "copy", {"x": torch.arange(5.0)})
    before = content(other)
    with pytest.raises(StoreError, match="somebody else"):
        copy_checkpoint(plan)
    assert content(other) == before


def test_bytes_that_belong_to_no_item_of_torchs_are_copied_too(tmp_path):
    source, place = save_torchs(tmp_path / "c"), open_store(tmp_path / "copy")
    key = shard_of(source)
    with changed(source, key, source.get(key) + b"what nothing refers to" * 20):
        copied(source, place)
        assert content(place) == content(source)


def test_items_that_cannot_be_checked_are_copied_and_said_so(tmp_path):
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        source = save_torchs(tmp_path / "c")
    report = copied(source, open_store(tmp_path / "copy"))
    assert len(report.unchecked) == 7
    assert content(open_store(tmp_path / "copy")) == content(source)
