"""What the catalog says is committed, is; and what it says of the rest helps."""

import json
import shlex
import shutil
import uuid

import pytest
import torch

from ray_dcp.catalog.committed import open_manifest
from ray_dcp.catalog.explain import require_checkpoint
from ray_dcp.catalog.facts import CheckpointInfo, describe
from ray_dcp.catalog.listing import UncommittedFolder, find_step, list_checkpoints, list_uncommitted
from ray_dcp.catalog.newest import latest_checkpoint
from ray_dcp.catalog.pointer import resolve_checkpoint_id
from ray_dcp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    NotAFolderError,
    ObjectNotFoundError,
)
from ray_dcp.format.manifest import FORMAT_VERSION, Entry, Manifest, encode_manifest, metadata_digest
from ray_dcp.format.names import MANIFEST, METADATA, POINTER, step_folder
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.store.open import open_store


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "root") if request.param == "local" else f"memory://{uuid.uuid4().hex}/root"


def commit(root, folder, *, step=None, shard="__0_0_ab.distcp", nbytes=100, created=5.0, metrics=None, version=1):
    """A checkpoint as ``StoreWriter`` leaves it, with one item of ``nbytes``."""
    store = open_store(root)
    metadata = f"metadata of {folder}".encode()
    if not shard.startswith("../"):
        store.put(f"{folder}/{shard}", bytes(nbytes))
    entry = Entry("w", (0,), (25,), "float32", shard, 0, nbytes, 0, nbytes, (0,), 0)
    manifest = Manifest(
        [entry], 2, "ab", metadata_digest(metadata), created, step, metrics or {}, format_version=version
    )
    store.put(f"{folder}/{MANIFEST}", encode_manifest(manifest))
    store.put(f"{folder}/{METADATA}", metadata)
    return manifest


def commit_as_torch(root, folder, *, nbytes=50):
    store = open_store(root)
    store.put(f"{folder}/__0_0.distcp", bytes(nbytes))
    store.put(f"{folder}/{METADATA}", b"0123456789")


def test_steps_are_listed_in_order_then_other_folders(root):
    commit(root, "step-00000100", step=100, metrics={"loss": 0.5})
    commit(root, "step-9", created=3.0)
    commit_as_torch(root, "step-00000020")
    commit(root, "best", step=100)
    commit_as_torch(root, "imported")
    infos = list_checkpoints(root)
    assert [info.checkpoint_id for info in infos] == [
        f"{root}/{name}" for name in ("step-9", "step-00000020", "step-00000100", "best", "imported")
    ]
    assert infos[0] == CheckpointInfo(9, f"{root}/step-9", 100, 2, 3.0, {})
    assert infos[2] == CheckpointInfo(100, f"{root}/step-00000100", 100, 2, 5.0, {"loss": 0.5})
    assert (infos[1].step, infos[1].nbytes, infos[1].world_size, infos[1].metrics) == (20, 60, None, {})
    assert infos[1].created > 1.6e9
    assert [info.step for info in infos[3:]] == [None, None]


def test_nothing_is_listed_where_nothing_is_committed(root):
    assert list_checkpoints(root) == list_uncommitted(root) == []
    assert latest_checkpoint(root) is None
    open_store(root).put("step-1/__0_0_ab.distcp", b"x")
    open_store(root).put("logs/train.txt", b"x")
    assert list_checkpoints(root) == []
    assert latest_checkpoint(root) is None


def test_a_file_for_a_root_is_said_so(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotAFolderError):
        list_checkpoints(tmp_path / "file")


def test_a_checkpoint_with_a_damaged_manifest_is_listed_by_its_sizes(root, caplog):
    commit(root, "step-1", step=1)
    open_store(root).put(f"step-1/{MANIFEST}", b"damaged")
    commit(root, "step-2", step=2)
    infos = list_checkpoints(root)
    assert [(info.step, info.world_size) for info in infos] == [(1, None), (2, 2)]
    assert f"step-1/{MANIFEST}" in caplog.text


def test_the_latest_is_the_newest_committed_step(root):
    for step in (9, 10, 100):
        commit(root, step_folder(step), step=step)
    open_store(root).put("step-00000200/__0_0_ab.distcp", b"never finished")
    commit(root, "zzz")
    assert latest_checkpoint(root) == list_checkpoints(root)[2]
    assert latest_checkpoint(root).step == 100


@pytest.mark.parametrize("damage", ["missing", "short", "manifest"])
def test_a_damaged_step_is_passed_over_and_logged(root, damage, caplog):
    commit(root, "step-1", step=1)
    commit(root, "step-2", step=2)
    store = open_store(root)
    if damage == "missing":
        store.delete("step-2/__0_0_ab.distcp")
    elif damage == "short":
        store.put("step-2/__0_0_ab.distcp", bytes(99))
    else:
        content = bytearray(store.get(f"step-2/{MANIFEST}"))
        content[content.index(b"ray_dcp.metrics")] ^= 1
        store.put(f"step-2/{MANIFEST}", bytes(content))
    assert latest_checkpoint(root).step == 1
    assert "step-2" in caplog.text
    assert {"missing": "is missing", "short": "99 of 100 bytes", "manifest": MANIFEST}[damage] in caplog.text


def test_a_newer_format_is_not_passed_over(root):
    """An older step would be trained on, and the newer one then overwritten."""
    commit(root, "step-1", step=1)
    commit(root, "step-2", step=2, version=FORMAT_VERSION + 1)
    with pytest.raises(FormatVersionError):
        latest_checkpoint(root)
    assert [info.step for info in list_checkpoints(root)] == [1, 2]


def test_a_step_whose_files_lie_in_a_sibling_is_whole_while_they_are_there(root):
    commit(root, "step-1", step=1)
    commit(root, "step-2", step=2, shard="../step-1/__0_0_ab.distcp")
    assert latest_checkpoint(root).step == 2
    open_store(root).delete("step-1/__0_0_ab.distcp")
    assert latest_checkpoint(root) is None


def test_a_manifest_of_another_metadata_is_none(root):
    """A save over an existing id stopped between its manifest and its commit: the old one is still whole."""
    commit(root, "step-1", step=1)
    store = open_store(f"{root}/step-1")
    assert open_manifest(store).step == 1
    store.put(METADATA, b"of the save before")
    assert open_manifest(store) is None
    assert latest_checkpoint(root).world_size is None
    store.delete(MANIFEST)
    assert open_manifest(store) is None


def test_describe_says_what_the_list_says(root):
    commit(root, "step-00000007", step=7, metrics={"loss": 1})
    commit(root, "best", step=7)
    commit_as_torch(root, "step-00000003")
    for info in list_checkpoints(root):
        assert describe(info.checkpoint_id) == info
    assert describe(f"{root}/best").step is None


def test_unfinished_saves_are_listed_with_the_reason(root):
    store = open_store(root)
    commit(root, "step-1", step=1)
    store.put("step-3/__0_0_ab.distcp", bytes(7))
    store.put("step-3/__1_0_ab.distcp", bytes(3))
    commit(root, "step-2", step=2)
    store.delete(f"step-2/{METADATA}")
    store.put("imported/__0_0.distcp", b"x")
    store.put("step-4/notes.txt", b"x")
    store.put("logs/train.txt", b"x")
    found = list_uncommitted(root)
    assert [one.checkpoint_id.removeprefix(f"{root}/") for one in found] == ["step-2", "step-3", "step-4", "imported"]
    assert found[1] == UncommittedFolder(
        3, f"{root}/step-3", 2, 10, "a save that never finished: 2 shard files, no .metadata"
    )
    assert found[0].reason == "a save that stopped just before its commit: all files but .metadata"
    assert found[2].reason == "1 file, no .metadata and no shard file"


def test_a_pointer_is_followed(root):
    commit(root, "step-1", step=1)
    store = open_store(root)
    store.put(f"ray/{POINTER}", json.dumps({"checkpoint_id": f"{root}/step-1"}).encode())
    store.put(f"twice/{POINTER}", json.dumps({"checkpoint_id": f"{root}/ray"}).encode())
    for name in ("step-1", "ray", "twice"):
        assert resolve_checkpoint_id(f"{root}/{name}") == f"{root}/step-1"
        assert describe(f"{root}/{name}").step == 1


def test_pointers_that_lead_nowhere_are_told(root):
    store = open_store(root)
    store.put(f"loop/{POINTER}", json.dumps({"checkpoint_id": f"{root}/loop"}).encode())
    store.put(f"gone/{POINTER}", json.dumps({"checkpoint_id": f"{root}/step-1"}).encode())
    with pytest.raises(CheckpointNotFoundError, match="do not end"):
        describe(f"{root}/loop")
    with pytest.raises(CheckpointNotFoundError, match="step-1: nothing is there"):
        describe(f"{root}/gone")
    for content in (b"", b"{}", b"[]", b'{"checkpoint_id": 3}', b"\xff"):
        store.put(f"bad/{POINTER}", content)
        with pytest.raises(CorruptCheckpointError, match=POINTER):
            describe(f"{root}/bad")


def why_not(checkpoint_id):
    with pytest.raises(CheckpointNotFoundError) as caught:
        require_checkpoint(open_store(checkpoint_id))
    with pytest.raises(CheckpointNotFoundError) as described:
        describe(checkpoint_id)
    assert str(described.value) == str(caught.value)
    assert caught.value.checkpoint_id == str(checkpoint_id)
    return caught.value.reason


def test_what_is_committed_is_required_without_a_word(root):
    commit(root, "step-1")
    commit_as_torch(root, "torch")
    require_checkpoint(open_store(f"{root}/step-1"))
    require_checkpoint(open_store(f"{root}/torch"))


def test_why_nothing_there_is_no_checkpoint(root):
    reason = why_not(root)
    assert reason.startswith("nothing is there")
    assert ("memory:// is of one process" in reason) == root.startswith("memory://")


def test_why_an_empty_folder_is_no_checkpoint(tmp_path):
    assert why_not(tmp_path) == "the folder is empty"


def test_why_an_unfinished_save_is_no_checkpoint(root):
    store = open_store(root)
    store.put("__0_0_ab.distcp", b"x")
    assert why_not(root) == "a save that never finished: 1 shard file, no .metadata"
    store.put(MANIFEST, b"x")
    assert "stopped just before its commit" in why_not(root)


def test_why_a_root_is_no_checkpoint(root):
    store = open_store(root)
    store.put("step-300/__0_0_ab.distcp", b"x")
    assert why_not(root) == "this is a root with 1 step folder, none of them committed"
    commit(root, "step-20")
    commit(root, "step-100")
    assert why_not(root) == f"this is a root with 2 checkpoints, the newest is step-100; pass {root}/step-100"


def test_why_a_folder_around_a_checkpoint_is_none(root):
    commit(root, "final")
    assert why_not(root) == f"this folder contains final; pass {root}/final"


def test_why_other_files_are_no_checkpoint(root):
    open_store(root).put("model.safetensors", b"x")
    open_store(root).put("config.json", b"x")
    assert why_not(root) == "2 files, but no .metadata"


def test_why_a_file_is_no_checkpoint(root):
    commit(root, "step-1")
    for name in (METADATA, MANIFEST, "__0_0_ab.distcp"):
        reason = why_not(f"{root}/step-1/{name}")
        assert reason == f"this is a file of a checkpoint; pass the folder that holds it, {root}/step-1"


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt", "weights", "my model.pt"])
def test_a_file_of_torch_save_is_converted_as_the_message_says(tmp_path, name, capsys):
    from ray_dcp.cli.main import main

    torch.save({"w": torch.ones(3)}, tmp_path / name)
    for place, command in ((tmp_path / name, "verify"), (tmp_path / name, "list"), (tmp_path, "show")):
        if place == tmp_path and name == "weights":
            continue  # in a folder it might be anything
        assert main([command, str(place)]) == 3
        told = capsys.readouterr().err
        _, _, way = told.strip().partition("make a checkpoint: ray-dcp ")
        assert main(shlex.split(way)) == 0
        dest = shlex.split(way)[2]
        capsys.readouterr()
        assert main(["verify", dest]) == 0
        shutil.rmtree(dest)


def test_any_other_file_is_called_one(tmp_path, capsys):
    from ray_dcp.cli.main import main

    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").write_text("")
    for name in ("notes.txt", "empty"):
        assert why_not(tmp_path / name) == "this is a file; a checkpoint is a folder"
        for command in (["list"], ["verify"], ["show"], ["prune"], ["verify", "--all"]):
            assert main([*command, str(tmp_path / name)]) == 3
            assert "this is a file" in capsys.readouterr().err


def test_many_manifests_are_listed_at_once_without_their_rows(root):
    for step in range(40):
        commit(root, step_folder(step), step=step)
    assert [info.step for info in list_checkpoints(root)] == list(range(40))


def test_the_latest_before_a_step_is_older_than_it(root):
    for step in (9, 10, 100):
        commit(root, step_folder(step), step=step)
    assert [latest_checkpoint(root, before=step).step for step in (101, 100, 10)] == [100, 10, 9]
    assert latest_checkpoint(root, before=9) is None


def test_only_what_is_committed_and_whole_is_the_latest(root):
    commit(root, step_folder(10), step=10)
    open_store(root).put(f"{step_folder(20)}/__0_0_ab.distcp", b"never finished")
    commit(root, step_folder(30), step=30)
    open_store(root).delete(f"{step_folder(30)}/__0_0_ab.distcp")
    assert latest_checkpoint(root).step == 10


def test_a_file_that_is_missing_is_noticed_without_a_manifest_too(root, caplog):
    commit(root, "step-1", step=1)
    store = open_store(root)
    store.put("step-2/__0_0.distcp", b"x")
    store.put(f"step-2/{METADATA}", b"names __0_0.distcp and ../step-1/__0_0_ab.distcp")
    assert latest_checkpoint(root).step == 2
    store.delete("step-2/__0_0.distcp")
    assert latest_checkpoint(root).step == 1
    assert "step-2/__0_0.distcp is missing" in caplog.text


def test_a_link_or_a_copy_of_a_step_is_no_step_of_its_own(tmp_path):
    root = str(tmp_path)
    for step in (1, 10):
        commit(root, step_folder(step), step=step)
    (tmp_path / "latest").symlink_to("step-00000010")
    for copy in ("step-00000010.bak", "old", "step-00000010 (copy)", "step-10-best", "step-", "step--3"):
        shutil.copytree(tmp_path / "step-00000010", tmp_path / copy)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "archive/step-00000010")
    infos = list_checkpoints(root)
    assert [info.step for info in infos if info.step is not None] == [1, 10]
    assert len(infos) == 2 + 7
    assert latest_checkpoint(root).checkpoint_id == f"{root}/step-00000010"
    assert describe(f"{root}/latest").step is None


def test_of_two_spellings_of_a_number_one_is_the_step_for_everybody(root):
    commit(root, "step-7", step=7)
    commit(root, "step-007", step=7)
    assert [(info.step, info.checkpoint_id) for info in list_checkpoints(root)] == [
        (7, f"{root}/step-7"),
        (None, f"{root}/step-007"),
    ]
    commit(root, "step-00000007", step=7)
    assert [info.step for info in list_checkpoints(root)] == [7, None, None]
    assert list_checkpoints(root)[0] == latest_checkpoint(root) == describe(f"{root}/step-00000007")
    assert find_step(root, 7) == f"{root}/step-00000007"
    open_store(root).delete(f"step-00000007/{METADATA}")
    assert find_step(root, 7) == latest_checkpoint(root).checkpoint_id == f"{root}/step-7"
    assert find_step(root, 8) is None


def test_a_link_that_leads_nowhere_is_called_one(tmp_path):
    (tmp_path / "latest").symlink_to("step-00000010")
    assert why_not(tmp_path / "latest") == "this is a link that leads nowhere: to step-00000010"


def test_a_file_of_a_bucket_is_told_by_its_name_and_without_parameters():
    files = CheckpointFiles(open_store("memory://"), "s3://id:hush@b/step-1?endpoint_override=host:9000")
    told = str(files.damaged(ObjectNotFoundError("gone", url="s3://b"), "__0_0_ab.distcp", "w", 0, 4))
    assert told.startswith("w: its file is missing (if the checkpoint was saved again twice")
    assert told.endswith("(s3://b/step-1/__0_0_ab.distcp, bytes 0 to 4)")
