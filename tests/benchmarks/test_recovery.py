"""The parts of the recovery benchmark that make figures of what was noted."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch):
    """Import a module of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"recovery_parts.{name}")


def old_group(event, *, at):
    """Two ranks of which both have done 42 steps."""
    return [
        happened
        for rank, pid in ((0, 100), (1, 101))
        for happened in (
            event("training", at, pid, rank=rank, world_size=2, process_started=at - 5),
            event("loaded", at + 1, pid, rank=rank, world_size=2, step=0),
            event("step", at + 5, pid, rank=rank, world_size=2, step=42),
        )
    ]


def new_group(event, *, at, pids, step, started):
    """Marks of each rank are a tenth of a second after those of the one before it."""
    size = len(pids)
    return [
        happened
        for rank, pid in enumerate(pids)
        for happened in (
            event("training", at + 0.1 * rank, pid, rank=rank, world_size=size, process_started=started),
            event("built", at + 1 + 0.1 * rank, pid, rank=rank, world_size=size),
            event("loaded", at + 3 + 0.1 * rank, pid, rank=rank, world_size=size, step=step),
            event("step", at + 3.5 + 0.1 * rank, pid, rank=rank, world_size=size, step=step + 1),
        )
    ]


def controller(event, *, decided, shutdown, start):
    return [
        event("decided", decided, 7),
        event("shutdown begun", decided + 0.25, 7),
        event("shutdown done", shutdown, 7),
        event("group start", start, 7, num_workers=2),
    ]


def in_order(events):
    return sorted(events, key=lambda event: event.at)


def maker(part):
    make = part("events").Event
    return lambda kind, at, pid, **facts: make(kind, at, pid, facts)


def test_every_second_of_a_recovery_belongs_to_one_part(part):
    event = maker(part)
    recovery = part("timeline").recovery_of(
        in_order(
            [
                *old_group(event, at=0),
                event("killed", 10, 1),
                event("survivor error", 10.05, 100, rank=0),
                *controller(event, decided=12, shutdown=13, start=13.5),
                *new_group(event, at=20, pids=[200, 201], step=40, started=15),
            ]
        )
    )
    assert recovery.errors_s == pytest.approx(0.05)
    assert recovery.steps_repeated == 2
    assert recovery.num_workers == 2
    assert recovery.step_s == pytest.approx(13.6)
    assert sum(recovery.parts.values()) == pytest.approx(recovery.step_s)
    assert recovery.parts == pytest.approx(
        {
            "detection": 2,
            "decision": 0.25,
            "shutdown": 0.75,
            "placement": 2,
            "imports": 5.1,
            "build": 1,
            "load": 2,
            "first step": 0.5,
        }
    )


def test_a_process_that_was_there_before_waits_for_no_placement(part):
    event = maker(part)
    recovery = part("timeline").recovery_of(
        in_order(
            [
                *old_group(event, at=0),
                event("killed", 10, 1),
                *controller(event, decided=10.2, shutdown=11, start=11),
                *new_group(event, at=12, pids=[200], step=40, started=4),
            ]
        )
    )
    assert recovery.errors_s is None
    assert recovery.parts["placement"] == 0
    assert recovery.parts["imports"] == pytest.approx(1)


def test_a_group_that_came_to_no_step_counts_as_time_that_was_lost(part):
    event = maker(part)
    failed = [
        happened
        for happened in new_group(event, at=20, pids=[200, 201], step=40, started=15)
        if happened.kind != "step"
    ]
    recovery = part("timeline").recovery_of(
        in_order(
            [
                *old_group(event, at=0),
                event("killed", 10, 1),
                *controller(event, decided=12, shutdown=13, start=13.5),
                *failed,
                *controller(event, decided=30, shutdown=31, start=31),
                *new_group(event, at=40, pids=[300], step=20, started=35),
            ]
        )
    )
    assert recovery.num_workers == 1
    assert recovery.steps_repeated == 22
    assert recovery.parts["placement"] == pytest.approx(35 - 13)
    assert recovery.parts["load"] == pytest.approx(2)


@pytest.mark.parametrize("missing", ["killed", "decided", "shutdown done", "loaded", "step"])
def test_what_was_not_noted_is_named(part, missing):
    event = maker(part)
    events = [
        *old_group(event, at=0),
        event("killed", 10, 1),
        *controller(event, decided=12, shutdown=13, start=13.5),
        *new_group(event, at=20, pids=[200, 201], step=40, started=15),
    ]
    left = in_order(happened for happened in events if happened.kind != missing or happened.at < 10)
    with pytest.raises(part("timeline").IncompleteError, match=missing):
        part("timeline").recovery_of(left)


def test_events_of_all_processes_are_read_in_order_and_half_a_line_is_left_for_later(part, tmp_path):
    events = part("events")
    events.note(str(tmp_path), "step", at=5.0, rank=0)
    events.note(str(tmp_path), "killed")
    (tmp_path / "17.jsonl").write_text('["step", 4.0, {"rank": 1}]\n["step", 4.5, {"ra')
    first, second, third = events.read_events(str(tmp_path))
    assert (first.pid, first.at, first.facts) == (17, 4.0, {"rank": 1})
    assert (second.pid, second.kind) == (os.getpid(), "step")
    assert third.kind == "killed"


def test_a_process_knows_when_it_was_started(part):
    events = part("events")
    command = "import time; from recovery_parts.events import process_started_at as at; print(at(), time.monotonic())"
    shown = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=BENCHMARKS
    ).stdout.split()
    started, asked = map(float, shown)
    assert events.process_started_at() < started <= asked < started + 60


def test_both_sides_take_turns_in_going_first(part):
    runs = list(part("rounds").runs_in_order(["torch", "ray_dcp"], ["rank"], 3, settle_s=1.0, timeout_s=2.0))
    assert [(run.side, run.number) for run in runs] == [
        ("torch", 0),
        ("ray_dcp", 0),
        ("ray_dcp", 1),
        ("torch", 1),
        ("torch", 2),
        ("ray_dcp", 2),
    ]


def test_the_verdict_is_by_medians_against_the_target(part):
    timeline, tables = part("timeline"), part("tables")

    def summary(*seconds):
        return timeline.Summary([timeline.Recovery(0.1, step_s, 3, 2, {"load": step_s}) for step_s in seconds])

    met = tables.verdict("node", summary(4, 5, 100), summary(60, 70, 71))
    assert "0.07" in met
    assert "[green]met" in met
    assert "not met" in tables.verdict("rank", summary(9), summary(10))
    assert summary(1, 2, 3).median_part_s("load") == 2
    assert summary(1, 2, 3).share_of("load") == 1


def test_memory_is_held_against_each_storage_by_medians(part):
    fetched, tables = part("fetched"), part("tables")
    seconds = {fetched.MEMORY: (0.1, 0.2, 9.0), fetched.STORAGE: (0.3, 0.2, 0.1), fetched.COLD: (0.3, 0.4, 5.0)}
    fetches = [fetched.Fetch(source, one) for source, of_source in seconds.items() for one in of_source]
    lines = tables.fetch_lines(fetches, 2**30, in_bucket=False).splitlines()
    assert lines[0].endswith("1024 MiB on two ranks, medians")
    assert lines[1] == "from memory: 0.20 s"
    assert lines[2].endswith("memory is [bold]1.00[/] times as fast, target: 1.5: [red]not met[/]")
    assert lines[3].endswith("memory is [bold]2.00[/] times as fast, target: 1.5: [green]met[/]")
    lost_node = tables.fetch_lines(fetches, 2**30, in_bucket=False, victim="node")
    assert "SIGKILL of one node" in lost_node
    assert "target" not in lost_node, "all nodes are one machine"
    bucket = tables.fetch_lines(fetches[:6], 2**30, in_bucket=True).splitlines()
    assert bucket[2].endswith("target: 5: [red]not met[/]")
    assert len(bucket) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--runs", "0"], "--runs must be at least 1"), (["--store", "s3://b/x"], "--store is for --fetch")],
)
def test_wrong_options_are_refused_before_anything_starts(options, message):
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "recovery.py"), *options], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert message in ended.stderr
