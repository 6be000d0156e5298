"""Room for a file and its way to the disk: a full disk is found first, and no error is lost on the way."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.errors import StoreError
from ray_dcp.maintenance.checkpoint_copy import copy_checkpoint, plan_copy
from ray_dcp.store import durable
from ray_dcp.store.durable import Writeback, preallocate, write_fully
from ray_dcp.store.local import LocalStore
from ray_dcp.store.store import Preallocates

MIB = 1 << 20


@pytest.fixture
def mount(tmp_path):
    """Mounts a filesystem of a kind; skips where this user may not."""
    mounted: list[Path] = []

    def mount(kind: str, options: str = "") -> Path:
        place = tmp_path / f"mounted{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", kind, *(["-o", options] if options else []), "none", str(place)]
        try:
            ran = subprocess.run(command, capture_output=True, timeout=30)
        except FileNotFoundError:
            pytest.skip("no mount here")
        if ran.returncode:
            pytest.skip("only root may mount")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True, timeout=30)


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def room_of(path: Path) -> int:
    return path.stat().st_blocks * 512


def files_in(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def reserving(number: int, *, times: int = 1 << 30):
    """In place of the C library's fallocate: fails so many times."""
    left = times

    def reserve(*_):
        nonlocal left
        if not left:
            return 0
        left -= 1
        ctypes.set_errno(number)
        return -1

    return reserve


def test_room_is_reserved_and_the_size_stays_as_it_is(file, tmp_path):
    preallocate(file, 3 * MIB)
    assert os.fstat(file).st_size == 0
    if room_of(tmp_path / "file") == 0:
        pytest.skip("this filesystem reserves nothing")
    assert room_of(tmp_path / "file") >= 3 * MIB


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_need_no_room(file, nbytes):
    preallocate(file, nbytes)
    assert os.fstat(file).st_blocks == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_means_that_there_is_no_room_is_raised(file, monkeypatch, number):
    monkeypatch.setattr(durable, "_libc_call", lambda *_: reserving(number))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        preallocate(file, MIB)
    assert caught.value.errno == number


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_a_filesystem_that_cannot_reserve_is_written_to_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(durable, "_libc_call", lambda *_: reserving(number))
    assert saved_and_loaded(tmp_path)


def test_a_c_library_without_these_calls_is_no_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_libc_call", lambda *_: None)
    assert saved_and_loaded(tmp_path)


def test_a_signal_in_between_is_no_reason_to_give_up(file, monkeypatch):
    monkeypatch.setattr(durable, "_libc_call", lambda *_: reserving(errno.EINTR, times=3))
    preallocate(file, MIB)


def saved_and_loaded(place) -> bool:
    tensor = torch.arange(5 * MIB // 4 + 3, dtype=torch.int32)
    dcp.save({"w": tensor, "x": [1]}, checkpoint_id=place / "c", no_dist=True)
    template = {"w": torch.zeros_like(tensor), "x": None}
    dcp.load(template, checkpoint_id=place / "c", no_dist=True)
    return torch.equal(template["w"], tensor) and template["x"] == [1]


def test_ramfs_which_cannot_reserve_is_written_to(mount):
    assert saved_and_loaded(mount("ramfs"))


def test_a_full_disk_fails_a_save_before_a_byte_of_it_is_written(mount, monkeypatch):
    place = mount("tmpfs", "size=3m")
    monkeypatch.setattr(os, "write", lambda *_: pytest.fail("written"))
    with pytest.raises(dcp.CheckpointException, match="No space left on device") as caught:
        dcp.save({"w": torch.ones(MIB)}, checkpoint_id=place / "c", no_dist=True)
    monkeypatch.undo()
    assert isinstance(caught.value.__cause__, StoreError)
    assert files_in(place) == []
    assert saved_and_loaded(mount("tmpfs", "size=8m"))


def test_a_disk_that_fills_up_while_a_file_is_written_fails_the_save(mount, monkeypatch):
    """Where nothing can be reserved, the write itself tells."""
    place = mount("tmpfs", "size=3m")
    monkeypatch.setattr(durable, "_libc_call", lambda *_: None)
    with pytest.raises(dcp.CheckpointException, match="No space left on device"):
        dcp.save({"w": torch.ones(MIB)}, checkpoint_id=place / "c", no_dist=True)
    assert files_in(place) == []


def test_a_limit_on_the_size_of_files_fails_a_save_before_a_byte_of_it_is_written(tmp_path):
    """As a quota does; and needs no root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(dcp.CheckpointException, match="File too large") as caught:
            dcp.save({"w": torch.ones(MIB)}, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, StoreError)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("kind", ["here", "tmpfs"])
@pytest.mark.parametrize("nbytes", [0, 100, MIB + 1])
def test_room_that_was_not_needed_is_given_back(tmp_path, mount, kind, nbytes):
    place = mount("tmpfs", "size=32m") if kind == "tmpfs" else tmp_path
    with LocalStore(place).put_new("file") as writer:
        assert isinstance(writer, Preallocates)
        writer.preallocate(9 * MIB)
        writer.write(bytes(nbytes))
    assert (place / "file").stat().st_size == nbytes
    assert room_of(place / "file") <= nbytes + (256 << 10)


def test_more_than_was_reserved_can_be_written(tmp_path):
    with LocalStore(tmp_path).put_new("file") as writer:
        writer.preallocate(100)
        writer.write(b"x" * MIB)
    assert (tmp_path / "file").read_bytes() == b"x" * MIB


def test_the_disk_is_given_all_that_is_written_piece_after_piece(file, monkeypatch):
    asked = []
    monkeypatch.setattr(durable, "_libc_call", lambda *_: lambda *args: asked.append(args) or 0)
    writeback, position = Writeback(file), 0
    for nbytes in (1, 7 * MIB, 3 * MIB, 20 * MIB, 0, 5 * MIB, 8 * MIB):
        position += nbytes
        writeback.written_up_to(position)
    assert [(begin, begin + nbytes) for _, begin, nbytes, _ in asked] == [
        (0, 10 * MIB + 1),
        (10 * MIB + 1, 30 * MIB + 1),
        (30 * MIB + 1, 43 * MIB + 1),
    ]
    assert {args[0] for args in asked} == {file}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESPIPE, errno.EINVAL])
def test_a_hint_that_fails_does_not_fail_the_write(tmp_path, monkeypatch, number):
    monkeypatch.setattr(
        durable, "_libc_call", lambda name, *_: reserving(number) if name == "sync_file_range" else None
    )
    with LocalStore(tmp_path).put_new("file") as writer:
        writer.write(bytes(20 * MIB))
    assert (tmp_path / "file").stat().st_size == 20 * MIB


def test_what_went_wrong_after_a_hint_is_told_by_fsync(tmp_path, monkeypatch):
    """A disk that fails behind the hint is a failed write, and its file is no object."""
    real = os.fsync

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("file"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError, match="make durable"), store.put_new("file") as writer:
        writer.write(bytes(20 * MIB))
    assert store.list() == []


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(file, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(OSError, match="takes no more bytes"):
        write_fully(file, b"abc")


def test_short_writes_are_gone_on_with(file, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, chunk: real(descriptor, chunk[:7]))
    content = os.urandom(1000)
    assert write_fully(file, content) == 1000
    assert os.pread(file, 2000, 0) == content


def test_a_wider_buffer_is_written_byte_for_byte(file):
    array = memoryview(bytearray(range(64))).cast("d")
    assert write_fully(file, array) == 64
    assert os.pread(file, 100, 0) == bytes(range(64))


@pytest.mark.parametrize("place", ["/proc/ray_dcp", "/proc/ray_dcp/a/b", "/proc/self/ray_dcp/c"])
def test_a_place_where_no_folder_can_be_made_although_the_one_above_is_there_is_one_error(place, tmp_path):
    with pytest.raises(FileNotFoundError):
        durable.make_folder(place)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"w": torch.ones(1)}, checkpoint_id=place, no_dist=True)
    assert isinstance(caught.value.__cause__, StoreError)
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(StoreError):
        copy_checkpoint(plan_copy(tmp_path / "c", place))


def test_a_folder_above_that_is_taken_away_meanwhile_is_made_again(tmp_path, monkeypatch):
    above, mkdir = tmp_path / "a", os.mkdir
    taken = iter([True, True, False])

    def take_away(folder):
        if folder == str(above / "b") and above.is_dir() and next(taken):
            above.rmdir()
        mkdir(folder)

    monkeypatch.setattr(os, "mkdir", take_away)
    assert durable.make_folder(str(above / "b"))
    assert (above / "b").is_dir()
