"""One run: train, kill, see training go on. And all runs, in an order that is fair to both sides."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery_parts import timeline
from recovery_parts.cluster import cluster_folder, kill_node_of, kill_rank, local_cluster
from recovery_parts.events import Event, note, read_events
from recovery_parts.timeline import Recovery, recovery_of

RANK = "rank"
NODE = "node"
VICTIMS = (RANK, NODE)
_KILL: dict[str, Callable[[int], None]] = {RANK: kill_rank, NODE: kill_node_of}
_LOOK_EVERY_S = 0.05
_START_TIMEOUT_S = 180.0
_SPARE_S = 60.0
"""For the start and the end of the cluster."""
_PROBLEM = "problem"
_STEPS_AFTERWARDS = 5
_MAX_FAILURES = 5
_POLL_INTERVAL_S = 2.0
"""Ray's, for looking at its workers: a death is spread evenly over it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run is told."""

    side: str
    victim: str
    number: int
    """Runs of one number, of whichever side, are as alike as can be."""
    settle_s: float
    """Training goes on for this long before the kill."""
    timeout_s: float


def runs_in_order(sides: Sequence[str], victims: Sequence[str], num_runs: int, **limits: float) -> Iterator[Run]:
    """A, B, B, A, …: what changes on the machine over time changes for both."""
    for victim in victims:
        for number in range(num_runs):
            for side in sides if number % 2 == 0 else reversed(sides):
                yield Run(side, victim, number, **limits)


def measure(run: Run, folder: str) -> Recovery:
    """Do a run in a new cluster. Raises ``RuntimeError`` when training does not go on."""
    events = Path(folder) / "events"
    events.mkdir(parents=True)
    # In a process of its own: Ray ends one in which a thread still waits for it when the cluster is left.
    with cluster_folder() as ray_folder:
        child = multiprocessing.get_context("spawn").Process(target=_train_and_kill, args=(run, folder, ray_folder))
        child.start()
        child.join(_START_TIMEOUT_S + run.settle_s + run.timeout_s + _SPARE_S)
        if child.is_alive():
            child.kill()
            child.join()
    problem = Path(folder) / _PROBLEM
    if problem.exists():
        raise RuntimeError(problem.read_text())
    return recovery_of(read_events(str(events)))


def _train_and_kill(run: Run, folder: str, ray_folder: str) -> None:
    from ray import cloudpickle

    import recovery_parts

    # Workers get this code from here, whatever they can import.
    cloudpickle.register_pickle_by_value(recovery_parts)
    events = Path(folder) / "events"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), local_cluster(ray_folder):
        try:
            _until_it_trains_again(run, folder, events)
        except (TimeoutError, RuntimeError) as error:
            (Path(folder) / _PROBLEM).write_text(str(error))


def _until_it_trains_again(run: Run, folder: str, events: Path) -> None:
    _fit_in_background(run, str(events), f"{folder}/storage")
    begun = _wait_for(events, _trains(num_workers=2), _START_TIMEOUT_S, "training did not begin")
    settled = begun[-1].at + run.settle_s + random.Random(run.number).uniform(0, _POLL_INTERVAL_S)
    time.sleep(max(0.0, settled - time.monotonic()))
    victim = next(event for event in begun if event.kind == timeline.TRAINING and event.facts["rank"] == 1)
    note(str(events), timeline.KILLED)
    _KILL[run.victim](victim.pid)
    _wait_for(events, _trains_again, run.timeout_s, "training did not go on after the kill")


def _fit_in_background(run: Run, events: str, storage: str) -> None:
    trainer = _trainer(run, events, storage)

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException:  # noqa: BLE001 - it ends with the cluster; that training goes on shows in the events
            return

    threading.Thread(target=fit, daemon=True).start()


def _trainer(run: Run, events: str, storage: str) -> Any:
    import ray.train
    from ray.train.torch import TorchTrainer

    from ray_dcp.train import CheckpointCallback
    from recovery_parts.observer import Observer
    from recovery_parts.trainees import RAY_DCP, Lesson, train

    return TorchTrainer(
        train,
        train_loop_config={"lesson": Lesson(side=run.side, events=events)},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2)),
        run_config=ray.train.RunConfig(
            name="recovery",
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=_MAX_FAILURES),
            callbacks=[Observer(events), *([CheckpointCallback()] if run.side == RAY_DCP else [])],
        ),
    )


def _trains(num_workers: int) -> Callable[[list[Event]], bool]:
    def look(events: list[Event]) -> bool:
        ranks = {event.facts["rank"] for event in events if event.kind == timeline.STEP}
        if 1 in ranks and {event.facts["world_size"] for event in events if event.kind == timeline.STEP} != {2}:
            raise RuntimeError("training began with another number of workers than two")
        return len(ranks) == num_workers

    return look


def _trains_again(events: list[Event]) -> bool:
    killed = next(event.at for event in events if event.kind == timeline.KILLED)
    old = {event.pid for event in events if event.kind == timeline.STEP and event.at <= killed}
    again = [event for event in events if event.kind == timeline.STEP and event.pid not in old]
    return bool(again) and len(again) >= _STEPS_AFTERWARDS * int(again[-1].facts["world_size"])


def _wait_for(events: Path, look: Callable[[list[Event]], bool], timeout_s: float, otherwise: str) -> list[Event]:
    deadline = time.monotonic() + timeout_s
    while not look(found := read_events(str(events))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {timeout_s:g} s")
        time.sleep(_LOOK_EVERY_S)
    return found
