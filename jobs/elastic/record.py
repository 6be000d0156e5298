"""What happened in a run, and how it compares to an uninterrupted one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.board import Note, SaveReturned, StepDone, WorkerStarted


@dataclass(slots=True)
class Stretch:
    """What one worker group did between forming and ending."""

    group: str
    world_size: int
    resumed_step: int
    started: list[WorkerStarted] = field(default_factory=list)
    steps: list[StepDone] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all its workers have begun."""
        return len(self.started) == self.world_size


@dataclass(frozen=True, slots=True)
class Resume:
    """One time that training stopped and went on."""

    step: int
    """Of the checkpoint it resumed from."""
    workers_before: int
    workers: int
    seconds: float
    """From the last step before to the first step after."""
    steps_repeated: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every loss of the run against the loss of that step in an uninterrupted run."""

    max_relative_deviation: float
    tolerance: float
    steps_off: tuple[int, ...]
    """Steps with a loss outside the tolerance, sorted."""
    steps_missing: tuple[int, ...]
    """Steps that no worker group finished, sorted."""
    steps_unlike: tuple[int, ...] = ()
    """Steps that the next group of the same size did again, with a loss that differs in any bit; sorted."""

    @property
    def matches(self) -> bool:
        return not self.steps_off and not self.steps_missing and not self.steps_unlike


class RunRecord:
    """Collects notes; each property is about what has been collected so far."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self.saves: list[SaveReturned] = []

    def add(self, notes: Iterable[Note]) -> None:
        for note in notes:
            if isinstance(note, WorkerStarted):
                self._stretch(note.group, note.world_size, note.resumed_step).started.append(note)
            elif isinstance(note, StepDone):
                self._stretch(note.group, note.world_size, note.step - 1).steps.append(note)
            else:
                self.saves.append(note)

    def _stretch(self, group: str, world_size: int, resumed_step: int) -> Stretch:
        for stretch in self.stretches:
            if stretch.group == group:
                return stretch
        self.stretches.append(Stretch(group, world_size, resumed_step))
        return self.stretches[-1]

    @property
    def trained(self) -> list[Stretch]:
        """The stretches that finished at least a step."""
        return [stretch for stretch in self.stretches if stretch.steps]

    @property
    def last_step(self) -> StepDone | None:
        trained = self.trained
        return trained[-1].steps[-1] if trained else None

    @property
    def resumes(self) -> list[Resume]:
        trained = self.trained
        return [
            Resume(
                step=after.resumed_step,
                workers_before=before.world_size,
                workers=after.world_size,
                seconds=after.steps[0].at - before.steps[-1].at,
                steps_repeated=before.steps[-1].step - after.resumed_step,
            )
            for before, after in itertools.pairwise(trained)
        ]

    def compare(self, reference: Sequence[float], tolerance: float, *, exact_repeats: bool = False) -> Comparison:
        """Compare every finished step, repeated ones as often as they were done. ``reference[0]`` is step 1.

        ``exact_repeats``: a step that is repeated on as many workers as the first time, with none between, has to have
        the same loss to the last bit.
        """
        largest, off, done = 0.0, set(), set()
        for stretch in self.trained:
            for step in stretch.steps:
                expected = reference[step.step - 1]
                deviation = abs(step.loss - expected) / abs(expected)
                largest = max(largest, deviation)
                done.add(step.step)
                # Not `deviation > tolerance`: that is false for a loss that is not a number.
                if not deviation <= tolerance:
                    off.add(step.step)
        missing = set(range(1, len(reference) + 1)) - done
        unlike = self._repeated_otherwise() if exact_repeats else set()
        return Comparison(largest, tolerance, tuple(sorted(off)), tuple(sorted(missing)), tuple(sorted(unlike)))

    def _repeated_otherwise(self) -> set[int]:
        """Steps with another loss than in the stretch before, which was of the same size."""
        unlike: set[int] = set()
        for before, after in itertools.pairwise(self.trained):
            if before.world_size == after.world_size:
                losses = {step.step: step.loss for step in before.steps}
                unlike |= {step.step for step in after.steps if losses.get(step.step, step.loss) != step.loss}
        return unlike
