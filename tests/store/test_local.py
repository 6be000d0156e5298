"""``LocalStore`` keeps the contract, and what it has returned for is durable."""

import errno
import os
import pickle
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_dcp.errors import NotAFolderError, StoreError, StorePermissionError
from ray_dcp.store.local import LocalStore
from ray_dcp.store.store import as_folders, as_renaming, exists
from ray_dcp.store.translate import as_store_error
from ray_dcp.testing.store_contract import FolderStoreContract


class TestLocalStore(FolderStoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "root")


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "root")


@pytest.fixture
def calls(monkeypatch):
    """The calls that make things durable, in order, each with the path it was for."""
    seen = []

    def record(name, path_of):
        real = getattr(os, name)

        def recorded(*args, **kwargs):
            path = path_of(*args)
            outcome = real(*args, **kwargs)
            seen.append((name, path))
            return outcome

        monkeypatch.setattr(os, name, recorded)

    for name in ("fsync", "close"):
        record(name, lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    record("rename", lambda source, target: target)
    record("mkdir", lambda path, *mode: path)
    record("unlink", lambda path: path)
    return seen


def write(store, key, content=b"content"):
    with store.put_new(key) as writer:
        writer.write(content)


def test_put_makes_content_then_name_durable(store, calls, tmp_path):
    store.put("key", b"1")
    calls.clear()
    store.put("key", b"2")
    names = [(name, "temporary" if path.endswith(".tmp") else path) for name, path in calls]
    root = str(tmp_path / "root")
    assert names == [
        ("fsync", "temporary"),
        ("close", "temporary"),
        ("rename", f"{root}/key"),
        ("fsync", root),
        ("close", root),
    ]


def test_put_new_makes_content_then_name_durable(store, calls, tmp_path):
    store.put("other", b"")
    calls.clear()
    write(store, "key")
    root = str(tmp_path / "root")
    assert [(name, path) for name, path in calls if name == "fsync"] == [("fsync", f"{root}/key"), ("fsync", root)]


@pytest.mark.parametrize("method", ["put", "put_new"])
def test_names_of_new_folders_are_durable_too(store, calls, tmp_path, method):
    write(store, "a/b/key") if method == "put_new" else store.put("a/b/key", b"")
    made = [path for name, path in calls if name == "mkdir"]
    assert made == [str(tmp_path / "root"), str(tmp_path / "root/a"), str(tmp_path / "root/a/b")]
    for folder in made:
        made_at = calls.index(("mkdir", folder))
        assert ("fsync", os.path.dirname(folder)) in calls[made_at:]


def test_names_of_folders_that_another_process_made_are_durable_too(store, calls, tmp_path):
    (tmp_path / "root/a").mkdir(parents=True)
    calls.clear()
    store.put("a/key", b"")
    fsynced = [path for name, path in calls if name == "fsync"]
    assert str(tmp_path) in fsynced
    assert str(tmp_path / "root") in fsynced


def test_delete_is_durable_and_takes_empty_folders_along(store, calls, tmp_path):
    store.put("a/b/key", b"")
    store.put("a/key", b"")
    calls.clear()
    store.delete("a/b/key")
    assert store.list_folders("a") == []
    assert ("fsync", str(tmp_path / "root/a")) in calls
    store.delete("a/key")
    assert (tmp_path / "root").is_dir()
    assert list((tmp_path / "root").iterdir()) == []


def test_a_folder_that_vanishes_under_a_writer_is_made_again(store, tmp_path):
    store.put("a/b/key", b"")
    (tmp_path / "root/a/b/key").unlink()
    (tmp_path / "root/a/b").rmdir()
    (tmp_path / "root/a").rmdir()
    write(store, "a/b/key", b"again")
    assert store.get("a/b/key") == b"again"


def test_short_writes_are_continued(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, chunk: real(descriptor, chunk[:7]))
    content = bytes(range(100))
    store.put("put", content)
    write(store, "new", content)
    assert store.get("put") == store.get("new") == content


def test_short_reads_are_continued(store, monkeypatch):
    content = bytes(range(100))
    store.put("key", content)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: real(descriptor, min(nbytes, 7), offset))
    assert store.get("key") == content
    assert store.get("key", 10, 50) == content[10:60]


def test_a_file_cut_short_while_it_is_read_says_what_is_missing(store, monkeypatch):
    store.put("key", b"0123456789")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: real(descriptor, nbytes, offset)[: 6 - offset])
    with pytest.raises(StoreError, match=r"has 6 bytes.* 4 are missing"):
        store.get("key")


FAILURES = [
    (errno.ENOSPC, StoreError),
    (errno.EIO, StoreError),
    (errno.EDQUOT, StoreError),
    (errno.EACCES, StorePermissionError),
    (errno.EROFS, StoreError),
]


@pytest.mark.parametrize(("number", "expected"), FAILURES, ids=[errno.errorcode[n] for n, _ in FAILURES])
@pytest.mark.parametrize("name", ["open", "write", "fsync", "close", "rename"])
@pytest.mark.parametrize("method", ["put", "put_new"])
def test_a_failing_system_call_is_a_store_error_that_says_so(store, monkeypatch, name, number, expected, method):
    store.put("old", b"old content")
    real = getattr(os, name)

    def fail(*args, **kwargs):
        if name == "close":  # as close does: the descriptor is gone, and the error is told
            real(*args)
        raise OSError(number, os.strerror(number))

    call = (lambda: write(store, "new")) if method == "put_new" else (lambda: store.put("old", b"new content"))
    with monkeypatch.context() as patched:
        patched.setattr(os, name, fail)
        if (name, method) == ("rename", "put_new"):
            call()  # it needs no rename
            return
        with pytest.raises(expected, match=os.strerror(number)) as caught:
            call()
    assert type(caught.value) is expected
    assert caught.value.url == store.url
    assert caught.value.key in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert store.get("old") == b"old content"
    assert [one.key for one in store.list()] == ["old"]
    assert [path.name for path in Path(store.url).iterdir()] == ["old"]


def test_a_full_disk_is_told_even_when_the_clean_up_fails_too(store, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail_otherwise(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", fail)
    monkeypatch.setattr(os, "unlink", fail_otherwise)
    for call in (lambda: write(store, "new"), lambda: store.put("key", b"x")):
        with pytest.raises(StoreError, match="No space left on device"):
            call()


def test_a_writer_is_of_no_use_after_its_block(store):
    with store.put_new("key") as writer:
        writer.write(b"x")
    with pytest.raises(StoreError, match="closed"):
        writer.write(b"y")
    assert store.get("key") == b"x"


def test_folders_without_fsync_are_as_durable_as_the_server_makes_them(store, monkeypatch):
    real = os.fsync

    def no_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    store.put("key", b"x")
    assert store.get("key") == b"x"


def test_temporary_files_are_never_listed(store, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", lambda *args: os._exit(0))
        if (child := os.fork()) == 0:
            store.put("key", b"crashes before the rename")
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert [path.suffix for path in (tmp_path / "root").iterdir()] == [".tmp"]
    assert store.list() == []


def test_a_file_in_a_folders_place_is_said_so(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    for call in (store.list, store.list_folders, lambda: store.put("key", b""), lambda: write(store, "key")):
        with pytest.raises(NotAFolderError, match="Not a directory"):
            call()


def test_put_onto_a_folder_is_refused(store):
    store.put("folder/key", b"x")
    with pytest.raises(StoreError, match="Is a directory"):
        store.put("folder", b"")
    assert [one.key for one in store.list()] == ["folder/key"]


def test_links_to_files_are_objects_and_links_to_folders_are_not_entered(store, tmp_path):
    store.put("blobs/one", b"abc")
    os.symlink("blobs/one", tmp_path / "root/link")
    os.symlink(".", tmp_path / "root/loop")
    os.symlink("nowhere", tmp_path / "root/dangling")
    assert [(one.key, one.nbytes) for one in store.list()] == [("blobs/one", 3), ("link", 3)]
    assert store.list_folders() == ["blobs", "loop"]


def test_a_relative_root_means_the_same_after_chdir_and_pickling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = LocalStore("relative")
    monkeypatch.chdir("/")
    store.put("key", b"x")
    assert (tmp_path / "relative/key").read_bytes() == b"x"
    assert pickle.loads(pickle.dumps(store)).url == str(tmp_path / "relative")


def test_files_have_the_mode_that_the_umask_gives(store, tmp_path):
    before = os.umask(0o027)
    try:
        store.put("put", b"")
        write(store, "new")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) for name in ("put", "new")} == {0o640}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_users_folder_is_a_permission_error():
    script = """if True:
        import os, sys
        from ray_dcp.errors import StorePermissionError
        from ray_dcp.store.local import LocalStore
        mine, shown = LocalStore(sys.argv[1] + "/mine"), LocalStore(sys.argv[1] + "/shown")
        os.setgid(65534); os.setuid(65534)
        for call in (mine.list, lambda: mine.get("key"), lambda: mine.put("key", b""), lambda: shown.get("key"),
                     lambda: shown.put("new", b""), lambda: shown.put_new("new").__enter__(),
                     lambda: shown.delete("key")):
            try:
                call()
            except StorePermissionError as error:
                assert "Permission denied" in str(error), error
            else:
                raise SystemExit("no error")
    """
    # Not tmp_path: pytest closes its folders to other users.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        Path(root, "mine").mkdir(mode=0o700)
        Path(root, "shown").mkdir(mode=0o755)
        Path(root, "shown/key").write_bytes(b"x")
        Path(root, "shown/key").chmod(0o600)
        done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_temporary_files_can_be_asked_for_and_deleted(store, tmp_path):
    name = f".ray_dcp_{'0123456789abcdef' * 2}.tmp"
    store.put("folder/key", b"x")
    for path in (tmp_path / "root" / name, tmp_path / "root/folder" / name):
        path.write_bytes(b"123")
    (tmp_path / "root/folder/.ray_dcp_short.tmp").write_bytes(b"")
    assert [(one.key, one.nbytes) for one in store.list_temporaries()] == [(name, 3)]
    (found,) = store.list_temporaries("folder")
    assert (found.key, found.modified > 1.6e9) == (f"folder/{name}", True)
    assert store.list_temporaries("nope") == []
    store.delete(found.key)
    assert store.list_temporaries("folder") == []
    assert as_folders(store) is store


def test_an_empty_folder_is_deleted_and_no_other(store, tmp_path):
    for folder in ("empty", "full/below"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    assert store.delete_empty_folder("empty")
    assert store.delete_empty_folder("nope")
    assert not store.delete_empty_folder("full")
    assert not store.delete_empty_folder("")
    assert store.list_folders() == ["full"]


def test_links_to_folders_are_told(store, tmp_path):
    (tmp_path / "root/folder").mkdir(parents=True)
    os.symlink("folder", tmp_path / "root/link")
    assert [store.is_link(name) for name in ("folder", "link", "nope")] == [False, True, False]


def test_an_aborted_put_new_leaves_what_somebody_has_put_in_its_place(store, tmp_path):
    """An agent that is given up, and wakes up to fail, took the file away that its rank had written meanwhile."""

    def write_and_fail():
        with store.put_new("key") as writer:
            writer.write(b"half of")
            (tmp_path / "beside").write_bytes(b"the file")
            os.replace(tmp_path / "beside", tmp_path / "root/key")
            raise RuntimeError("given up")

    with pytest.raises(RuntimeError, match="given up"):
        write_and_fail()
    assert store.get("key") == b"the file"


def test_an_aborted_put_new_leaves_no_folder(store, tmp_path):
    with pytest.raises(ValueError, match="stop"), store.put_new("folder/key"):
        raise ValueError("stop")
    assert store.list_folders() == []


def test_an_error_of_a_read_from_an_open_file_is_a_store_error(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put("key", b"0123456789")

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with store.opened("key") as fill:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(StoreError, match="cannot read: Input/output error") as caught:
            fill(0, [memoryview(bytearray(4))])
    assert caught.value.key == "key"


FULL_DISK = """
import sys
from ray_dcp.errors import StoreError
from ray_dcp.store.local import LocalStore

store = LocalStore(sys.argv[1])
for attempt in ("preallocate", "write", "put"):
    try:
        if attempt == "put":
            store.put("small", bytes(5 << 20))
        else:
            with store.put_new(attempt) as file:
                if attempt == "preallocate":
                    file.preallocate(3 << 30)
                for _ in range(5):
                    file.write(bytes(1 << 20))
    except StoreError as error:
        print(error)
print(store.list())
"""


def test_a_full_disk_says_what_was_needed_and_what_is_free(tmp_path):
    mounted = f"mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec {sys.executable} -c '{FULL_DISK}' {tmp_path}/run"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout:
        pytest.skip(f"this machine mounts nothing for us: {done.stderr.strip()}")
    room, write, put, left = done.stdout.splitlines()
    full = "No space left on device"
    assert re.match(rf"cannot make room for: {full} \(3\.0 GiB needed, 2\.0 MiB free\) \(.*/preallocate\)", room)
    assert re.match(rf"cannot write: {full} \(1\.0 MiB needed, .* free\) \(.*/write\)", write)
    assert re.match(rf"cannot put: {full} \(.* free\) \(.*/small\)", put)
    assert left == "[]"


def test_a_quota_and_used_up_inodes_are_told_apart(tmp_path, monkeypatch):
    told = str(as_store_error(OSError(errno.EDQUOT, "Quota exceeded"), "write", url=str(tmp_path), key="x"))
    assert re.match(r"cannot write: Quota exceeded \(.* free; your quota may be less\)", told)
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=5, f_favail=0, f_bavail=9, f_frsize=1))
    told = str(as_store_error(OSError(errno.ENOSPC, "No space"), "create", url=str(tmp_path), key="x"))
    assert "(no inode free: too many files)" in told


def test_a_local_store_can_do_what_its_traits_say(tmp_path):
    store = LocalStore(tmp_path / "root")
    renaming, folders = as_renaming(store), as_folders(store)
    assert renaming is folders is store
    store.put("a/old", b"moved")
    store.put("a/new", b"replaced")
    renaming.rename("a/old", "a/new")
    assert store.get("a/new") == b"moved"
    assert not exists(store, "a/old")
    assert (folders.is_there("a"), folders.is_there("c"), folders.is_link("a")) == (True, False, False)
    (tmp_path / "link").symlink_to(tmp_path / "root")
    assert LocalStore(tmp_path / "link").real_url() == store.real_url()
    assert LocalStore(tmp_path).link_target("link") == str(tmp_path / "root")
