"""A staging buffer: seen by another process by its name alone, there as long as anybody has it, and never in parts."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import pickle
import resource
import subprocess
import sys

import pytest

from ray_dcp.errors import ForkedProcessError
from ray_dcp.staging import shared_buffer as module
from ray_dcp.staging.buffer_errors import StagingLostError, StagingMemoryError
from ray_dcp.staging.shared_buffer import BufferName, SharedBuffer
from tests.staging.own_process import descriptors, in_fork

PAGE = mmap.PAGESIZE


@pytest.fixture(params=["memfd", "/dev/shm"])
def kind(request, monkeypatch):
    """Each kind of memory that a buffer may be of."""
    if request.param == "/dev/shm":
        monkeypatch.delattr(os, "memfd_create")


@pytest.mark.usefixtures("kind")
class TestAnyKind:
    def test_what_one_writes_the_other_reads(self):
        with SharedBuffer.create(3 * PAGE) as made, SharedBuffer.attach(made.name) as attached:
            made.memory[PAGE - 2 : PAGE + 3] = b"hello"
            assert attached.memory[PAGE - 2 : PAGE + 3] == b"hello"
            attached.memory[0] = 7
            assert made.memory[0] == 7
            assert made.nbytes == attached.nbytes == len(made.memory) == len(attached.memory) == 3 * PAGE
            assert made.name == attached.name

    def test_a_buffer_has_no_name_in_any_folder(self):
        before = set(os.listdir("/dev/shm"))
        with SharedBuffer.create(PAGE):
            assert not {name for name in set(os.listdir("/dev/shm")) - before if "staging" in name or "tmp" in name}

    def test_all_of_its_memory_is_there_when_it_is_made(self):
        with SharedBuffer.create(100 * PAGE) as made:
            assert os.stat(made.name.path).st_blocks * 512 == 101 * PAGE, "one is for its version"

    def test_no_descriptor_stays(self):
        before = descriptors()
        for _ in range(3):
            with SharedBuffer.create(PAGE) as made, SharedBuffer.attach(made.name):
                assert len(descriptors() - before) <= 4
        assert descriptors() == before

    def test_a_child_process_gets_no_descriptor(self):
        with SharedBuffer.create(PAGE) as made, SharedBuffer.attach(made.name):
            child = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)
            target = os.readlink(made.name.path)
            assert "ray_dcp" in target or "/dev/shm" in target
            assert "pipe:" in child.stdout
            assert target not in child.stdout

    def test_to_fault_in_changes_no_byte(self):
        with SharedBuffer.create(5 * PAGE) as made, SharedBuffer.attach(made.name) as attached:
            content = os.urandom(5 * PAGE)
            made.memory[:] = content
            attached.fault_in()
            assert attached.memory == content


def faults_of(work) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("option", [module._MADV_POPULATE_WRITE, 9999], ids=["populated", "an older kernel"])
def test_to_fault_in_has_all_pages_there(monkeypatch, option):
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", option)
    content = b"x" * (1000 * PAGE)

    def fill():
        made.memory[:] = content

    with SharedBuffer.create(1000 * PAGE) as made:
        made.fault_in()
        assert faults_of(fill) < 100
    with SharedBuffer.create(1000 * PAGE) as made:  # where the kernel does not map many pages at one fault
        assert faults_of(fill) >= 1000 // 16


def test_to_close_again_is_safe_and_harms_nobody():
    made = SharedBuffer.create(PAGE)
    made.close()
    with SharedBuffer.create(PAGE) as other:  # has the descriptor's number now
        made.close()
        other.memory[0] = 1
        assert os.fstat(int(other.name.path.rpartition("/")[2])).st_ino == other.name.inode


def test_a_buffer_that_nobody_has_any_more_is_closed():
    before = descriptors()
    made = SharedBuffer.create(PAGE)
    assert descriptors() != before
    del made
    assert descriptors() == before


def test_who_still_looks_at_a_part_keeps_it():
    before = descriptors()
    made = SharedBuffer.create(PAGE)
    part = made.memory[10:20]
    part[0] = 5
    made.close()
    assert part[0] == 5
    del part
    assert descriptors() == before


def test_what_is_to_be_undone_is_undone_once_and_first():
    made, undone = SharedBuffer.create(PAGE), []
    made.before_close(lambda: undone.append(made.memory[0]))
    made.close()
    made.close()
    assert undone == [0]


class TestLost:
    def test_a_closed_buffer(self):
        made = SharedBuffer.create(PAGE)
        made.close()
        with pytest.raises(StagingLostError, match="has closed it") as raised:
            SharedBuffer.attach(made.name)
        assert raised.value.path == made.name.path

    def test_a_process_that_has_ended(self):
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        with pytest.raises(StagingLostError, match="has ended"):
            SharedBuffer.attach(BufferName(f"/proc/{child.pid}/fd/3", 1, 1, PAGE))

    @pytest.mark.parametrize(
        "wrong", [{"inode": 1}, {"device": -1}, {"nbytes": PAGE + 1}], ids=lambda wrong: next(iter(wrong))
    )
    def test_other_memory_under_the_same_number(self, wrong):
        before = descriptors()
        with SharedBuffer.create(PAGE) as made, pytest.raises(StagingLostError, match="another file"):
            SharedBuffer.attach(dataclasses.replace(made.name, **wrong))
        assert descriptors() == before

    def test_what_else_has_the_number_now_is_not_opened(self, monkeypatch):
        with SharedBuffer.create(PAGE) as made:
            monkeypatch.setattr(os, "open", None)
            with pytest.raises(StagingLostError, match="another file"):
                SharedBuffer.attach(dataclasses.replace(made.name, inode=1))
            monkeypatch.undo()

    def test_a_pipe_under_the_same_number(self):
        reads, writes = os.pipe()
        status = os.fstat(reads)
        with pytest.raises(StagingLostError, match="another file"):
            SharedBuffer.attach(BufferName(f"/proc/self/fd/{reads}", status.st_dev, status.st_ino, 0))
        os.close(reads)
        os.close(writes)


class TestNoMemory:
    def test_more_than_there_is(self):
        before = descriptors()
        with pytest.raises(StagingMemoryError, match="would not fit") as raised:
            SharedBuffer.create(1 << 50)
        assert raised.value.nbytes == 1 << 50
        assert 0 < raised.value.available_nbytes < 1 << 50
        assert descriptors() == before

    @pytest.mark.usefixtures("kind")
    def test_less_than_was_found_free(self):
        """The kernel refuses in the middle of it: nothing of it stays."""

        def work():
            before = descriptors()
            resource.setrlimit(resource.RLIMIT_FSIZE, (module._STEP_NBYTES + PAGE, resource.RLIM_INFINITY))
            with pytest.raises(StagingMemoryError, match=os.strerror(errno.EFBIG)):
                SharedBuffer.create(module._STEP_NBYTES + 2 * PAGE)
            assert descriptors() == before

        assert in_fork(work) == 0

    @pytest.mark.usefixtures("kind")
    def test_no_room_in_the_address_space(self):
        def work():
            before = descriptors()
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * PAGE
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
            with pytest.raises(StagingMemoryError, match=os.strerror(errno.ENOMEM)):
                SharedBuffer.create(64 << 20)
            assert descriptors() == before

        assert in_fork(work) == 0

    def test_a_full_shared_memory_file_system(self, tmp_path, monkeypatch):
        folder = tmp_path / "small"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("may not mount a file system")
        try:
            temporary = module.tempfile.TemporaryFile
            monkeypatch.delattr(os, "memfd_create")
            monkeypatch.setattr(module.tempfile, "TemporaryFile", lambda dir, **how: temporary(dir=folder, **how))
            SharedBuffer.create(1 << 19).close()
            with pytest.raises(StagingMemoryError, match="No space left"):
                SharedBuffer.create(2 << 20)
            assert os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize == 1 << 20
        finally:
            subprocess.run(["umount", folder], check=True)


class TestOtherProcesses:
    def test_a_fork_is_refused_and_does_no_harm(self):
        with SharedBuffer.create(PAGE) as made:
            undone = []
            made.before_close(lambda: undone.append(1))

            def work():
                with pytest.raises(ForkedProcessError):
                    made.memory  # noqa: B018
                with pytest.raises(ForkedProcessError):
                    made.fault_in()
                made.close()
                assert not undone

            assert in_fork(work) == 0
            made.memory[0] = 3
            with SharedBuffer.attach(made.name) as attached:
                assert attached.memory[0] == 3

    def test_a_buffer_outlives_the_process_that_made_it(self):
        made_there = (
            "import pickle, sys\n"
            "from ray_dcp.staging.shared_buffer import SharedBuffer\n"
            "buffer = SharedBuffer.create(40960)\n"
            "buffer.memory[:] = bytes(range(256)) * 160\n"
            "sys.stdout.buffer.write(pickle.dumps(buffer.name))\n"
            "sys.stdout.flush()\n"
            "sys.stdin.read()\n"
        )
        child = subprocess.Popen([sys.executable, "-c", made_there], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        name = pickle.load(child.stdout)
        with SharedBuffer.attach(name) as attached:
            child.kill()
            child.wait()
            assert attached.memory == bytes(range(256)) * 160
            with pytest.raises(StagingLostError):
                SharedBuffer.attach(name)
        child.stdin.close()
        child.stdout.close()
