"""What the user sees: a progress bar while it runs, and the table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from elastic.record import Comparison, RunRecord


class Picture:
    """A progress bar with what is going on, and lines above it for what has happened."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("starting", total=num_steps)

    def __enter__(self) -> Picture:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar, or, without a terminal, at once."""
        self._console.print(line, highlight=False)

    def show(self, record: RunRecord, doing: str) -> None:
        last = record.last_step
        if last is None:
            self._progress.update(self._task, description=doing)
            return
        workers = "1 worker" if last.world_size == 1 else f"{last.world_size} workers"
        self._progress.update(self._task, completed=last.step, description=f"loss {last.loss:.3f}, {workers}, {doing}")


def result_table(record: RunRecord, reference: Sequence[float]) -> Table:
    """Draw the run: where each worker group began and ended, and what each resume cost."""
    table = Table(title="The run, and the loss of the same step in an uninterrupted one")
    for heading in ("step", "workers", "loss", "uninterrupted", "seconds to resume", "steps repeated"):
        table.add_column(heading, justify="right")
    resumes = record.resumes
    for number, stretch in enumerate(record.trained):
        first, last = stretch.steps[0], stretch.steps[-1]
        cost = ("", "") if number == 0 else (_seconds(resumes[number - 1].seconds), resumes[number - 1].steps_repeated)
        for step, (seconds, repeated) in ((first, cost), (last, ("", ""))):
            expected = f"{reference[step.step - 1]:.6f}"
            table.add_row(str(step.step), str(step.world_size), f"{step.loss:.6f}", expected, seconds, str(repeated))
        table.add_section()
    return table


def verdict_line(comparison: Comparison) -> str:
    """Say in one sentence whether the losses are those of an uninterrupted run."""
    if comparison.steps_missing:
        return f"[red]Steps were never finished: {_listed(comparison.steps_missing)}."
    if comparison.steps_unlike:
        return (
            f"[red]Repeated on as many workers, the loss was another one at steps {_listed(comparison.steps_unlike)}."
        )
    if comparison.tolerance == math.inf and not comparison.steps_off:
        return "[green]Every step was done; losses are not compared, since other workers drop other values."
    size = f"largest relative deviation {comparison.max_relative_deviation:.1e}, tolerance {comparison.tolerance:.1e}"
    if comparison.steps_off:
        return f"[red]The loss is not that of an uninterrupted run at steps {_listed(comparison.steps_off)} ({size})."
    return f"[green]Every loss is that of an uninterrupted run ({size})."


def _listed(steps: Sequence[int], most: int = 10) -> str:
    shown = ", ".join(str(step) for step in steps[:most])
    return f"{shown} and {len(steps) - most} more" if len(steps) > most else shown


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}"
