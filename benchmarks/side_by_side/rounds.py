"""How it is measured: rounds of A, B, then B, A, with the machine's limits probed in each.

A round of a workload saves to a fresh folder, lets torch's own ``load`` check what was saved, loads it back, and
removes it, side after side.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from side_by_side.probes import PROBES_OF, Limit
from side_by_side.rank import AsyncSave
from side_by_side.results import Figure, Measure, Sample, WorkloadResult
from side_by_side.states import Layout
from side_by_side.timed_call import TimedCall, wall_s
from side_by_side.workloads import LIMIT_OF, Workload

_LAYOUT_OF = {"load": Layout.ROWS, "reshard": Layout.COLUMNS}

Step = Callable[[str], None]
"""Called before each step, with what it is."""


class Ranks(Protocol):
    """A ``RankPool`` of ``Rank``."""

    def run(self, method: str, *args: Any) -> list[Any]: ...


def num_steps(num_workloads: int, num_sides: int, num_runs: int) -> int:
    """How many steps ``measure_workload`` takes for all workloads."""
    return num_workloads * (num_runs + 1) * (1 + num_sides)


def measure_workload(
    workload: Workload, sides: Sequence[str], ranks: Ranks, folder: str, num_runs: int, step: Step
) -> WorkloadResult:
    """Measure all sides ``num_runs`` times, after one round to warm up, in fresh folders below ``folder``."""
    ranks.run("hold", workload.state)
    rounds = []
    for number in range(num_runs + 1):
        title = f"{workload.name}, " + (f"run {number} of {num_runs}" if number else "warming up")
        this_round = Round(workload, ranks, folder)
        step(f"{title}: limits")
        this_round.probe()
        for side in sides if number % 2 else reversed(sides):
            step(f"{title}: {side}")
            this_round.measure(side)
        rounds.append(this_round)
        ranks.run("end_warm_up")
    return _result(workload, sides, rounds)


class Round:
    """The limits, and one sample of each measure on each side."""

    def __init__(self, workload: Workload, ranks: Ranks, folder: str) -> None:
        self._workload = workload
        self._ranks = ranks
        self._folder = folder
        self.limits_s: dict[Limit, float] = {}
        self.samples: dict[tuple[str, str], Sample] = {}
        """By measure and side."""
        self.disk_nbytes: dict[str, int] = {}

    def probe(self) -> None:
        needed = {LIMIT_OF[name] for name in self._workload.measures}
        with _folder_for_once(f"{self._folder}/probe") as folder:
            for limit in (limit for limit in Limit if limit in needed):
                tries = [self._ranks.run("probe", name, folder) for name in PROBES_OF[limit]]
                self.limits_s[limit] = min(wall_s(calls) for calls in tries if None not in calls)

    def measure(self, side: str) -> None:
        with _folder_for_once(f"{self._folder}/{side}") as folder:
            checkpoint = f"{folder}/checkpoint"
            if "durable" in self._workload.measures:
                self._save_behind(side, checkpoint)
            else:
                self._save_and_load(side, checkpoint)
            self.disk_nbytes[side] = sum(file.stat().st_size for file in Path(checkpoint).rglob("*") if file.is_file())

    def _save_and_load(self, side: str, checkpoint: str) -> None:
        calls: list[TimedCall] = self._ranks.run("save", side, checkpoint)
        self.samples["save", side] = _sample(calls, self._ranks.run("differences_in", checkpoint))
        for name in self._workload.measures:
            if name in _LAYOUT_OF:
                loaded = self._ranks.run("load", side, checkpoint, _LAYOUT_OF[name])
                self.samples[name, side] = _sample([call for call, _ in loaded], [wrong for _, wrong in loaded])

    def _save_behind(self, side: str, checkpoint: str) -> None:
        saves: list[AsyncSave] = self._ranks.run("async_save", side, checkpoint)
        durable = _sample([save.durable for save in saves], self._ranks.run("differences_in", checkpoint))
        self.samples["durable", side] = durable
        self.samples["stall", side] = replace(durable, seconds=max(save.stalled_s for save in saves))
        self.samples["staged", side] = replace(durable, seconds=max(save.staged_s for save in saves))


def _sample(calls: Sequence[TimedCall], differences: Sequence[Sequence[str]]) -> Sample:
    extra_nbytes = max(call.extra_nbytes for call in calls)
    wrong = {name for of_rank in differences for name in of_rank}
    return Sample(wall_s(calls), extra_nbytes, tuple(sorted(wrong)))


def _result(workload: Workload, sides: Sequence[str], rounds: Sequence[Round]) -> WorkloadResult:
    warm_up, *timed = rounds
    measures = []
    for name in workload.measures:
        figures = {
            side: Figure([this_round.samples[name, side] for this_round in timed], warm_up.samples[name, side])
            for side in sides
        }
        limit = LIMIT_OF[name]
        limit_runs_s = [this_round.limits_s[limit] for this_round in timed]
        measures.append(Measure(name, workload.state.nbytes, limit, limit_runs_s, figures))
    disk_nbytes = {side: rounds[-1].disk_nbytes[side] for side in sides}
    return WorkloadResult(workload.name, workload.title, workload.state.nbytes, measures, disk_nbytes)


@contextmanager
def _folder_for_once(folder: str) -> Iterator[str]:
    """A new folder, gone afterwards, also from the disk's journal: the next call is not to wait for that."""
    os.mkdir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        descriptor = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
