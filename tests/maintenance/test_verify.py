"""Whatever happens to a checkpoint's bytes, verify says what and where; a whole one is whole."""

from __future__ import annotations

import dataclasses
import functools
import random
import uuid

import pytest
import torch
import torch.utils.serialization

from ray_dcp import LocalShards, PerRank
from ray_dcp.errors import CheckpointNotFoundError, ConfigError, FormatVersionError, StoreError
from ray_dcp.format.manifest import FORMAT_VERSION, decode_manifest, encode_manifest
from ray_dcp.format.metadata_file import decode_metadata, encode_metadata
from ray_dcp.format.names import BLOCK_NBYTES, MANIFEST, METADATA, POINTER
from ray_dcp.maintenance.verify import pieces
from ray_dcp.maintenance.verify import verification as verify_module
from ray_dcp.maintenance.verify.verification import VerifyReport, plan_verify, verify_checkpoint
from ray_dcp.store.local import LocalStore
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store
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
from tests.ranks import ThreadRanks, require_no_errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def verified(store: Store, **wanted) -> VerifyReport:
    return verify_checkpoint(plan_verify(store.url, **wanted))


@pytest.fixture(scope="module", params=WRITERS)
def store(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param) / "c")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return save_ours(tmp_path_factory.mktemp("only ours") / "c")


@pytest.fixture
def pieces_of(monkeypatch):
    """Has records be read in pieces of so many bytes."""

    def cut(nbytes):
        monkeypatch.setattr(pieces, "READ_NBYTES", nbytes)
        monkeypatch.setattr(verify_module, "READ_NBYTES", nbytes)

    return cut


@pytest.mark.parametrize("piece_nbytes", [100, 4096, 16 << 20])
def test_what_is_whole_has_no_fault_and_all_of_it_is_checked(store, pieces_of, piece_nbytes):
    pieces_of(piece_nbytes)
    report = verified(store)
    assert (report.faults, report.unchecked, report.notes) == ([], [], [])
    assert report.num_blocks_checked == report.num_blocks >= report.num_items - 1
    assert (report.num_files, report.num_items) == (1, 7)
    assert report.nbytes == len(store.get(shard_of(store)))
    assert 0 < report.nbytes_checked <= report.nbytes


def test_what_is_in_memory_is_read_as_well():
    store = save_ours(f"memory://{uuid.uuid4().hex}/c")
    assert verified(store).faults == []
    with flipped(store, shard_of(store), entries_of(store)[-1].payload_offset):
        assert [fault.fqn for fault in verified(store).faults] == [entries_of(store)[-1].fqn]


def owner(store, place):
    """The record in which a byte lies, or behind the padding that it is part of."""
    return next(record for record in records_of(store) if place < record.end)


def require_found(report: VerifyReport, store: Store, place: int) -> None:
    record = owner(store, place)
    assert report.faults
    assert {(f.file, f.fqn, f.offsets, f.rank) for f in report.faults} == {
        (shard_of(store), record.fqn, record.offsets, 0)
    }
    assert any(fault.start <= place < fault.end for fault in report.faults)


@pytest.mark.parametrize("piece_nbytes", [100, 16 << 20])
def test_a_byte_of_any_kind_that_is_damaged_is_found_with_its_item(store, pieces_of, piece_nbytes):
    pieces_of(piece_nbytes)
    regions = regions_of(store)
    assert len(regions) > 50
    for place in regions.values():
        with flipped(store, shard_of(store), place):
            require_found(verified(store), store, place)


def test_any_bit_of_a_shard_file_that_is_damaged_is_found_with_its_item(store):
    bits = random.Random(0)
    plan = plan_verify(store.url)
    for place in range(0, len(store.get(shard_of(store))), 31):
        with flipped(store, shard_of(store), place, bit=bits.randrange(8)):
            require_found(verify_checkpoint(plan), store, place)


def test_all_faults_are_reported_and_not_only_the_first(store):
    records = records_of(store)
    with flipped(store, shard_of(store), *(record.end - 1 for record in records)):
        assert [(f.fqn, f.offsets) for f in verified(store).faults if f.start <= f.end] == [
            (record.fqn, record.offsets) for record in records
        ]


@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_a_file_that_ends_too_early_lacks_exactly_the_items_behind_its_end(store, off_by):
    whole = store.get(shard_of(store))
    records = records_of(store)
    ends = {place + off_by for record in records for place in (record.start, record.end)}
    for end in sorted(end for end in ends if 0 <= end < len(whole)):
        with changed(store, shard_of(store), whole[:end]):
            faults = verified(store).faults
        assert [(f.fqn, f.offsets) for f in faults] == [(r.fqn, r.offsets) for r in records if r.end > end]
        assert all("ends too early" in f.problem and f.file == shard_of(store) and f.start < f.end for f in faults)
        assert all(f.start >= min(end, f.end - 1) for f in faults)


def test_a_file_that_is_missing_is_a_fault_of_every_item_in_it(store):
    key = shard_of(store)
    with changed(store, key, None):
        report = verified(store)
    assert sorted((f.fqn, f.offsets) for f in report.faults) == sorted((r.fqn, r.offsets) for r in records_of(store))
    assert {(f.file, f.problem, f.rank) for f in report.faults} == {(key, "its file is missing", 0)}


def test_a_file_that_goes_or_shrinks_between_plan_and_reading_is_a_fault(store, pieces_of):
    for piece_nbytes in (100, 16 << 20):
        pieces_of(piece_nbytes)
        plan = plan_verify(store.url)
        for content, said in ((None, "missing"), (b"", "ends too early")):
            with changed(store, shard_of(store), content):
                faults = verify_checkpoint(plan).faults
            assert {f.fqn for f in faults} == {r.fqn for r in records_of(store)}
            assert all(said in fault.problem for fault in faults)


def test_bytes_behind_the_last_record_are_a_fault_of_ours_and_a_note_of_torchs(store):
    whole = store.get(shard_of(store))
    with changed(store, shard_of(store), whole + b"\0"):
        report = verified(store)
    if report.has_manifest:
        assert [(f.file, f.start, f.end) for f in report.faults] == [(shard_of(store), len(whole), len(whole) + 1)]
    else:
        assert (report.faults, len(report.notes)) == ([], 1)


def test_a_damaged_manifest_is_found_and_the_records_are_checked_without_it(ours):
    key, bits = shard_of(ours), random.Random(0)
    places = random.Random(0).sample(range(len(ours.get(MANIFEST))), 60)
    found = 0
    for place in places:
        with flipped(ours, MANIFEST, place, bit=bits.randrange(8)):
            faults = verified(ours).faults
        # What Parquet itself does not read may differ: all that is read has a checksum.
        found += bool(faults)
        assert {fault.file for fault in faults} <= {MANIFEST}
    assert found > len(places) / 2
    payload = entries_of(ours)[-1].payload_offset
    with flipped(ours, key, payload), changed(ours, MANIFEST, b"nothing"):
        assert {fault.file for fault in verified(ours).faults} == {MANIFEST, key}


def test_a_manifest_that_is_missing_is_a_fault_and_the_records_are_checked_without_it(ours):
    with changed(ours, MANIFEST, None):
        report = verified(ours)
    assert [fault.file for fault in report.faults] == [MANIFEST]
    assert report.num_blocks_checked == report.num_blocks > 7
    assert not report.has_manifest


def test_a_manifest_of_another_save_is_no_fault(ours):
    manifest = decode_manifest(ours.get(MANIFEST), file=MANIFEST)
    other = dataclasses.replace(manifest, attempt="f" * 24, metadata_digest="0" * 64)
    with changed(ours, MANIFEST, encode_manifest(other)):
        report = verified(ours)
    assert (report.faults, report.has_manifest, len(report.notes)) == ([], False, 1)


def test_a_manifest_of_a_newer_format_is_refused(ours):
    manifest = decode_manifest(ours.get(MANIFEST), file=MANIFEST)
    newer = dataclasses.replace(manifest, format_version=FORMAT_VERSION + 1)
    with changed(ours, MANIFEST, encode_manifest(newer)), pytest.raises(FormatVersionError):
        plan_verify(ours.url)


def test_any_damaged_bit_of_the_metadata_is_found_by_its_digest(ours):
    bits = random.Random(0)
    for place in range(0, len(ours.get(METADATA)), 23):
        with flipped(ours, METADATA, place, bit=bits.randrange(8)):
            report = verified(ours)
        assert [fault.file for fault in report.faults] == [METADATA]
        assert report.num_blocks_checked == report.num_blocks > 0


def test_metadata_of_torchs_that_is_damaged_never_breaks_verify(tmp_path):
    store = save_torchs(tmp_path / "c")
    bits = random.Random(1)
    reports = []
    for place in range(0, len(store.get(METADATA)), 11):
        with flipped(store, METADATA, place, bit=bits.randrange(8)):
            reports.append(verified(store))
    assert sum(bool(report.faults) for report in reports) > len(reports) / 2
    with changed(store, METADATA, b"garbage"):
        (fault,) = verified(store).faults
    assert (fault.file, fault.start, fault.end) == (METADATA, 0, 7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "/etc/passwd"}, "cannot be one of its files"),
        ({"record_offset": -64}, "no place"),
        ({"payload_nbytes": 1 << 40}, "outside of its record"),
        ({"block_crcs": (1, 2)}, "2 block checksums"),
        ({"block_crcs": (1,)}, "fails its checksum"),
        ({"payload_offset": 1}, "where the manifest says"),
    ],
)
def test_a_manifest_that_does_not_fit_the_files_is_a_fault_of_the_item(ours, change, said):
    manifest = decode_manifest(ours.get(MANIFEST), file=MANIFEST)
    entries = list(manifest.entries)
    number = next(n for n, entry in enumerate(entries) if entry.fqn == "model.w")
    if "payload_offset" in change:
        change = {"payload_offset": entries[number].payload_offset + 1, "payload_nbytes": 8}
    entries[number] = dataclasses.replace(entries[number], **change)
    with changed(ours, MANIFEST, encode_manifest(dataclasses.replace(manifest, entries=entries))):
        faults = verified(ours).faults
    assert any(said in fault.problem and fault.fqn == "model.w" for fault in faults)


def test_records_that_lie_across_each_other_are_a_fault_and_a_shared_one_is_none(ours):
    manifest = decode_manifest(ours.get(MANIFEST), file=MANIFEST)
    entry = next(entry for entry in manifest.entries if entry.fqn == "model.w")
    later = dataclasses.replace(entry, record_offset=entry.record_offset + 1, record_nbytes=entry.record_nbytes - 1)
    shorter = dataclasses.replace(entry, record_nbytes=entry.record_nbytes - 1)
    for twin, said in ((entry, []), (later, ["lies across"]), (shorter, ["damaged", "damaged"])):
        entries = [*manifest.entries, dataclasses.replace(twin, fqn="twin")]
        with changed(ours, MANIFEST, encode_manifest(dataclasses.replace(manifest, entries=entries))):
            faults = verified(ours).faults
        assert all(some in fault.problem for some, fault in zip(said, faults, strict=True))


ROW = {f"s{n}": torch.tensor(float(n)) for n in range(18)} | {"other": torch.tensor(1), "w": torch.arange(5.0)}


@pytest.mark.parametrize("piece_nbytes", [100, 16 << 20])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_of_records_that_share_their_head_damage_is_told_of_the_one_whose_bytes_it_hit(
    pieces_of, piece_nbytes, with_manifest
):
    pieces_of(piece_nbytes)
    store = save_ours(f"memory://{uuid.uuid4().hex}/c", ROW)
    if not with_manifest:
        store.delete(MANIFEST)
    assert len({record.start for record in records_of(store)}) == 4
    bits, plan = random.Random(0), plan_verify(store.url)
    before = verify_checkpoint(plan).faults
    for place in range(0, len(store.get(shard_of(store))), 17):
        with flipped(store, shard_of(store), place, bit=bits.randrange(8)):
            faults = [fault for fault in verify_checkpoint(plan).faults if fault not in before]
        assert {fault.fqn for fault in faults} == {owner(store, place).fqn}
        assert any(fault.start <= place < fault.end for fault in faults)
        assert place > 200 or any("with 14 other records behind it" in fault.problem for fault in faults)


def test_a_record_in_a_row_whose_neighbour_the_manifest_does_not_know_is_a_fault():
    store = save_ours(f"memory://{uuid.uuid4().hex}/c", ROW)
    manifest = decode_manifest(store.get(MANIFEST), file=MANIFEST)
    for lost, told in (("s0", "s1"), ("s7", "s8")):
        entries = [entry for entry in manifest.entries if entry.fqn != lost]
        with changed(store, MANIFEST, encode_manifest(dataclasses.replace(manifest, entries=entries))):
            assert {fault.fqn for fault in verified(store).faults} == {told}


def test_a_shard_file_that_belongs_to_nothing_is_a_note(store):
    store.put("__9_0_abc.distcp", b"what a failed save left")
    report = verified(store)
    store.delete("__9_0_abc.distcp")
    assert report.faults == []
    assert ["__9_0_abc.distcp" in note for note in report.notes] == [True]


def test_files_of_a_sibling_checkpoint_are_checked_for_the_items_that_need_them(tmp_path):
    first, second = save_ours(tmp_path / "step-1"), save_ours(tmp_path / "step-2", {"x": torch.arange(5.0)})
    manifest = decode_manifest(second.get(MANIFEST), file=MANIFEST)
    entry = next(entry for entry in entries_of(first) if entry.fqn == "model.b")
    shared = dataclasses.replace(entry, file=f"../step-1/{entry.file}")
    second.put(MANIFEST, encode_manifest(dataclasses.replace(manifest, entries=[*manifest.entries, shared])))
    assert verified(second).faults == []
    with flipped(first, entry.file, entry.payload_offset):
        (fault,) = verified(second).faults
    assert (fault.file, fault.fqn) == (shared.file, "model.b")
    with changed(first, entry.file, None):
        assert [fault.problem for fault in verified(second).faults] == ["its file is missing"]


def test_what_torch_wrote_without_checksums_is_not_checkable_and_no_fault(tmp_path):
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        store = save_torchs(tmp_path)
    report = verified(store)
    assert report.faults == []
    assert {one.reason for one in report.unchecked} == {"torch wrote it with its checksums turned off"}
    assert len(report.unchecked) == report.num_items == 7


def test_records_that_are_no_zip_files_are_not_checkable_and_no_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", functools.partial(torch.save, _use_new_zipfile_serialization=False))
    store = save_torchs(tmp_path)
    report = verified(store)
    assert report.faults == []
    assert {one.reason for one in report.unchecked} == {"it is not a zip file, so it has no checksums"}
    # Zeros where a record was are neither.
    with changed(store, shard_of(store), bytes(len(store.get(shard_of(store))))):
        assert len(verified(store).faults) == 7


def large_state():
    return {"large": torch.arange((40 << 20) // 8), "other": torch.arange((3 << 20) // 4 + 5), "small": torch.ones(2)}


@pytest.fixture(scope="module", params=WRITERS)
def large(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp("large") / "c", large_state())


def test_large_records_are_checked_piece_by_piece(large):
    report = verified(large)
    assert (report.faults, report.num_blocks) == ([], report.num_blocks_checked)
    record = next(record for record in records_of(large) if record.fqn == "large")
    for place in (record.start, record.start + (20 << 20), record.end - 1):
        with flipped(large, shard_of(large), place):
            require_found(verified(large), large, place)


def test_a_block_that_is_damaged_is_named_as_a_block(tmp_path):
    store = save_ours(tmp_path / "c", large_state())
    entry = next(entry for entry in entries_of(store) if entry.fqn == "large")
    start = entry.payload_offset + 17 * BLOCK_NBYTES
    with flipped(store, entry.file, start + 5):
        (fault,) = verified(store).faults
    assert (fault.start, fault.end) == (start, start + BLOCK_NBYTES)
    assert fault.problem == "block 17 of its payload fails its checksum"


def test_a_sample_checks_its_share_of_the_blocks_and_the_same_ones_with_its_seed(tmp_path):
    store = save_ours(tmp_path / "c", large_state())
    entry = next(entry for entry in entries_of(store) if entry.fqn == "large")
    one, again, other = (verified(store, sample=0.1, seed=seed) for seed in (1, 1, 2))
    assert (one.faults, one.sample, one.seed) == ([], 0.1, 1)
    assert one.num_blocks == 40 + 7 + 1
    assert one.num_blocks_checked == 5 + 1, "a tenth of 47, and the small one that is read anyway"
    assert one.nbytes_checked < 6 << 20
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(again, seconds=0)
    found = set()
    for seed in range(15):
        with flipped(store, entry.file, *range(entry.payload_offset, entry.payload_offset + (40 << 20), BLOCK_NBYTES)):
            found |= {fault.start for fault in verified(store, sample=0.1, seed=seed).faults}
        if len(found) > 20:
            break
    assert len(found) > 20, "each block can be in a sample"
    assert other.seed == 2
    assert verified(store, sample=0.1).seed != verified(store, sample=0.1).seed


def test_a_sample_leaves_out_nothing_of_the_structure(large):
    records = records_of(large)
    places = [place for record in records for place in (record.start, record.end - 1)]
    for place in places:
        with flipped(large, shard_of(large), place):
            require_found(verified(large, sample=0.01, seed=3), large, place)


@pytest.mark.parametrize("share", [0, 1, -0.5, 7, float("nan")])
def test_a_share_that_is_none_is_refused(ours, share):
    with pytest.raises(ConfigError, match="share"):
        plan_verify(ours.url, sample=share)


def test_a_pointer_is_followed_and_a_root_is_told_from_a_checkpoint(ours, tmp_path):
    open_store(tmp_path / "ray").put(POINTER, f'{{"checkpoint_id": "{ours.url}"}}'.encode())
    assert verified(open_store(tmp_path / "ray")).checkpoint_id == ours.url
    with pytest.raises(CheckpointNotFoundError, match="pass "):
        plan_verify(ours.url.rpartition("/")[0])


def test_a_store_that_fails_is_no_damage(ours, pieces_of):
    class Failing(LocalStore):
        def get(self, key, offset=0, nbytes=None):
            raise StoreError("cannot read: Input/output error", url=self.url, key=key)

        def get_into(self, key, offset, buffers):
            raise StoreError("cannot read: Input/output error", url=self.url, key=key)

    for piece_nbytes in (100, 16 << 20):
        pieces_of(piece_nbytes)
        plan = dataclasses.replace(plan_verify(ours.url), store=Failing(ours.url))
        with pytest.raises(StoreError, match="Input/output error"):
            verify_checkpoint(plan)


def test_what_is_done_is_counted(store, large):
    for one in (store, large):
        done = []
        report = verify_checkpoint(plan_verify(one.url), on_bytes=done.append)
        assert report.nbytes_checked <= sum(done) <= report.nbytes
        assert max(done) <= pieces.READ_NBYTES


def test_a_record_that_has_another_checksum_than_the_manifest_is_a_fault(ours):
    entry = next(entry for entry in entries_of(ours) if entry.fqn == "model.w")
    whole = ours.get(entry.file)
    start, end = entry.record_offset, entry.record_offset + entry.record_nbytes
    (crc,) = entry.block_crcs
    record = whole[start:end].replace(crc.to_bytes(4, "little"), (crc ^ 1).to_bytes(4, "little"))
    with changed(ours, entry.file, whole[:start] + record + whole[end:]):
        (fault,) = verified(ours).faults
    assert (fault.fqn, fault.problem) == ("model.w", "its record has another checksum for data/0 than the manifest")


def test_a_record_that_the_manifest_does_not_know_is_a_fault(ours):
    manifest = decode_manifest(ours.get(MANIFEST), file=MANIFEST)
    lost = next(entry for entry in entries_of(ours) if entry.fqn == "model.w")
    entries = [entry for entry in manifest.entries if entry != lost]
    with changed(ours, MANIFEST, encode_manifest(dataclasses.replace(manifest, entries=entries))):
        (fault,) = verified(ours).faults
    assert fault.problem == "bytes that belong to no record"
    assert fault.start <= lost.record_offset < lost.record_offset + lost.record_nbytes <= fault.end


def test_a_chunk_for_which_torchs_metadata_has_no_place_is_a_fault(tmp_path):
    store = save_torchs(tmp_path / "c")
    metadata = decode_metadata(store.get(METADATA), file=METADATA)
    index = next(index for index in metadata.storage_data if index.fqn == "parts" and tuple(index.offset) == (3,))
    del metadata.storage_data[index]
    with changed(store, METADATA, encode_metadata(metadata)):
        report = verified(store)
    assert [(f.file, f.fqn, f.offsets, f.problem) for f in report.faults] == [
        (METADATA, "parts", (3,), "no place is given for it")
    ]
    assert report.num_blocks_checked == report.num_blocks > 0


def test_files_of_several_ranks_are_checked_and_a_fault_names_the_rank_and_its_chunk(tmp_path):
    def rows(rank):
        return {"w": LocalShards((6, 4), {(2 * rank, 0): torch.full((2, 4), float(rank))}), "mine": PerRank(rank)}

    require_no_errors(ThreadRanks(3).save(rows, tmp_path / "c"))
    store = open_store(tmp_path / "c")
    report = verified(store)
    assert (report.faults, report.num_files, report.num_items) == ([], 3, 6)
    entry = next(entry for entry in entries_of(store) if entry.fqn == "w" and entry.rank == 2)
    with flipped(store, entry.file, entry.payload_offset), changed(store, entry.file.replace("__2_", "__1_"), None):
        faults = verified(store).faults
    assert [(f.fqn, f.offsets, f.rank) for f in faults if f.fqn == "w"] == [("w", (2, 0), 1), ("w", (4, 0), 2)]
    assert [f.rank for f in faults if f.fqn != "w"] == [1]
