"""How it is measured: rounds in which each side has a turn, in an order drawn anew, with the limits beside ray_dcp.

A turn saves to a fresh folder, lets torch's own ``load`` check what was saved, loads it back, and removes it. What is
to be compared with ray_dcp alone shares its turn.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from side_by_side.orders import LIMITS, Order, Turn, drawn_orders
from side_by_side.probes import PROBES_OF, Limit
from side_by_side.process_use import ProcessUse, Used
from side_by_side.rank import AsyncSave
from side_by_side.results import Figure, Measure, Sample, WorkloadResult
from side_by_side.sides import OF_TORCH, RAY_DCP
from side_by_side.states import Layout
from side_by_side.timed_call import TimedCall, wall_s
from side_by_side.workloads import LIMIT_OF, Workload

_IN_ONE_FOLDER = (("save", "load", "reshard"), ("unsynced",), ("durable",))
"""Measures in the order in which they are done, and what they leave there."""
_SAVES = ("save", "unsynced", "durable")
_MEASURED_WITH = {"durable": ("stall", "staged", "durable")}
"""One call, several measures."""
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
    helpers: Callable[[], list[int]]
    """The processes that work for these ranks on ray_dcp's side: their coordinator, and their agent once it is up."""
    folder: str


def num_steps(sides: Sequence[str], num_runs: int) -> int:
    """How many steps ``measure_workload`` takes: ray_dcp's variants, and the limits, have their turn with it."""
    return (num_runs + 1) * len(sides)


def measure_workload(
    workload: Workload, sides: Sequence[str], place: Place, num_runs: int, seed: int, step: Step
) -> WorkloadResult:
    """Measure all sides ``num_runs`` times, after one round to warm up, in fresh folders and an order by ``seed``."""
    place.ranks.run("hold", workload.state)
    others, together = [side for side in sides if side != RAY_DCP], [RAY_DCP, *workload.variants]
    orders = drawn_orders(others, together, num_runs, f"{seed} {workload.name}")
    rounds = []
    for number, order in enumerate([orders[0], *orders]):
        title = f"{workload.name}, " + (f"run {number} of {num_runs}" if number else "warming up")
        this_round = Round(workload, place)
        for turn in order:
            step(f"{title}: {', '.join(turn)}")
            this_round.take(turn)
        rounds.append(this_round)
        place.ranks.run("end_warm_up")
    return _result(workload, sides, rounds, orders)


class Round:
    """The limits beside each measure, and one sample of it on each side."""

    def __init__(self, workload: Workload, place: Place) -> None:
        self._workload = workload
        self._place = place
        self._ranks = place.ranks
        self.limits_s: dict[str, float] = {}
        """By measure."""
        self.samples: dict[tuple[str, str], Sample] = {}
        """By measure and side."""
        self.disk_nbytes: dict[str, int] = {}

    def take(self, turn: Turn) -> None:
        """Measure all in ``turn``: one measure on each, in this order, before the next measure."""
        for names in _IN_ONE_FOLDER:
            measures = [name for name in names if any(name in self._measures_of(who) for who in turn)]
            if measures:
                self._take_in_folders(turn, measures)

    def _take_in_folders(self, turn: Turn, measures: Sequence[str]) -> None:
        with ExitStack() as until_done:
            folders = {who: until_done.enter_context(folder_for_once(f"{self._place.folder}/{who}")) for who in turn}
            for name in measures:
                members = [who for who in turn if name in self._measures_of(who)]
                for who in members:
                    os.sync()
                    self._measure(name, who, folders[who])
                for side in members:
                    if name in _SAVES and side != LIMITS:
                        self._verify(name, side, folders[side])

    def _measures_of(self, who: str) -> Sequence[str]:
        return self._workload.measures if who == LIMITS else self._workload.measures_of(who)

    def _measure(self, name: str, who: str, folder: str) -> None:
        checkpoint = f"{folder}/checkpoint"
        if who == LIMITS:
            self._probe(name, folder)
        elif name in _LAYOUT_OF:
            loads, helpers = self._run(who, "load", checkpoint, _LAYOUT_OF[name])
            differences = [load.differences for load in loads]
            self.samples[name, who] = _sample([load.call for load in loads], helpers, differences)
        elif name == "durable":
            self._save_behind(who, checkpoint)
        else:
            saved, helpers = self._run(who, "save_unsynced" if name == "unsynced" else "save", checkpoint)
            self.samples[name, who] = _sample(saved, helpers)

    def _probe(self, name: str, folder: str) -> None:
        """The limits of a measure, and of what is measured with it. The file of a plain write stays, to be read."""
        limits_s: dict[Limit, float] = {}
        for measure in _MEASURED_WITH.get(name, (name,)):
            limit = LIMIT_OF[measure]
            if limit not in limits_s:
                limits_s[limit] = min(self._seconds_of(probe, folder) for probe in PROBES_OF[limit])
            self.limits_s[measure] = limits_s[limit]

    def _seconds_of(self, probe: str, folder: str) -> float:
        os.sync()
        calls = self._ranks.run("probe", probe, folder)
        for file in Path(folder).glob("*.*"):
            file.unlink()
        return math.inf if None in calls else wall_s(calls)

    def _save_behind(self, side: str, checkpoint: str) -> None:
        saves: list[AsyncSave]
        saves, helpers = self._run(side, "async_save", checkpoint)
        durable = _sample([save.durable for save in saves], helpers)
        self.samples["durable", side] = durable
        self.samples["stall", side] = replace(durable, seconds=max(save.stalled_s for save in saves))
        self.samples["staged", side] = replace(durable, seconds=max(save.staged_s for save in saves))

    def _verify(self, name: str, side: str, folder: str) -> None:
        """By torch's load. Where that is among what is measured next, it need not be done twice."""
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        if name != "unsynced":
            self.disk_nbytes[side] = sum(file.stat().st_size for file in files)
        if name == "save" and side in OF_TORCH and "load" in self._workload.measures:
            return
        wrong = _names(self._ranks.run("differences_in", f"{folder}/checkpoint"))
        for measure in _MEASURED_WITH.get(name, (name,)):
            self.samples[measure, side] = replace(self.samples[measure, side], differences=wrong)

    def _run(self, side: str, method: str, *args: Any) -> tuple[list[Any], list[Used]]:
        """What the ranks return, and what processes other than theirs have used for this side."""
        if side in OF_TORCH:
            return self._ranks.run(method, side, *args), []
        helpers = [ProcessUse(pid) for pid in self._place.helpers()]
        return self._ranks.run(method, side, *args), [helper.so_far() for helper in helpers]


def _sample(calls: Sequence[TimedCall], others: Sequence[Used], differences: Sequence[Sequence[str]] = ()) -> Sample:
    used = [*(call.used for call in calls), *others]
    return Sample(
        seconds=wall_s(calls),
        extra_nbytes=max(of_process.extra_nbytes for of_process in used),
        cpu_s=sum(of_process.cpu_s for of_process in used),
        differences=_names(differences),
    )


def _names(of_ranks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for of_rank in of_ranks for name in of_rank}))


def _result(
    workload: Workload, sides: Sequence[str], rounds: Sequence[Round], orders: Sequence[Order]
) -> WorkloadResult:
    warm_up, *timed = rounds
    measures = []
    for name in workload.measures:
        figures = {
            side: Figure([this_round.samples[name, side] for this_round in timed], warm_up.samples[name, side])
            for side in (*sides, *workload.variants)
            if name in workload.measures_of(side)
        }
        limit_runs_s = [this_round.limits_s[name] for this_round in timed]
        measures.append(Measure(name, workload.state.nbytes, LIMIT_OF[name], limit_runs_s, figures))
    disk_nbytes = {side: rounds[-1].disk_nbytes[side] for side in sides}
    return WorkloadResult(workload.name, workload.title, workload.state.nbytes, measures, disk_nbytes, orders)


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
