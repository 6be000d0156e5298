"""What the user sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from recovery_parts.fetched import MEMORY, SOURCES, Fetch, median_of
from recovery_parts.timeline import PARTS, Summary

TARGETS: Mapping[str, float] = {"rank": 0.8, "node": 0.2}
"""How long a recovery with ray_dcp may take at most, as a share of the same with torch's DCP."""
FETCH_TARGETS: Mapping[bool, float] = {False: 1.5, True: 5.0}
"""How many times as fast a load from memory is to be at least as one from a disk (False) or a bucket (True)."""
_NOTES = """\
Both sides: the same cluster (a head without CPUs, two nodes with one each), new for each run; model, loop and disk; \
Ray's default health checks, intervals and timeouts. Interleaved A, B, B, A.
Set for both: {settings}
torch: elastic TorchTrainer, torch.distributed.checkpoint.save and ray.train.report as Ray's guide shows them.
ray_dcp: the same with CheckpointManager, ray_dcp.train.report and RunConfig(callbacks=[CheckpointCallback()]).
All nodes are processes of one machine: what is killed closes its connections, so survivors notice at once, imports \
come from warm files, and all share its CPUs. A node that loses power closes nothing."""


def notes(settings: Mapping[str, str]) -> str:
    """Say what is the same on both sides, and what is not."""
    return _NOTES.format(settings=", ".join(f"{name}={value}" for name, value in settings.items()))


def table_of(victim: str, summaries: Mapping[str, Summary]) -> Table:
    """A row for each figure, a column for each side."""
    num_runs = max(len(summary.recoveries) for summary in summaries.values())
    table = Table(
        title=f"{victim} killed, {num_runs} run{'s' if num_runs > 1 else ''} of each",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("", no_wrap=True)
    for side in summaries:
        table.add_column(side, justify="right", no_wrap=True)
    rows = summaries.values()
    table.add_row("survivors have the error, median", *(_show_s(summary.median_errors_s) for summary in rows))
    table.add_row("[bold]next optimizer step, median", *(f"[bold]{_show_s(summary.median_s)}" for summary in rows))
    table.add_row("next optimizer step, min", *(_show_s(summary.min_s) for summary in rows))
    table.add_row("steps repeated, median", *(f"{summary.median_steps_repeated:g}" for summary in rows))
    table.add_row(
        "workers afterwards",
        *("/".join(sorted({str(recovery.num_workers) for recovery in summary.recoveries})) for summary in rows),
    )
    table.add_section()
    for part in PARTS:
        table.add_row(f"{part}, median, share", *(_show_part(summary, part) for summary in rows))
    return table


def parts_explained() -> str:
    return "\n".join(f"[dim]{part}: {meaning}" for part, meaning in PARTS.items())


def verdict(victim: str, own: Summary, other: Summary) -> str:
    """Say whether the target was met; by medians."""
    ratio, target = own.median_s / other.median_s, TARGETS[victim]
    met = "[green]met[/]" if ratio <= target else "[red]not met[/]"
    return (
        f"[bold]{victim} killed[/]: ray_dcp takes [bold]{ratio:.2f}[/] times as long as torch under Ray's defaults "
        f"(by minima {own.min_s / other.min_s:.2f}); target: at most {target:g}: {met}"
    )


def fetch_lines(fetches: Sequence[Fetch], nbytes: int, *, in_bucket: bool, victim: str = "rank") -> str:
    """A line for each source, and whether the target was met; by medians."""
    lines = [f"[bold]fetch after SIGKILL of one {victim}[/], {nbytes / 2**20:g} MiB on two ranks, medians"]
    memory = median_of(fetches, MEMORY)
    for source in SOURCES:
        seconds = median_of(fetches, source)
        if seconds is None or memory is None:
            continue
        line = f"from {source}: {_show_s(seconds)}"
        if source != MEMORY:
            ratio, target = seconds / memory, FETCH_TARGETS[in_bucket]
            met = "[green]met[/]" if ratio >= target else "[red]not met[/]"
            line += f"; memory is [bold]{ratio:.2f}[/] times as fast"
            # All nodes are one machine here: its page cache is nearer than another node's memory, and no goal.
            line += f", target: {target:g}: {met}" if victim == "rank" else ""
        lines.append(line)
    return "\n".join(lines)


def failures(failed: Sequence[str]) -> str:
    return "\n".join(f"[red]failed: {what}" for what in failed)


def _show_s(seconds: float | None) -> str:
    if seconds is None:
        return "none"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


def _show_part(summary: Summary, part: str) -> str:
    return f"{_show_s(summary.median_part_s(part))} {summary.share_of(part):4.0%}"
