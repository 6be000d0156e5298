"""What a sweep finds to delete, what it lets be, and what becomes of it."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import api
from ray_dcp.errors import NotAFolderError
from ray_dcp.format.manifest import FORMAT_VERSION, Manifest, encode_manifest
from ray_dcp.format.names import MANIFEST, METADATA, new_attempt
from ray_dcp.maintenance.sweep import removal
from ray_dcp.maintenance.sweep.removal import Sweeper, delete_leftovers, plan_sweep
from ray_dcp.store.open import open_store
from tests.catalog.test_listing import commit, commit_as_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DAY = 86400.0
OLD = "0000000000000001deadbeef"  # an attempt of 1970
TEMPORARY = f".ray_dcp_{'ab' * 16}.tmp"


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


def save(root, folder, value=1.0):
    dcp.save({"w": torch.full((4,), value)}, checkpoint_id=f"{root}/{folder}", no_dist=True)
    api.alone.sweep.wait()


def load(root, folder):
    filled = {"w": torch.full((4,), float("nan"))}
    dcp.load(filled, checkpoint_id=f"{root}/{folder}", no_dist=True)
    return filled["w"][0].item()


def put(root, key, nbytes=10):
    open_store(root).put(key, bytes(nbytes))


def keys(plan):
    return [one.key for one in plan.leftovers]


def tomorrow():
    return time.time() + DAY


def files(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


def test_what_a_failed_save_left_is_deleted_with_its_folder(root):
    save(root, "step-1")
    put(root, f"step-2/__0_0_{OLD}.distcp", 7)
    put(root, f"step-2/__1_0_{OLD}.distcp", 5)
    before = files(root)
    plan = plan_sweep(root, now=tomorrow())
    assert keys(plan) == [f"step-2/__0_0_{OLD}.distcp", f"step-2/__1_0_{OLD}.distcp"]
    assert (plan.nbytes, plan.waiting, plan.unreadable) == (12, [], [])
    assert plan.leftovers[0].reason == "of a save that never committed"
    assert files(root) == before
    report = delete_leftovers(plan)
    assert (report.deleted, report.nbytes, report.changed, report.failed) == (keys(plan), 12, [], [])
    assert os.listdir(root) == ["step-1"]
    assert load(root, "step-1") == 1.0
    assert keys(plan_sweep(root, now=tomorrow())) == []


def test_what_is_younger_than_the_grace_waits_and_it_is_said_until_when(root):
    put(root, f"step-2/__0_0_{OLD}.distcp", 7)
    put(root, f"step-2/__1_0_{OLD}.distcp", 5)
    os.utime(f"{root}/step-2/__0_0_{OLD}.distcp", (1000, 1000))
    os.utime(f"{root}/step-2/__1_0_{OLD}.distcp", (5000, 5000))
    early = plan_sweep(root, now=8599.0)
    assert keys(early) == []
    (waiting,) = early.waiting
    assert (waiting.folder, waiting.num_files, waiting.nbytes, waiting.eligible) == ("step-2", 2, 12, 8600.0)
    assert len(plan_sweep(root, now=8600.0).leftovers) == 2
    assert len(plan_sweep(root, now=5001.0, grace_s=1.0).leftovers) == 2


def test_an_attempt_is_no_older_than_its_name_says_nor_than_its_newest_file(root):
    """The store's clock may be behind that of the ranks, or theirs behind the store's."""
    attempt = new_attempt()
    put(root, f"step-2/__0_0_{attempt}.distcp")
    os.utime(f"{root}/step-2/__0_0_{attempt}.distcp", (1000, 1000))
    put(root, f"step-3/__0_0_{OLD}.distcp")
    assert keys(plan_sweep(root)) == []
    assert len(plan_sweep(root).waiting) == 2
    assert len(plan_sweep(root, now=tomorrow()).leftovers) == 2


def test_dead_attempts_need_no_grace_and_live_ones_no_excuse(root):
    dead, live, other = (new_attempt() for _ in range(3))
    for attempt in (dead, live, other):
        put(root, f"step-2/__0_0_{attempt}.distcp")
    plan = plan_sweep(root, dead_attempts={dead}, live_attempts={live})
    assert keys(plan) == [f"step-2/__0_0_{dead}.distcp"]
    assert len(plan.waiting) == 2
    late = plan_sweep(root, dead_attempts={dead}, live_attempts={live}, now=tomorrow())
    assert f"step-2/__0_0_{live}.distcp" not in keys(late)
    assert [(one.reason, one.eligible) for one in late.waiting] == [("their save is under way", None)]


def test_a_committed_attempt_that_somebody_calls_dead_stays(root):
    save(root, "step-1")
    attempt = dcp.StoreReader(f"{root}/step-1").read_metadata().storage_meta.save_id
    plan = plan_sweep(root, dead_attempts={attempt}, now=tomorrow())
    assert keys(plan) == []


def test_files_that_a_later_save_of_the_id_replaced_wait_for_their_readers(root):
    save(root, "step-1", 1.0)
    (old,) = [name for name in os.listdir(f"{root}/step-1") if name.endswith(".distcp")]
    time.sleep(0.01)
    save(root, "step-1", 2.0)
    for name in os.listdir(f"{root}/step-1"):
        os.utime(f"{root}/step-1/{name}", (5000, 5000))
    os.utime(f"{root}/step-1/{METADATA}", None)
    assert keys(plan_sweep(root, now=time.time() + 3500)) == []
    plan = plan_sweep(root, now=time.time() + 3700)
    assert keys(plan) == [f"step-1/{old}"]
    assert plan.leftovers[0].reason == "not part of the checkpoint that is committed here"
    delete_leftovers(plan)
    assert load(root, "step-1") == 2.0


def test_files_that_a_sibling_refers_to_stay(root):
    """Also where their own folder has been saved again since."""
    attempt = new_attempt()
    put(root, f"step-1/__0_0_{attempt}.distcp")
    put(root, f"step-1/__1_0_{OLD}.distcp")
    metadata = f"metadata that names ../step-1/__0_0_{attempt}.distcp".encode()
    open_store(root).put(f"step-2/{MANIFEST}", encode_manifest(_manifest(metadata, attempt)))
    open_store(root).put(f"step-2/{METADATA}", metadata)
    assert keys(plan_sweep(root, now=tomorrow())) == [f"step-1/__1_0_{OLD}.distcp"]
    os.unlink(f"{root}/step-2/{METADATA}")
    assert f"step-1/__0_0_{attempt}.distcp" in keys(plan_sweep(root, now=tomorrow()))


def _manifest(metadata, attempt, version=FORMAT_VERSION):
    from ray_dcp.format.manifest import metadata_digest

    return Manifest([], 1, attempt, metadata_digest(metadata), 5.0, format_version=version)


def test_a_checkpoint_is_swept_by_its_metadata_where_it_has_no_manifest(root):
    save(root, "step-1")
    os.unlink(f"{root}/step-1/{MANIFEST}")
    put(root, f"step-1/__0_0_{OLD}.distcp")
    torch_dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{root}/step-2", no_dist=True)
    plan = plan_sweep(root, now=tomorrow())
    assert keys(plan) == [f"step-1/__0_0_{OLD}.distcp"]
    delete_leftovers(plan)
    assert load(root, "step-1") == load(root, "step-2") == 1.0


def test_a_manifest_whose_save_never_committed_goes_first(root):
    save(root, "step-1")
    os.unlink(f"{root}/step-1/{METADATA}")
    plan = plan_sweep(root, now=tomorrow())
    assert [key.rpartition("/")[2][:6] for key in keys(plan)] == ["manife", "__0_0_"]
    delete_leftovers(plan)
    assert os.listdir(root) == []


def test_the_manifest_of_a_live_attempt_stays(root):
    save(root, "step-1")
    attempt = dcp.StoreReader(f"{root}/step-1").read_metadata().storage_meta.save_id
    os.unlink(f"{root}/step-1/{METADATA}")
    assert keys(plan_sweep(root, live_attempts={attempt}, now=tomorrow())) == []
    assert len(plan_sweep(root, dead_attempts={attempt}).leftovers) == 2


def test_a_stale_manifest_next_to_a_commit_stays_and_its_files_go(root):
    """The save of an id that is committed stopped between its manifest and its commit."""
    save(root, "step-1", 1.0)
    committed = Path(root, "step-1", METADATA).read_bytes()
    (old,) = [name for name in os.listdir(f"{root}/step-1") if name.endswith(".distcp")]
    save(root, "step-1", 2.0)
    Path(root, "step-1", METADATA).write_bytes(committed)
    plan = plan_sweep(root, now=tomorrow())
    assert len(plan.leftovers) == 1
    delete_leftovers(plan)
    assert sorted(os.listdir(f"{root}/step-1")) == [METADATA, old, MANIFEST]
    assert load(root, "step-1") == 1.0


def test_files_that_ray_dcp_did_not_write_are_never_touched(root):
    commit(root, "step-1", step=1, shard=f"__0_0_{OLD}.distcp")
    others = [
        "step-2/__0_0.distcp",
        "step-2/notes.txt",
        "step-2/__0_0_XY.distcp",
        f"step-2/below/__0_0_{OLD}.distcp",
        f"data/{MANIFEST}",
        f"step-1/{POINTER_LIKE}",
        "step-1/events.log",
        "hf/model.safetensors",
        f"__0_0_{OLD}.distcp",
    ]
    for key in others:
        put(root, key)
    before = files(root)
    plan = plan_sweep(root, now=tomorrow())
    assert keys(plan) == []
    delete_leftovers(plan)
    assert files(root) == before


POINTER_LIKE = "ray_dcp_pointer.json"


def test_temporary_files_of_processes_that_died_are_found(root):
    save(root, "step-1")
    Path(root, "step-1", TEMPORARY).write_bytes(b"12345")
    assert keys(plan_sweep(root)) == []
    plan = plan_sweep(root, now=tomorrow())
    assert [(one.key, one.nbytes) for one in plan.leftovers] == [(f"step-1/{TEMPORARY}", 5)]
    delete_leftovers(plan)
    assert TEMPORARY not in os.listdir(f"{root}/step-1")


def test_empty_folders_of_steps_go_and_other_empty_folders_stay(root):
    for folder in ("step-5", "logs", "step-6/tensorboard"):
        Path(root, folder).mkdir(parents=True)
    delete_leftovers(plan_sweep(root))
    assert sorted(os.listdir(root)) == ["logs", "step-6"]


def test_a_link_to_a_folder_is_not_swept_under_its_name(root, tmp_path):
    save(root, "step-1")
    save(f"{tmp_path}/other", "step-9")
    put(f"{tmp_path}/other", f"step-9/__0_0_{OLD}.distcp")
    os.symlink(f"{tmp_path}/other/step-9", f"{root}/best")
    os.symlink("step-1", f"{root}/latest")
    plan = plan_sweep(root, now=tomorrow())
    assert (keys(plan), plan.folders) == ([], [])


@pytest.mark.parametrize("damage", ["metadata", "half", "manifest", "newer", "torch", "refused"])
def test_nothing_at_all_is_deleted_while_a_checkpoint_cannot_be_read(root, damage, monkeypatch):
    save(root, "step-1")
    save(root, "step-2")
    put(root, f"step-3/__0_0_{OLD}.distcp")
    metadata = Path(root, "step-2", METADATA)
    if damage == "metadata":
        metadata.write_bytes(b"garbage")
    elif damage == "half":
        metadata.write_bytes(metadata.read_bytes()[:-200])
    elif damage == "manifest":
        Path(root, "step-2", MANIFEST).write_bytes(b"garbage")
    elif damage == "newer":
        content = encode_manifest(_manifest(b"m", "ab", FORMAT_VERSION + 1))
        Path(root, "step-2", MANIFEST).write_bytes(content)
    elif damage == "torch":
        commit_as_torch(root, "step-4")
    else:
        real = os.open

        def refuse(path, *args, **kwargs):
            if str(path) == str(metadata):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    before = files(root)
    plan = plan_sweep(root, now=tomorrow(), dead_attempts={OLD})
    assert len(plan.unreadable) == 1
    assert {"torch": "step-4", "refused": "Permission denied"}.get(damage, "step-2") in plan.unreadable[0]
    assert (keys(plan), plan.folders) == ([], [])
    delete_leftovers(plan)
    assert files(root) == before


def test_a_save_that_commits_after_the_plan_keeps_its_files(root):
    save(root, "step-1")
    metadata = Path(root, "step-1", METADATA)
    content = metadata.read_bytes()
    metadata.unlink()
    plan = plan_sweep(root, now=tomorrow())
    assert len(plan.leftovers) == 2
    metadata.write_bytes(content)
    report = delete_leftovers(plan)
    assert (report.deleted, report.changed) == ([], keys(plan))
    assert load(root, "step-1") == 1.0


def test_a_file_that_has_changed_or_gone_since_the_plan_is_left_alone(root):
    for name in (f"__0_0_{OLD}.distcp", f"__1_0_{OLD}.distcp", f"__2_0_{OLD}.distcp"):
        put(root, f"step-1/{name}")
    plan = plan_sweep(root, now=tomorrow())
    put(root, f"step-1/__0_0_{OLD}.distcp", 99)
    os.unlink(f"{root}/step-1/__1_0_{OLD}.distcp")
    report = delete_leftovers(plan)
    assert report.deleted == [f"step-1/__2_0_{OLD}.distcp"]
    assert report.changed == [f"step-1/__0_0_{OLD}.distcp", f"step-1/__1_0_{OLD}.distcp"]


def test_one_failed_delete_does_not_stop_the_others(root, monkeypatch):
    for folder in ("step-1", "step-2"):
        for rank in range(3):
            put(root, f"{folder}/__{rank}_0_{OLD}.distcp")
    plan = plan_sweep(root, now=tomorrow())
    real = os.unlink

    def refuse(path, *args):
        if str(path).endswith(f"step-1/__1_0_{OLD}.distcp"):
            raise OSError(5, "Input/output error")
        real(path, *args)

    monkeypatch.setattr(os, "unlink", refuse)
    report = delete_leftovers(plan)
    assert len(report.deleted) == 5
    (failed,) = report.failed
    assert failed.key == f"step-1/__1_0_{OLD}.distcp"
    assert "Input/output error" in failed.message
    assert files(root) == [failed.key]


def test_a_root_that_is_not_there_has_no_leftovers_and_a_file_is_no_root(tmp_path):
    assert keys(plan_sweep(tmp_path / "nope")) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotAFolderError):
        plan_sweep(tmp_path / "file")


def test_it_works_in_a_store_without_folders_of_its_own():
    root = f"memory://{uuid.uuid4().hex}/root"
    save(root, "step-1")
    put(root, f"step-2/__0_0_{OLD}.distcp")
    plan = plan_sweep(root, now=tomorrow())
    assert delete_leftovers(plan).deleted == [f"step-2/__0_0_{OLD}.distcp"]
    assert load(root, "step-1") == 1.0


def test_a_sweeper_looks_again_only_at_what_is_new(root, monkeypatch):
    for step in range(5):
        save(root, f"step-{step}")
    put(root, f"step-7/__0_0_{OLD}.distcp")
    looked: list[str] = []
    real = removal.look_at

    def look_at(store, names):
        looked.extend(names)
        return real(store, names)

    monkeypatch.setattr(removal, "look_at", look_at)
    sweeper = Sweeper(root)
    assert len(sweeper.plan(now=tomorrow()).leftovers) == 1
    assert len(looked) == 6
    save(root, "step-8")
    looked.clear()
    assert len(sweeper.plan(now=tomorrow()).leftovers) == 1
    assert looked == ["step-7", "step-8"]
    looked.clear()
    put(root, f"step-2/__0_0_{OLD}.distcp")
    sweeper.forget("step-2")
    delete_leftovers(sweeper.plan(now=tomorrow()))
    assert looked == ["step-2", "step-7"]
    looked.clear()
    assert sweeper.plan(now=tomorrow()).folders == []
    assert looked == ["step-2"]


def test_a_sweeper_remembers_what_the_folders_it_skips_refer_to(root):
    attempt = new_attempt()
    metadata = f"metadata that names ../step-1/__0_0_{attempt}.distcp".encode()
    open_store(root).put(f"step-2/{MANIFEST}", encode_manifest(_manifest(metadata, attempt)))
    open_store(root).put(f"step-2/{METADATA}", metadata)
    sweeper = Sweeper(root)
    sweeper.plan(now=tomorrow())
    put(root, f"step-1/__0_0_{attempt}.distcp")
    put(root, f"step-1/__0_0_{OLD}.distcp")
    assert keys(sweeper.plan(now=tomorrow())) == [f"step-1/__0_0_{OLD}.distcp"]
