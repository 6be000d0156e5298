"""``ray-dcp copy CKPT DESTINATION``: a checkpoint to another place, checked on its way."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ray_dcp.cli.progress_bar import progress_bar
from ray_dcp.maintenance.checkpoint_copy import CopyReport, copy_checkpoint, plan_copy
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_copy(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``copy``."""
    parser = commands.add_parser(
        "copy",
        help="copy a checkpoint to another place and check it on the way",
        description="Copy a committed checkpoint to a folder or bucket, between any two kinds of places. Each byte is\n"
        "checked as verify does; where one is wrong, nothing is copied. The copy is the same, byte for byte.\n"
        "It is committed last: whatever happens, it is there as a whole or not at all.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="path or URL of the checkpoint's folder")
    parser.add_argument("destination", metavar="DESTINATION", help="path or URL of the folder that becomes the copy")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace what is at DESTINATION. A checkpoint there stays until the copy is committed, unless the names\n"
        "of its files are needed: then it goes first",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command=copy)


def copy(arguments: argparse.Namespace) -> int:
    """Copy, and print what was copied. Raises where not all of it could be."""
    from ray_dcp.cli import output

    plan = plan_copy(
        absolute(arguments.checkpoint, setting="CKPT"), arguments.destination, overwrite=arguments.overwrite
    )
    with progress_bar("copy", plan.nbytes) as on_bytes:
        report = copy_checkpoint(plan, on_bytes=on_bytes)
    if arguments.json:
        output.print_json(report)
    else:
        _print_report(report)
    return 0


def _print_report(report: CopyReport) -> None:
    from ray_dcp.cli import output

    rate = f", {output.format_nbytes(int(report.nbytes / report.seconds))}/s" if report.seconds > 0 else ""
    output.print_line(
        f"copied {output.counted(report.num_files, 'file')}, {output.format_nbytes(report.nbytes)}, to "
        f"{shown_url(report.destination)} in {report.seconds:.1f} s{rate}"
    )
    output.print_line(f"{output.counted(report.num_blocks_checked, 'block')} checked")
    if report.unchecked:
        output.print_line(f"copied as they are, not checkable: {output.counted(len(report.unchecked), 'item')}")
