"""From events to figures: how long a recovery took, and which part of it took how long. No Ray here."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recovery_parts.events import Event

KILLED = "killed"
SURVIVOR_ERROR = "survivor error"
DECIDED = "decided"
SHUTDOWN_BEGUN = "shutdown begun"
SHUTDOWN_DONE = "shutdown done"
GROUP_START = "group start"
TRAINING = "training"
BUILT = "built"
LOADED = "loaded"
STEP = "step"

PARTS: Mapping[str, str] = {
    "detection": "the kill until Ray Train's controller decides to restart",
    "decision": "until the old workers are being shut down: with how many workers to go on",
    "shutdown": "of the old workers",
    "placement": "until the last new process runs: resources, and starting it; none for a process that was there",
    "imports": "until the train function runs on all: Python, Ray, torch, the process group",
    "build": "model and optimizer",
    "load": "of the newest checkpoint",
    "first step": "of the optimizer, until all ranks have done it",
}


class IncompleteError(Exception):
    """The events do not tell of a whole recovery."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One death, and how training went on."""

    errors_s: float | None
    """From the kill until the last survivor has an error in its hands; None: it was stopped without one."""
    step_s: float
    """From the kill until all ranks of the new group have done an optimizer step."""
    steps_repeated: int
    num_workers: int
    """After it."""
    parts: Mapping[str, float]
    """Seconds of each of ``PARTS``; together they are ``step_s``."""


def recovery_of(events: Sequence[Event]) -> Recovery:
    """Work out a recovery. Raises ``IncompleteError`` where something is missing, naming it."""
    killed = _first(events, KILLED).at
    before = [event for event in events if event.at <= killed]
    after = [event for event in events if event.at > killed]
    dead_and_old = {event.pid for event in before if event.kind == TRAINING}
    new = [event for event in after if event.pid not in dead_and_old]
    step = _first(new, STEP)
    started = max((event.at for event in new if event.kind == GROUP_START and event.at < step.at), default=killed)
    group = [event for event in new if event.at >= started]
    num_workers = int(step.facts["world_size"])
    training = _of_all(group, TRAINING, num_workers)
    processes = max(float(event.facts["process_started"]) for event in training)
    marks = [
        killed,
        _first(after, DECIDED).at,
        _first(after, SHUTDOWN_BEGUN).at,
        shut_down := _first(after, SHUTDOWN_DONE).at,
        # A process that was there before has waited for this.
        max(processes, shut_down),
        _last_at(training),
        _last_at(_of_all(group, BUILT, num_workers)),
        _last_at(loaded := _of_all(group, LOADED, num_workers)),
        _last_at(_of_all(group, STEP, num_workers)),
    ]
    errors = [event.at for event in after if event.kind == SURVIVOR_ERROR and event.pid in dead_and_old]
    return Recovery(
        errors_s=max(errors) - killed if errors else None,
        step_s=marks[-1] - killed,
        steps_repeated=max(int(event.facts["step"]) for event in events if event.kind == STEP and event not in new)
        - int(loaded[0].facts["step"]),
        num_workers=num_workers,
        parts=dict(zip(PARTS, (later - sooner for sooner, later in itertools.pairwise(marks)), strict=True)),
    )


def _first(events: Sequence[Event], kind: str) -> Event:
    for event in events:
        if event.kind == kind:
            return event
    raise IncompleteError(f"there was no event {kind!r}")


def _of_all(events: Sequence[Event], kind: str, num_workers: int) -> list[Event]:
    """The first event of that kind of each rank."""
    found: dict[int, Event] = {}
    for event in events:
        if event.kind == kind:
            found.setdefault(int(event.facts["rank"]), event)
    if len(found) < num_workers:
        raise IncompleteError(f"only {len(found)} of {num_workers} ranks had an event {kind!r}")
    return list(found.values())


def _last_at(events: Sequence[Event]) -> float:
    return max(event.at for event in events)


@dataclass(frozen=True, slots=True)
class Summary:
    """Several recoveries of one side from one kind of death."""

    recoveries: Sequence[Recovery]

    @property
    def median_s(self) -> float:
        return statistics.median(recovery.step_s for recovery in self.recoveries)

    @property
    def min_s(self) -> float:
        return min(recovery.step_s for recovery in self.recoveries)

    @property
    def median_errors_s(self) -> float | None:
        known = [recovery.errors_s for recovery in self.recoveries if recovery.errors_s is not None]
        return statistics.median(known) if known else None

    @property
    def median_steps_repeated(self) -> float:
        return statistics.median(recovery.steps_repeated for recovery in self.recoveries)

    def median_part_s(self, part: str) -> float:
        return statistics.median(recovery.parts[part] for recovery in self.recoveries)

    def share_of(self, part: str) -> float:
        """Of the whole time of all runs: medians of parts do not add up."""
        return sum(recovery.parts[part] for recovery in self.recoveries) / sum(
            recovery.step_s for recovery in self.recoveries
        )
