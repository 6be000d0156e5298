"""``ray-dcp prune ROOT``: remove what failed saves left behind."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_dcp.catalog.committed import is_committed
from ray_dcp.catalog.explain import require_folder, root_exists
from ray_dcp.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, StoreError
from ray_dcp.maintenance.sweep.removal import (
    GRACE_S,
    Leftover,
    SweepPlan,
    SweepReport,
    Waiting,
    delete_leftovers,
    plan_sweep,
)
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url
from ray_dcp.store.open import open_store

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_ROWS = 60


@dataclass(frozen=True, slots=True)
class Pruning:
    """What ``prune`` prints; ``report`` is None with ``--dry-run``."""

    root: str
    grace_s: float
    num_files: int
    nbytes: int
    leftovers: Sequence[Leftover]
    empty_folders: Sequence[str]
    waiting: Sequence[Waiting]
    unreadable: Sequence[str]
    report: SweepReport | None


def add_prune(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``prune``."""
    parser = commands.add_parser(
        "prune",
        help="remove what failed saves left behind under a root",
        description="Remove the files of saves that failed, were replaced or never finished from all folders under\n"
        "ROOT, and say which. A file that a committed checkpoint needs is never one of them, nor is one\n"
        "that ray_dcp did not write. While a committed checkpoint cannot be read, nothing is removed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="path or URL of the folder that holds the step folders")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument(
        "--grace",
        metavar="TIME",
        type=_seconds,
        default=GRACE_S,
        help="leave alone what has changed in this time: seconds, or 90s, 30m, 2h, 1d (default: 1h). A save that runs\n"
        "may not change anything for as long as its slowest rank writes",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(command=prune_root)


def prune_root(arguments: argparse.Namespace) -> int:
    """Print the plan, then carry it out. Raises where nothing could be planned, or not all could be deleted."""
    from ray_dcp.cli import output

    root = absolute(arguments.root, setting="ROOT")
    _require_root(root)
    plan = plan_sweep(root, grace_s=arguments.grace)
    if not arguments.json:
        _print_plan(plan)
    report = None if arguments.dry_run or plan.unreadable else delete_leftovers(plan)
    if arguments.json:
        output.print_json(_pruning(plan, report))
    elif report is not None:
        _print_report(report)
    if plan.unreadable:
        count = output.counted(len(plan.unreadable), "checkpoint")
        raise CorruptCheckpointError(f"nothing is removed: {count} cannot be read", file=shown_url(plan.root))
    if report is not None and report.failed:
        failed = output.counted(len(report.failed), "file")
        raise StoreError(f"{failed} could not be removed: {report.failed[0].message}", url=shown_url(plan.root))
    return 0


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give seconds, or 90s, 30m, 2h, 1d")
    return float(match[1]) * _SECONDS[match[2]]


def _require_root(root: str) -> None:
    store = open_store(root)
    require_folder(store)
    if is_committed(store):
        raise ConfigError("ROOT", f"{shown_url(root)} is itself a checkpoint; pass the folder that holds it")
    if not store.list_folders() and not root_exists(store):
        raise CheckpointNotFoundError(shown_url(root), "nothing is there")


def _pruning(plan: SweepPlan, report: SweepReport | None) -> Pruning:
    return Pruning(
        root=plan.root,
        grace_s=plan.grace_s,
        num_files=len(plan.leftovers),
        nbytes=plan.nbytes,
        leftovers=plan.leftovers,
        empty_folders=[folder.folder for folder in plan.folders if not folder.leftovers],
        waiting=plan.waiting,
        unreadable=plan.unreadable,
        report=report,
    )


def _print_plan(plan: SweepPlan) -> None:
    from ray_dcp.cli import output

    for line in plan.unreadable:
        output.print_line(f"cannot be read: {line}", style="red")
    leftovers = plan.leftovers
    if leftovers:
        total = output.format_nbytes(plan.nbytes)
        output.print_line(f"{output.counted(len(leftovers), 'leftover file')}, {total}, under {shown_url(plan.root)}")
        output.print_line()
        table = output.new_table("file", "size", "modified", "why", right=("size",))
        for one in leftovers[:_MAX_ROWS]:
            output.add_row(
                table, one.key, output.format_nbytes(one.nbytes), output.format_time(one.modified), one.reason
            )
        output.print_table(table)
        if len(leftovers) > _MAX_ROWS:
            output.print_line(f"and {len(leftovers) - _MAX_ROWS} more, all of them with --json")
    elif not plan.unreadable:
        output.print_line(f"no leftover files under {shown_url(plan.root)}")
    for folder in plan.folders:
        if not folder.leftovers:
            output.print_line(f"empty folder {folder.folder}")
    _print_waiting(plan.waiting)


def _print_waiting(waiting: Sequence[Waiting]) -> None:
    from ray_dcp.cli import output

    if not waiting:
        return
    count = output.counted(sum(one.num_files for one in waiting), "file")
    output.print_line()
    output.print_line(f"left for now, too young: {count}, {output.format_nbytes(sum(one.nbytes for one in waiting))}")
    for one in waiting[:_MAX_ROWS]:
        until = "" if one.eligible is None else f", until {output.format_time(one.eligible)}"
        files, nbytes = output.counted(one.num_files, "file"), output.format_nbytes(one.nbytes)
        output.print_line(f"  {one.folder}  {files}, {nbytes}  {one.reason}{until}")


def _print_report(report: SweepReport) -> None:
    from ray_dcp.cli import output

    if report.deleted or report.failed or report.changed:
        output.print_line()
        output.print_line(
            f"removed {output.counted(len(report.deleted), 'file')}, {output.format_nbytes(report.nbytes)}"
        )
    for key in report.changed:
        output.print_line(f"left alone, it has changed since: {key}")
    for failure in report.failed:
        output.print_line(f"not removed: {failure.key}: {failure.message}", style="red")
