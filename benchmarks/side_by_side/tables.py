"""What the user sees: a progress bar meanwhile, then a table and a sentence for each workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from side_by_side.drain import DrainResult
from side_by_side.first_save import FirstResult
from side_by_side.machine import Machine
from side_by_side.results import MAX_PERCENT, Measure, WorkloadResult
from side_by_side.sides import DURABILITY, RAY_DCP, TORCH, TORCH_BEST
from side_by_side.spread import SpreadResult
from side_by_side.steady import SteadyResult
from side_by_side.targets import Line, OtherResult, Verdict
from side_by_side.workloads import NUM_RANKS

_STYLE_OF = {Verdict.MET: "green", Verdict.MISSED: "red", Verdict.NOT_VALID: "dim"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Steps:
    """A progress bar that says what is being done. Usable as ``with Steps(...) as steps:``."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting two ranks", total=num_steps)
        self._begun = False

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str) -> None:
        """The step before is done, and ``what`` begins."""
        self._progress.update(self._task, advance=1 if self._begun else 0, description=what)
        self._begun = True


def heading(machine: Machine, sides: Sequence[str], num_runs: int, seed: int) -> str:
    """Describe in a few lines what is compared, and where."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    durable = "\n".join(f"  {side}: {DURABILITY[side]}" for side in sides)
    return (
        f"{versions}\n{machine.num_cpus} CPUs, {show_nbytes(machine.memory_nbytes)}, Linux {machine.kernel}, "
        f"checkpoints on {machine.filesystem}\nTwo ranks, the same two processes for all sides; "
        f"{num_runs} runs of each, in orders drawn with --seed {seed}\nDurable when a save returns:\n{durable}"
    )


def table_of(result: WorkloadResult) -> Table:
    """One row for each side of each measure, below the limit it is divided by."""
    title = f"{result.name}: {result.title}, {show_nbytes(result.nbytes)}"
    table = _table(title)
    for name in ("min", "median", "per s", "% of limit", "extra mem", "CPU", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    for measure in result.measures:
        _add_limit(table, measure)
        for side in measure.figures:
            _add_figure(table, measure, side)
        table.add_section()
    return table


def summary_lines(result: WorkloadResult) -> list[str]:
    """Say of each measure, in a line, how ray_dcp compares with the others."""
    lines = []
    for measure in result.measures:
        compared = [side for side in measure.figures if side != RAY_DCP]
        lines += [_comparison(f"{result.name} {measure.name}", measure, other) for other in compared]
        lines += [_too_good(measure, side) for side in measure.figures if measure.beats_limit(side)]
        lines += [
            f"[red]{side} got {len(figure.differences)} names wrong, {figure.differences[0]} among them."
            for side, figure in measure.figures.items()
            if figure.differences
        ]
    own, torch = (show_nbytes(result.disk_nbytes[side]) for side in (RAY_DCP, TORCH))
    return [
        *lines,
        f"[bold]{result.name} size[/]: [bold]{result.ratio_of_sizes(TORCH):.2f}x[/] torch's ({own}, {torch})",
    ]


def _spread_table(result: SpreadResult) -> Table:
    """One row for each side of each layout."""
    title = f"{result.name}: saved by {NUM_RANKS} ranks, loaded by {result.num_readers}, {show_nbytes(result.nbytes)}"
    table = _table(title)
    for name in ("needed", "read", "reported", "read / needed", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    for layout, by_side in result.loads.items():
        for side, read in by_side.items():
            table.add_row(
                f"{layout} {side}",
                show_nbytes(read.needed_nbytes),
                show_nbytes(read.counted_nbytes),
                show_nbytes(read.reported_nbytes) if read.reported_nbytes is not None else "",
                f"{read.read_per_needed:.2f}x",
                "no" if read.differences else "yes",
                style="red" if read.differences else "",
            )
        table.add_section()
    return table


def other_table(result: OtherResult) -> Table:
    """Of what is measured otherwise than in rounds of the same calls."""
    return _TABLE_OF[type(result)](result)


def _drain_table(result: DrainResult) -> Table:
    table = _table(f"{result.name}: computing while an asynchronous save drains, {show_nbytes(result.nbytes)}")
    for name in ("idle per s", "meanwhile", "share: least", "median", "drain", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    for loop, by_side in result.samples.items():
        for side, samples in by_side.items():
            shares = result.shares(loop, side)
            table.add_row(
                f"{loop} {side}",
                f"{median(sample.idle_per_s for sample in samples):.0f}",
                f"{median(sample.meanwhile_per_s for sample in samples):.0f}",
                f"{min(shares):.2f}",
                f"{median(shares):.2f}",
                _show_s(median(sample.seconds for sample in samples)),
                _show_right(len(samples), sum(bool(sample.differences) for sample in samples)),
            )
        table.add_section()
    return table


def _first_table(result: FirstResult) -> Table:
    table = _table(f"{result.name}: the first asynchronous save of new ranks, {show_nbytes(result.nbytes)}")
    for name in ("stall", "durable: min", "median", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    for side, samples in result.samples.items():
        durable = result.durable_runs_s(side)
        table.add_row(
            side,
            _show_s(median(sample.stalled_s for sample in samples)),
            _show_s(min(durable)),
            _show_s(median(durable)),
            _show_right(len(samples), sum(bool(sample.differences) for sample in samples)),
        )
    return table


def _steady_table(result: SteadyResult) -> Table:
    title = f"{result.name}: {len(result.kept)} asynchronous saves, {show_nbytes(result.nbytes)}"
    table = _table(f"{title}: memory of the ranks, their coordinator and agent")
    for name in ("private", "shared", "taken in a save"):
        table.add_column(name, justify="right", no_wrap=True)
    first, last = result.kept[0], result.kept[-1]
    rows = (("before", result.before, None), ("first counted save", first, 0), ("last save", last, -1))
    for name, kept, at in rows:
        taken = "" if at is None else show_nbytes(result.taken_nbytes[at])
        table.add_row(name, show_nbytes(kept.private_nbytes), show_nbytes(kept.shared_nbytes), taken)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    return table


def _show_right(num: int, num_wrong: int) -> str:
    return f"{num - num_wrong}/{num}"


def targets_table(lines: Sequence[Line], *, valid: bool) -> Table:
    """Each line that must hold, with its verdict."""
    table = Table(
        title=f"Targets: by medians, to {TORCH}; by minima; by medians, to {TORCH_BEST}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("line", no_wrap=True)
    for name in ("target", "measured", "minima", "to best", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        verdict = line.verdict(valid=valid)
        table.add_row(
            line.name,
            f"{'>=' if line.at_least else '<='} {line.unit.show(line.bound)}",
            *(line.unit.show(figure) if figure is not None else "" for figure in line.figures),
            f"[{_STYLE_OF[verdict]}]{verdict.value}",
        )
    return table


def _comparison(title: str, measure: Measure, other: str) -> str:
    return (
        f"[bold]{title}[/]: [bold]{measure.ratio_of_minima(other):.2f}x[/] as fast as {other} by minima "
        f"({_show_s(measure.figures[RAY_DCP].minimum_s)}, {_show_s(measure.figures[other].minimum_s)}), "
        f"[bold]{measure.ratio_of_medians(other):.2f}x[/] by medians"
    )


def banner(objections: Sequence[str]) -> str:
    """Warn of figures that say nothing; empty where there is no objection."""
    return f"[bold red]NOT VALID: {'; '.join(objections)}. Run it on a quiet machine." if objections else ""


def show_nbytes(nbytes: float) -> str:
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.3g} {unit}"


def _add_limit(table: Table, measure: Measure) -> None:
    table.add_row(
        f"[dim]{measure.limit.value}",
        f"[dim]{_show_s(measure.limit_s)}",
        f"[dim]{_show_s(measure.median_limit_s)}",
        f"[dim]{_rate(measure, measure.limit_s)}",
    )


def _add_figure(table: Table, measure: Measure, side: str) -> None:
    figure = measure.figures[side]
    style = "red" if measure.beats_limit(side) or figure.differences else ""
    table.add_row(
        f"{measure.name} {side}",
        _show_s(figure.minimum_s),
        _show_s(figure.median_s),
        _rate(measure, figure.minimum_s),
        f"{_show_percent(measure.percent_by_minima(side))}, {_show_percent(measure.percent_by_medians(side))}",
        show_nbytes(figure.peak_extra_nbytes),
        _show_s(figure.median_cpu_s),
        f"{figure.num_verified}/{len(figure.samples)}",
        style=style,
    )


def _too_good(measure: Measure, side: str) -> str:
    percent = measure.percent_by_minima(side)
    return (
        f"[red]{side} at {percent:.0f} % of {measure.limit.value}: above {MAX_PERCENT:.0f} % it is a bug of the "
        "benchmark, or a probe that was disturbed."
    )


def _rate(measure: Measure, seconds: float) -> str:
    return show_nbytes(measure.nbytes / seconds)


def _show_percent(percent: float) -> str:
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.1g}"


def _show_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


_TABLE_OF: Mapping[type[Any], Callable[[Any], Table]] = {
    SpreadResult: _spread_table,
    DrainResult: _drain_table,
    FirstResult: _first_table,
    SteadyResult: _steady_table,
}
