"""``ray-dcp verify CKPT``: whether a checkpoint still is what was written."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_dcp.catalog.committed import is_committed
from ray_dcp.catalog.explain import require_folder, what_is_there
from ray_dcp.catalog.listing import list_checkpoints
from ray_dcp.cli.progress_bar import progress_bar
from ray_dcp.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatVersionError,
)
from ray_dcp.maintenance.verify.verification import Unchecked, VerifyReport, plan_verify, verify_checkpoint
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import folder_name, join_url, shown_url
from ray_dcp.store.open import open_store

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_MAX_ROWS = 60


@dataclass(frozen=True, slots=True)
class VerifiedRoot:
    """What ``verify --all`` prints."""

    root: str
    checkpoints: Sequence[VerifyReport]
    unreadable: Sequence[str]
    """A line for each checkpoint that could not be verified at all."""


def add_verify(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``verify``."""
    parser = commands.add_parser(
        "verify",
        help="read all of a checkpoint again and check every byte",
        description="Read every shard file of a checkpoint again and check each block, all that stands around the\n"
        "blocks, the manifest and .metadata, and say everything that is damaged. Of a checkpoint that torch wrote,\n"
        "the records' own checksums are checked. Nothing is changed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="path or URL of the checkpoint's folder")
    parser.add_argument("--all", action="store_true", help="CKPT is a root: verify each checkpoint committed under it")
    parser.add_argument(
        "--sample",
        metavar="SHARE",
        type=_share,
        help="check only a random share of the blocks, such as 5%%, and all that stands around them",
    )
    parser.add_argument("--seed", type=int, help="of the sample: the same blocks again (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(command=verify)


def verify(arguments: argparse.Namespace) -> int:
    """Print a report. Raises ``CorruptCheckpointError`` where anything is damaged."""
    from ray_dcp.cli import output

    if arguments.all:
        return _verify_root(arguments)
    report = _verify_one(absolute(arguments.checkpoint, setting="CKPT"), arguments)
    if arguments.json:
        output.print_json(report)
    else:
        _print_report(report)
    _require_whole([report])
    return 0


def _verify_root(arguments: argparse.Namespace) -> int:
    from ray_dcp.cli import output

    root = absolute(arguments.checkpoint, setting="CKPT")
    store = open_store(root)
    require_folder(store)
    if is_committed(store):
        raise ConfigError("--all", f"{shown_url(root)} is itself a checkpoint; leave out --all")
    found = list_checkpoints(root)
    if not found:
        raise CheckpointNotFoundError(root, f"none is committed under it: {what_is_there(store)}")
    reports, unreadable = [], []
    for number, info in enumerate(found):
        try:
            reports.append(_verify_one(info.checkpoint_id, arguments))
        except CheckpointNotFoundError:
            continue  # deleted since
        except (CorruptCheckpointError, FormatVersionError) as error:
            unreadable.append(str(error))
            continue
        if not arguments.json:
            if number:
                output.print_line()
            _print_report(reports[-1])
    if arguments.json:
        output.print_json(VerifiedRoot(root, reports, unreadable))
    else:
        for line in unreadable:
            output.print_line(f"cannot be verified: {line}", style="red")
    _require_whole(reports)
    if unreadable:
        raise CorruptCheckpointError(f"{output.counted(len(unreadable), 'checkpoint')} cannot be verified", file=root)
    return 0


def _verify_one(checkpoint_id: str, arguments: argparse.Namespace) -> VerifyReport:
    plan = plan_verify(checkpoint_id, sample=arguments.sample, seed=arguments.seed)
    to_read = int(plan.nbytes * (plan.sample or 1))
    with progress_bar(f"verify {_name(plan.checkpoint_id)}", to_read) as on_bytes:
        return verify_checkpoint(plan, on_bytes=on_bytes)


def _share(text: str) -> float | None:
    match = _SHARE.fullmatch(text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the blocks: give something like 5%")
    return share if share < 1 else None


def _name(checkpoint_id: str) -> str:
    return folder_name(checkpoint_id)


def _require_whole(reports: Sequence[VerifyReport]) -> None:
    from ray_dcp.cli import output

    damaged = [report for report in reports if report.faults]
    if not damaged:
        return
    first = damaged[0].faults[0]
    count = output.counted(sum(len(report.faults) for report in damaged), "fault")
    raise CorruptCheckpointError(
        f"damaged, {count}; the first: {first.problem}",
        file=shown_url(join_url(damaged[0].checkpoint_id, first.file)),
        fqn=first.fqn,
        offset=first.start,
        nbytes=max(0, first.end - first.start),
    )


def _print_report(report: VerifyReport) -> None:
    from ray_dcp.cli import output

    rate = f", {output.format_nbytes(int(report.nbytes_checked / report.seconds))}/s" if report.seconds > 0 else ""
    share = f"{report.num_blocks_checked} of {report.num_blocks} blocks"
    if report.sample is not None:
        share += f" (a sample of {100 * report.sample:.3g}%, --seed {report.seed})"
    by = "" if report.has_manifest else ", by the records' own checksums: there is no manifest"
    output.print_line(
        f"{shown_url(report.checkpoint_id)}: {output.counted(report.num_items, 'item')} in "
        f"{output.counted(report.num_files, 'file')}, {output.format_nbytes(report.nbytes)}{by}"
    )
    output.print_line(f"checked {share}, {output.format_nbytes(report.nbytes_checked)} in {report.seconds:.1f} s{rate}")
    for note in report.notes:
        output.print_line(f"note: {note}")
    _print_unchecked(report.unchecked)
    if report.faults:
        _print_faults(report)
    else:
        output.print_line("no damage found" if report.sample is not None or report.unchecked else "whole")


def _print_unchecked(unchecked: Sequence[Unchecked]) -> None:
    from ray_dcp.cli import output

    for reason in sorted({one.reason for one in unchecked}):
        names = [_item(one.fqn, one.offsets) for one in unchecked if one.reason == reason]
        output.print_line(f"not checkable: {output.counted(len(names), 'item')}, {reason}: {_some(names)}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")


def _item(fqn: str, offsets: tuple[int, ...] | None) -> str:
    return f"{fqn} at {', '.join(map(str, offsets))}" if offsets and any(offsets) else fqn


def _print_faults(report: VerifyReport) -> None:
    from ray_dcp.cli import output

    output.print_line()
    output.print_line(output.counted(len(report.faults), "fault"), style="bold red")
    table = output.new_table("file", "item", "rank", "bytes", "what is wrong", right=("rank",))
    for fault in report.faults[:_MAX_ROWS]:
        place = f"{fault.start}-{fault.end}" if fault.end > fault.start else "-"
        rank = "-" if fault.rank is None else str(fault.rank)
        output.add_row(table, fault.file, _item(fault.fqn, fault.offsets) or "-", rank, place, fault.problem)
    output.print_table(table)
    if len(report.faults) > _MAX_ROWS:
        output.print_line(f"... and {len(report.faults) - _MAX_ROWS} more; --json shows all")
