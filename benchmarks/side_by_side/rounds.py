"""How it is measured: rounds of A, B, then B, A, with the machine's limits probed in each.

A round of a workload saves to a fresh folder, lets torch's own ``load`` check what was saved, loads it back, and
removes it, side after side.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from side_by_side.probes import PROBES_OF, Limit
from side_by_side.process_use import ProcessUse, Used
from side_by_side.rank import AsyncSave
from side_by_side.results import Figure, Measure, Sample, WorkloadResult
from side_by_side.sides import OF_TORCH
from side_by_side.states import Layout
from side_by_side.timed_call import TimedCall, wall_s
from side_by_side.workloads import LIMIT_OF, Workload

_LAYOUT_OF = {"load": Layout.ROWS, "reshard": Layout.COLUMNS}

Step = Callable[[str], None]
"""Called before each step, with what it is."""


class Ranks(Protocol):
    """A ``RankPool`` of ``Rank``."""

    def run(self, method: str, *args: Any) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is measured."""

    ranks: Ranks
    coordinator: int
    """The process of ray_dcp's coordinator of these ranks."""
    folder: str


def num_steps(workload: Workload, sides: Sequence[str], num_runs: int) -> int:
    """How many steps ``measure_workload`` takes."""
    return (num_runs + 1) * (1 + len(workload.sides(sides)))


def measure_workload(
    workload: Workload, sides: Sequence[str], place: Place, num_runs: int, step: Step
) -> WorkloadResult:
    """Measure all sides ``num_runs`` times, after one round to warm up, in fresh folders."""
    place.ranks.run("hold", workload.state)
    rounds = []
    for number in range(num_runs + 1):
        title = f"{workload.name}, " + (f"run {number} of {num_runs}" if number else "warming up")
        this_round = Round(workload, place)
        step(f"{title}: limits")
        this_round.probe()
        in_order = workload.sides(sides)
        for side in in_order if number % 2 else reversed(in_order):
            step(f"{title}: {side}")
            this_round.measure(side)
        rounds.append(this_round)
        place.ranks.run("end_warm_up")
    return _result(workload, sides, rounds)


class Round:
    """The limits, and one sample of each measure on each side."""

    def __init__(self, workload: Workload, place: Place) -> None:
        self._workload = workload
        self._place = place
        self._ranks = place.ranks
        self.limits_s: dict[Limit, float] = {}
        self.samples: dict[tuple[str, str], Sample] = {}
        """By measure and side."""
        self.disk_nbytes: dict[str, int] = {}

    def probe(self) -> None:
        needed = {LIMIT_OF[name] for name in self._workload.measures}
        with folder_for_once(f"{self._place.folder}/probe") as folder:
            for limit in (limit for limit in Limit if limit in needed):
                tries = [self._ranks.run("probe", name, folder) for name in PROBES_OF[limit]]
                self.limits_s[limit] = min(wall_s(calls) for calls in tries if None not in calls)
                os.sync()

    def measure(self, side: str) -> None:
        measures = self._workload.measures_of(side)
        with folder_for_once(f"{self._place.folder}/{side}") as folder:
            checkpoint = f"{folder}/checkpoint"
            if "durable" in measures:
                self._save_behind(side, checkpoint)
            else:
                self._save_and_load(side, checkpoint, measures)
            self.disk_nbytes[side] = sum(file.stat().st_size for file in Path(checkpoint).rglob("*") if file.is_file())
        if "unsynced" in measures:
            with folder_for_once(f"{self._place.folder}/{side}") as folder:
                saved, coordinator = self._run(side, "save_unsynced", f"{folder}/checkpoint")
                wrong = self._ranks.run("differences_in", f"{folder}/checkpoint")
                self.samples["unsynced", side] = _sample(saved, wrong, coordinator)

    def _save_and_load(self, side: str, checkpoint: str, measures: Sequence[str]) -> None:
        saved, coordinator = self._run(side, "save", checkpoint)
        # Torch's own load is among what is measured: it need not be done twice.
        wrong = [] if side in OF_TORCH else self._ranks.run("differences_in", checkpoint)
        for name in measures:
            if name in _LAYOUT_OF:
                loads, used = self._run(side, "load", checkpoint, _LAYOUT_OF[name])
                differences = [load.differences for load in loads]
                self.samples[name, side] = _sample([load.call for load in loads], differences, used)
                wrong = wrong or differences
        self.samples["save", side] = _sample(saved, wrong, coordinator)

    def _save_behind(self, side: str, checkpoint: str) -> None:
        saves: list[AsyncSave]
        saves, coordinator = self._run(side, "async_save", checkpoint)
        wrong = self._ranks.run("differences_in", checkpoint)
        durable = _sample([save.durable for save in saves], wrong, coordinator)
        self.samples["durable", side] = durable
        self.samples["stall", side] = replace(durable, seconds=max(save.stalled_s for save in saves))
        self.samples["staged", side] = replace(durable, seconds=max(save.staged_s for save in saves))

    def _run(self, side: str, method: str, *args: Any) -> tuple[list[Any], list[Used]]:
        """What the ranks return, and what processes other than theirs have used for this side."""
        if side in OF_TORCH:
            return self._ranks.run(method, side, *args), []
        coordinator = ProcessUse(self._place.coordinator)
        return self._ranks.run(method, side, *args), [coordinator.so_far()]


def _sample(calls: Sequence[TimedCall], differences: Sequence[Sequence[str]], others: Sequence[Used]) -> Sample:
    used = [*(call.used for call in calls), *others]
    return Sample(
        seconds=wall_s(calls),
        extra_nbytes=max(of_process.extra_nbytes for of_process in used),
        cpu_s=sum(of_process.cpu_s for of_process in used),
        differences=tuple(sorted({name for of_rank in differences for name in of_rank})),
    )


def _result(workload: Workload, sides: Sequence[str], rounds: Sequence[Round]) -> WorkloadResult:
    warm_up, *timed = rounds
    measures = []
    for name in workload.measures:
        figures = {
            side: Figure([this_round.samples[name, side] for this_round in timed], warm_up.samples[name, side])
            for side in workload.sides(sides)
            if name in workload.measures_of(side)
        }
        limit = LIMIT_OF[name]
        limit_runs_s = [this_round.limits_s[limit] for this_round in timed]
        measures.append(Measure(name, workload.state.nbytes, limit, limit_runs_s, figures))
    disk_nbytes = {side: rounds[-1].disk_nbytes[side] for side in sides}
    return WorkloadResult(workload.name, workload.title, workload.state.nbytes, measures, disk_nbytes)


@contextmanager
def folder_for_once(folder: str) -> Iterator[str]:
    """A new folder, gone afterwards, and nothing is left to be written: the next call is not to wait for that."""
    os.sync()
    os.mkdir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.sync()
