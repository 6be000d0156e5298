"""A process alone whose asynchronous saves a child of it writes: whatever becomes of either."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.protocol.child import process_link
from ray_dcp.protocol.child.child_messages import (
    Hello,
    JobOver,
    Knock,
    KnockHeard,
    TakeJob,
    Taken,
    WriteFailed,
    Written,
)
from ray_dcp.protocol.child.writer_process import ChildWriter
from ray_dcp.protocol.deputy import HandedOver
from ray_dcp.protocol.node_agent import DeputyJob, FileJob, StagedPart
from ray_dcp.protocol.solo import SoloGroup
from ray_dcp.staging.sealing import OpenEnds
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.staging.write_rate import WriteRate
from tests.slack import within

ROWS = 3_000_000
"""So many that a file is several blocks."""


@pytest.fixture
def alone(monkeypatch):
    """A group of this process alone, with a child of its own, in place of the one that there is."""
    group = SoloGroup()
    monkeypatch.setattr("ray_dcp.api.alone", group)
    yield group
    child = group.writer_process._child
    if child is not None:
        child.end()
        assert child.is_dead


def state_of(value):
    return {"w": torch.arange(ROWS) + value, "n": [value], "s": torch.tensor(float(value))}


def require_saved(place, value):
    template = {"w": torch.zeros(ROWS, dtype=torch.int64), "n": None, "s": torch.tensor(torch.nan)}
    dcp.load(template, checkpoint_id=place, no_dist=True)
    assert torch.equal(template["w"], torch.arange(ROWS) + value)
    assert (template["n"], template["s"].item()) == ([value], float(value))


def started(group):
    """The group's child, which is up when this returns."""
    child = group.writer_process._started()
    assert child.is_up(within(20))
    return child


def pid_of(child):
    lines = Path(f"/proc/self/fdinfo/{child._alive}").read_text().splitlines()
    return next(int(line[4:]) for line in lines if line.startswith("Pid:"))


def until(there, what):
    for _ in range(int(within(600))):
        if there():
            return
        time.sleep(0.05)
    raise AssertionError(what)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


KILLED = """
import os, signal, sys, torch
import ray_dcp as dcp
place, how = sys.argv[1:]
state = {"w": torch.arange(3_000_000) + 1, "n": [1], "s": torch.tensor(1.0)}
dcp.async_save(state, checkpoint_id=place + "/before").result()
child = dcp.api.alone.writer_process._child
assert child.is_up(60)
for value, name in ((2, "first"), (3, "now")):
    state["w"] += 1
    state["n"][0] = value
    state["s"] += 1
    dcp.async_save(state, checkpoint_id=place + "/" + name)
state["w"].zero_()
print(open(f"/proc/self/fdinfo/{child._alive}").read())
sys.stdout.flush()
if how == "exit":
    os._exit(7)
os.kill(os.getpid(), getattr(signal, how))
"""


@pytest.mark.parametrize(
    "how", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.soak), pytest.param("exit", marks=pytest.mark.soak)]
)
def test_a_process_that_is_killed_when_the_call_has_returned_loses_nothing(how, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), how], capture_output=True, text=True, timeout=within(120)
    )
    assert ended.returncode == (7 if how == "exit" else -getattr(signal, how)), ended.stderr
    pid = next(int(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("Pid:"))
    until(lambda: is_gone(pid), "the child ends when it has nothing left to do")
    require_saved(tmp_path / "before", 1)
    require_saved(tmp_path / "first", 2)
    require_saved(tmp_path / "now", 3)
    assert f"the process that saved {tmp_path}/now is gone; its save is committed" in ended.stderr
    committed = [(tmp_path / name / ".metadata").stat().st_mtime_ns for name in ("before", "first", "now")]
    assert committed == sorted(committed)


def test_a_save_is_written_by_a_child_that_has_no_torch_and_is_nobodys_to_wait_for(alone, tmp_path):
    child = started(alone)
    for value in (1, 2):
        state = state_of(value)
        response = dcp.async_save(state, checkpoint_id=tmp_path / f"{value}", no_dist=True)
        state["w"].zero_()
        response.result(within(60))
        require_saved(tmp_path / f"{value}", value)
    assert alone.writer_process._child is child
    pid = pid_of(child)
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert "memfd:" not in Path(f"/proc/{pid}/maps").read_text(), "what is over is let go of"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_save_is_written_by_the_process_when_its_child_is_killed_or_frozen(how, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(process_link, "_FROZEN_S", 0.5)
    child = started(alone)
    signal.pidfd_send_signal(child._alive, signal.SIGSTOP)  # before it can have written
    taken, ask = [], type(child).ask

    def take_at_once(self, message, number):
        self.send(message)
        taken.append(number)
        return Taken(number)

    monkeypatch.setattr(type(child), "ask", take_at_once)
    response = dcp.async_save(state_of(3), checkpoint_id=tmp_path / "c", no_dist=True)
    assert taken == [0]
    if how == signal.SIGKILL:
        signal.pidfd_send_signal(child._alive, how)
    response.result(within(60))
    require_saved(tmp_path / "c", 3)
    assert child.is_dead
    monkeypatch.setattr(type(child), "ask", ask)
    another = started(alone)
    dcp.async_save(state_of(4), checkpoint_id=tmp_path / "c", no_dist=True).result(within(60))
    require_saved(tmp_path / "c", 4)
    assert alone.writer_process._child is another is not child


def test_a_child_that_takes_nothing_more_does_not_hold_up_the_caller(alone, tmp_path, monkeypatch, caplog):
    child = started(alone)
    monkeypatch.setattr(process_link, "_TAKES_IN_S", 0.2)
    signal.pidfd_send_signal(child._alive, signal.SIGSTOP)
    dcp.async_save(state_of(5), checkpoint_id=tmp_path / "c", no_dist=True).result(within(60))
    require_saved(tmp_path / "c", 5)
    assert child.is_dead
    told = [record.getMessage() for record in caplog.records if "asynchronous saves" in record.getMessage()]
    assert told == [
        "the process that writes asynchronous saves does not answer; a thread of this one writes, and the end of this "
        "process would lose the save"
    ]


def test_what_the_store_says_to_the_child_is_raised_and_nothing_is_committed(alone, tmp_path):
    child = started(alone)
    pid = pid_of(child)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**20, 2**20))
    response = dcp.async_save(state_of(6), checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointException, match=r"phase 'write'.*File too large") as raised:
        response.result(within(60))
    assert isinstance(raised.value, OSError)
    assert not (tmp_path / "c" / ".metadata").exists()
    assert [path.name for path in tmp_path.rglob("*.distcp")] == []


def test_memory_of_the_process_is_written_by_the_process(alone, caplog):
    state = {"w": torch.ones(3)}
    dcp.async_save(state, checkpoint_id="memory://writer-process-test/c", no_dist=True).result(within(60))
    assert alone.writer_process._child is None
    assert caplog.records == []


def test_agents_turned_off_are_no_child_either(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_DCP_AGENTS", "0")
    dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True).result(within(60))
    assert alone.writer_process._child is None


@pytest.mark.parametrize(
    ("python", "why"),
    [
        (None, "cannot be started: nobody knows which program is Python's interpreter here"),
        ("/bin/not-there", "cannot be started: "),
        ("/bin/false", "has ended as soon as it was started"),
    ],
)
def test_where_python_cannot_be_started_again_a_thread_writes(python, why, alone, tmp_path, monkeypatch, caplog):
    started = []

    def start(command, **options):
        started.append(command[0])
        return popen(command, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(process_link, "get_executable", lambda: python)
    for value in (1, 2):
        dcp.async_save(state_of(value), checkpoint_id=tmp_path / "c", no_dist=True).result(within(60))
    require_saved(tmp_path / "c", 2)
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert why in told.getMessage()
    assert started == ([python] if python else []), "it is tried once"


def test_a_program_that_is_frozen_is_not_started_once_more(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c", no_dist=True).result(within(60))
    require_saved(tmp_path / "c", 1)


def test_an_empty_state_needs_no_file(alone, tmp_path):
    started(alone)
    dcp.async_save({"n": {}}, checkpoint_id=tmp_path / "c", no_dist=True).result(within(60))
    found = {}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert (tmp_path / "c" / ".metadata").exists()


# What the child does, in this process.


def job_of(place, buffer):
    file = FileJob(
        buffer.name, buffer.version, buffer.nbytes, OpenEnds(array("I"), array("I"), ()), str(place), "shard", False
    )
    return DeputyJob(HandedOver(b"", 0, ()), StagedPart(b"prepared", file))


@pytest.fixture
def buffer():
    made = SharedBuffer.create(2**20)
    made.memory[:] = b"x" * made.nbytes
    yield made
    made.close()


def test_the_child_says_what_it_has_taken_and_written(tmp_path, buffer):
    told = []
    writer = ChildWriter(told.append)
    writer.hear(Knock())
    writer.hear(TakeJob(1, job_of(tmp_path / "c", buffer)))
    until(lambda: len(told) == 3, told)
    assert told[0] == KnockHeard()
    assert Taken(1) in told
    assert [type(one) for one in told].count(Written) == 1
    assert (tmp_path / "c" / "shard").read_bytes() == bytes(buffer.memory)
    writer.hear(JobOver(1))
    writer.finish()  # nothing is left, so nothing is committed
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["shard"]


def test_the_child_writes_no_faster_than_it_is_told(tmp_path, buffer, monkeypatch):
    spent, told = [], []
    monkeypatch.setattr(WriteRate, "spend", lambda self, nbytes, per_s: spent.append((nbytes, per_s)))
    writer = ChildWriter(told.append)
    slow = replace(job_of(tmp_path / "c", buffer), variables={"RAY_DCP_AGENT_WRITE_RATE": "2e6"})
    writer.hear(TakeJob(1, slow))
    until(lambda: len(told) == 2, told)
    assert sum(nbytes for nbytes, _ in spent) == buffer.nbytes
    assert {per_s for _, per_s in spent} == {2e6}
    writer.hear(TakeJob(2, replace(slow, variables={"RAY_DCP_AGENT_WRITE_RATE": "fast"})))
    assert "RAY_DCP_AGENT_WRITE_RATE" in told[2].why_not


def test_the_child_refuses_what_it_cannot_open(tmp_path, buffer):
    told = []
    writer = ChildWriter(told.append)
    writer.hear(TakeJob(1, job_of("unheard-of://place", buffer)))
    job = job_of(tmp_path, buffer)
    buffer.close()
    writer.hear(TakeJob(2, job))
    assert [one.number for one in told] == [1, 2]
    assert "unheard-of" in told[0].why_not
    assert told[1].why_not


def test_an_error_that_cannot_be_read_again_arrives_as_what_it_says(tmp_path, buffer, monkeypatch):
    class Local(Exception):
        pass

    def refuse(*arguments):
        raise Local("the disk is on fire")

    monkeypatch.setattr("ray_dcp.protocol.child.writer_process.write_sealed", refuse)
    told = []
    ChildWriter(told.append).hear(TakeJob(1, job_of(tmp_path, buffer)))
    until(lambda: len(told) == 2, told)
    (failed,) = [one for one in told if isinstance(one, WriteFailed)]
    assert str(pickle.loads(failed.error)) == "Local: the disk is on fire"
    assert "refuse" in failed.traced


def test_what_is_said_survives_the_way():
    for message in (Hello(1), Taken(1, "no"), Written(2, b"crcs"), WriteFailed(3, b"", "t"), JobOver(4), Knock()):
        assert pickle.loads(pickle.dumps(message)) == message
