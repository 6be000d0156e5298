"""``CheckpointManager.due``: all ranks save at the same steps, whatever each has measured, at no exchange more."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.catalog.facts import describe
from ray_dcp.cluster import current
from ray_dcp.errors import ConfigError
from ray_dcp.format.manifest import decode_manifest, encode_manifest
from ray_dcp.pace.interval import Figures, Interval
from ray_dcp.pace.pacer import Pacer
from ray_dcp.settings import PaceSettings
from ray_dcp.write import writer
from tests import ranks as tests_ranks
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors


class Clock:
    """Stands still but for what a test says."""

    def __init__(self, at=0.0):
        self.at = at

    def __call__(self):
        return self.at


class Takes:
    """A value in which a save is busy for a time, by the clock of its manager."""

    def __init__(self, manager, seconds):
        self._clock, self._seconds = manager._pacer._clock, seconds

    def state_dict(self):
        self._clock.at += self._seconds
        return {}

    def load_state_dict(self, state_dict):
        raise AssertionError("nothing loads it")


def managers_of(ranks, root, **options):
    """A manager for each rank, whose clocks differ."""
    managers = [
        dcp.CheckpointManager(root, group=ThreadGroup(ranks, rank), **options) for rank in range(ranks.world_size)
    ]
    for rank, manager in enumerate(managers):
        manager._pacer = Pacer(manager._pacer._settings, Clock(1e5 * rank))
    return managers


def train(manager, steps, *, first=1, step_s=1.0, stall_s=2.0, asynchronous=False):
    """Steps that take ``step_s`` by the manager's clock, saves ``stall_s``; returns the steps that it has saved."""
    saved = []
    for step in range(first, first + steps):
        manager._pacer._clock.at += step_s
        if manager.due(step):
            saved.append(step)
            save = manager.async_save if asynchronous else manager.save
            save(step, {"w": torch.full((4,), float(step)), "takes": Takes(manager, stall_s)})
    manager.wait()
    return saved


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "in the background"])
def test_ranks_with_other_clocks_and_costs_save_at_the_same_steps(tmp_path, asynchronous):
    ranks = ThreadRanks(3)
    managers = managers_of(ranks, tmp_path, mtbf_s=100_000.0)

    def on_rank(rank):
        return train(managers[rank], 1500, step_s=1.0 + rank, stall_s=4.0 - rank, asynchronous=asynchronous)

    saved = require_no_errors(ranks.run(on_rank))
    assert saved[0] == saved[1] == saved[2]
    assert saved[0][:2] == [1 + 10, 11 + 100]  # 300 s of the slowest rank's steps
    if not asynchronous:  # how long the drains take is real
        # sqrt(2 * 4 s * 100000 s) = 894 s
        assert saved[0][2:] == [111 + 299 * number for number in range(1, 5)]
    assert len(saved[0]) > 4
    intervals = [manager._pacer.interval for manager in managers]
    assert intervals == [intervals[0]] * 3
    assert "at 3 s a step" in intervals[0].why
    assert [info.step for info in managers[0].list()] == saved[0]


def count_messages(monkeypatch):
    sent = []
    send = tests_ranks._ThreadLink.send

    def counted(link, phase, message):
        sent.append((link._rank, str(phase)))
        return send(link, phase, message)

    monkeypatch.setattr(tests_ranks._ThreadLink, "send", counted)
    return sent


def test_asking_sends_nothing_and_a_save_no_more_than_it_did(tmp_path, monkeypatch):
    sent = count_messages(monkeypatch)
    ranks = ThreadRanks(2)
    managers = managers_of(ranks, tmp_path)
    assert require_no_errors(ranks.run(lambda rank: train(managers[rank], 10))) == [[], []]
    assert sent == []
    assert require_no_errors(ranks.run(lambda rank: train(managers[rank], 100, first=11))) == [[11], [11]]
    assert sorted(sent) == [(0, "plan"), (0, "write"), (1, "plan"), (1, "write")]


def test_asking_runs_nothing_but_arithmetic_and_wakes_no_thread(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    manager.due(0)
    manager.save(1, {"w": torch.ones(4)})
    threads, called = set(threading.enumerate()), set()

    def note(frame, event, argument):
        if event == "call":
            called.add(frame.f_globals["__name__"])
        elif event == "c_call":
            called.add(f"C: {argument.__module__ or type(argument.__self__).__module__}")

    sys.setprofile(note)
    try:
        for step in range(2, 9):
            manager.due(step)
    finally:
        sys.setprofile(None)
    assert set(threading.enumerate()) == threads
    allowed = {"ray_dcp.manager", "ray_dcp.pace.pacer", "ray_dcp.format.names", "ray_dcp.cluster.current"}
    # the clock, the tests of a step's type, and the variable of `with group:`
    allowed |= {"C: builtins", "C: time", "C: _operator", "C: _contextvars", "C: sys", "dataclasses", "<string>"}
    assert called - allowed == set()
    assert "ray_dcp.pace.pacer" in called


def test_only_one_rank_may_ask_and_tell_the_others(tmp_path):
    ranks = ThreadRanks(2)
    managers = managers_of(ranks, tmp_path)
    told = [threading.Event() for _ in range(45)]
    answers = [False] * 45

    def on_rank(rank):
        for step in range(45):
            if rank == 0:
                managers[0]._pacer._clock.at += 10.0
                answers[step] = bool(managers[0].due(step))
                told[step].set()
            assert told[step].wait(60)
            if answers[step]:
                managers[rank].save(step, {"w": torch.ones(4)})  # in no time at all

    require_no_errors(ranks.run(on_rank))
    assert [step for step in range(45) if answers[step]][:4] == [10, 40, 41, 42]


def test_the_interval_is_logged_where_it_changes_by_rank_0_alone(tmp_path, caplog):
    ranks = ThreadRanks(2)
    managers = managers_of(ranks, tmp_path, mtbf_s=10_000.0)
    with caplog.at_level(logging.INFO, logger="ray_dcp"):
        require_no_errors(ranks.run(lambda rank: train(managers[rank], 340)))
    told = [record.message for record in caplog.records if record.message.startswith("save every")]
    assert len(told) == 2, told
    assert "save every 300 steps (5 min at 1 s a step): what a save costs is known only after the first" in told[0]
    assert told[1] == managers[0].due(340).interval.why


class Refuses:
    def state_dict(self):
        raise RuntimeError("not now")

    def load_state_dict(self, state_dict):
        raise AssertionError


def test_a_save_that_fails_on_one_rank_leaves_all_with_one_answer(tmp_path):
    ranks = ThreadRanks(2)
    managers = managers_of(ranks, tmp_path)

    def on_rank(rank):
        assert train(managers[rank], 10) == []
        assert managers[rank].due(11)
        with pytest.raises(CheckpointException, match="not now"):
            managers[rank].save(11, {"w": Refuses() if rank == 1 else torch.ones(2)})
        return bool(managers[rank].due(12)), train(managers[rank], 20, first=12)

    assert require_no_errors(ranks.run(on_rank)) == [(True, [12])] * 2


def test_a_save_that_fails_after_its_plan_counts_on_all_ranks_alike(tmp_path, monkeypatch):
    ranks = ThreadRanks(2)
    managers = managers_of(ranks, tmp_path)
    write = writer.write_shard_file

    def full(store, key, rank, items, planner):
        if "step-00000011" in store.url and rank == 1:
            raise OSError(28, "No space left on device")
        return write(store, key, rank, items, planner)

    monkeypatch.setattr(writer, "write_shard_file", full)

    def on_rank(rank):
        assert train(managers[rank], 10) == []
        managers[rank]._pacer._clock.at += 1.0
        assert managers[rank].due(11)
        with pytest.raises(CheckpointException, match="No space"):
            managers[rank].save(11, {"w": dcp.LocalShards((2,), {(rank,): torch.ones(1)})})
        return managers[rank].due(12).next_step, managers[rank]._pacer.figures(12, None).tiers[0].stall_s

    assert require_no_errors(ranks.run(on_rank)) == [(311, None)] * 2


def test_figures_are_kept_with_the_checkpoint_and_another_number_of_ranks_goes_on_by_them(tmp_path):
    ranks = ThreadRanks(2)
    before = managers_of(ranks, tmp_path, mtbf_s=50_000.0)
    saved = require_no_errors(ranks.run(lambda rank: train(before[rank], 340)))[0]
    assert saved == [11, 311]
    kept = Figures.from_json(describe(before[0].checkpoint_id(311)).pace)
    assert (kept.step, kept.num_ranks, kept.mtbf_s) == (311, 2, 50_000.0)
    assert kept.step_s == pytest.approx(1.0, abs=0.01)
    assert kept.observed_s == pytest.approx(311, abs=5)

    again = ThreadRanks(3, coordinator=ranks.coordinator, tag="next")
    after = managers_of(again, tmp_path, overhead=0.3)
    loaded = again.run(lambda rank: after[rank].load({"w": torch.zeros(4)}))
    assert loaded == [311] * 3
    assert {manager._pacer.interval.why for manager in after} == {after[0]._pacer.interval.why}
    assert after[0].due(312).next_step > 311 + 10
    saved = require_no_errors(again.run(lambda rank: train(after[rank], 600, first=312, step_s=1.0 + rank)))
    assert saved == [saved[0]] * 3
    assert after[0]._pacer._tier.interruptions == 1


def test_a_step_that_is_named_is_gone_on_from_with_the_first_interval(tmp_path):
    manager = dcp.CheckpointManager(tmp_path)
    for step in (5, 9):
        manager.save(step, {"w": torch.ones(4)})
    fresh = dcp.CheckpointManager(tmp_path)
    fresh.load({"w": torch.zeros(4)}, step=5)
    assert fresh.due(6).next_step == 15


class Staying(DefaultSavePlanner):
    """A user's that cannot be pickled, so that rank 0 makes the global plan."""

    def __reduce__(self):
        raise TypeError("stays here")


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, Staying])
@pytest.mark.parametrize("differ", [False, True], ids=["equal replicas", "replicas that differ"])
def test_the_answer_to_every_kind_of_plan_has_the_interval(tmp_path, planner, differ):
    ranks = ThreadRanks(2)
    writers = [dcp.StoreWriter(tmp_path / "c") for _ in range(2)]
    for rank, own in enumerate(writers):
        own.figures = Figures(step=7, step_s=1.0 + rank)
    require_no_errors(
        ranks.run(
            lambda rank: ranks.save_rank(
                rank,
                {"w": torch.full((3,), float(rank if differ else 0))},
                tmp_path / "c",
                writer=writers[rank],
                planner=planner and planner(),
            )
        )
    )
    assert [own.interval for own in writers] == [Interval("storage", 7, 150, "")] * 2


def test_a_manager_that_nobody_asks_keeps_nothing_and_logs_nothing(tmp_path, caplog):
    manager = dcp.CheckpointManager(tmp_path)
    with caplog.at_level(logging.INFO, logger="ray_dcp"):
        info = manager.save(1, {"w": torch.ones(4)})
    assert info.pace is None
    assert not [record for record in caplog.records if "save every" in record.message]


def test_a_manifest_says_it_or_not(tmp_path):
    info = dcp.CheckpointManager(tmp_path).save(1, {"w": torch.ones(4)})
    content = (tmp_path / "step-00000001" / "manifest.parquet").read_bytes()
    assert b"ray_dcp.pace" not in content
    manifest = dataclasses.replace(decode_manifest(content, "m"), pace={"step_s": 1.5})
    again = decode_manifest(encode_manifest(manifest), "m")
    assert (again, again.pace, info.pace) == (manifest, {"step_s": 1.5}, None)


@pytest.mark.parametrize("overhead", [0, 1, -0.1, 5, float("nan"), "0.1", True])
def test_an_overhead_that_is_no_share_is_refused(tmp_path, overhead):
    with pytest.raises(ConfigError, match=r"overhead: must be a share of the time above 0 and below 1, such as 0\.01"):
        dcp.CheckpointManager(tmp_path, overhead=overhead)


@pytest.mark.parametrize("mtbf_s", [0, -1, float("inf"), "3600", True])
def test_a_time_between_failures_that_is_none_is_refused(tmp_path, mtbf_s):
    with pytest.raises(ConfigError, match="mtbf_s: must be a finite number of seconds above 0"):
        dcp.CheckpointManager(tmp_path, mtbf_s=mtbf_s)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    with pytest.raises(ConfigError, match="step"):
        dcp.CheckpointManager(tmp_path).due(step)


def test_both_can_be_said_by_variables_and_an_argument_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_DCP_OVERHEAD", "0.05")
    monkeypatch.setenv("RAY_DCP_MTBF_S", "7200")
    assert dcp.CheckpointManager(tmp_path)._pacer._settings == PaceSettings(overhead=0.05, mtbf_s=7200.0)
    given = dcp.CheckpointManager(tmp_path, overhead=0.2, mtbf_s=60)._pacer._settings
    assert given == PaceSettings(overhead=0.2, mtbf_s=60)
    for name, text in (("RAY_DCP_OVERHEAD", "much"), ("RAY_DCP_OVERHEAD", "1.5"), ("RAY_DCP_MTBF_S", "never")):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=name):
            dcp.CheckpointManager(tmp_path)
        monkeypatch.setenv(name, "")
    assert dcp.CheckpointManager(tmp_path)._pacer._settings == PaceSettings()


def _train_through_ray(rank, world_size, root):
    import time

    manager = dcp.CheckpointManager(root, overhead=0.2, mtbf_s=5.0)
    asked, saved = [], []
    for step in range(1, 61):
        time.sleep(0.002 * (1 + rank))
        began = time.perf_counter()
        due = manager.due(step)
        asked.append(time.perf_counter() - began)
        if due:
            saved.append(step)
            manager.save(step, {"w": torch.full((4,), float(step))})
    return saved, manager.due(60).why, sorted(asked)[len(asked) // 2]


@pytest.mark.ray
def test_rank_actors_save_at_the_same_steps(ranks, tmp_path):
    outcomes = ranks.ok(2, _train_through_ray, tmp_path)
    saved, why, _ = outcomes[0]
    assert outcomes[1][:2] == (saved, why)
    assert saved[0] == 11
    assert max(asked_s for *_, asked_s in outcomes) < 0.001


def test_the_group_that_is_known_is_the_one_that_a_save_would_take_and_none_is_joined_for_it(monkeypatch):
    assert current.known_group() is None
    lazily, joined, entered = object(), object(), object()
    monkeypatch.setitem(current._lazily_joined, ("run", "first"), object())
    monkeypatch.setitem(current._lazily_joined, ("run", "second"), lazily)
    assert current.known_group() is lazily
    monkeypatch.setattr(current, "_joined", joined)
    assert current.known_group() is joined
    current.enter(entered)
    assert current.known_group() is entered
    current.leave(entered)
    assert current.known_group() is joined
