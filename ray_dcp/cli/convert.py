"""``ray-dcp convert SOURCE DEST``: DCP checkpoints, safetensors files and torch.save files into each other."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_dcp.cli.progress_bar import progress_bar
from ray_dcp.store.location.urls import shown_url

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ray_dcp.convert.conversion import ConvertReport
    from ray_dcp.convert.conversion_plan import ConvertPlan

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_ROWS = 60


@dataclass(frozen=True, slots=True)
class ConvertedFile:
    """One file that was or will be written."""

    key: str
    nbytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """What ``convert`` prints; ``report`` is None with ``--dry-run``."""

    source: str
    source_format: str
    dest: str
    dest_format: str
    num_tensors: int
    num_objects: int
    nbytes: int
    """Bytes of the tensors."""
    names: Sequence[str]
    """Names that the values have at the destination."""
    left_out: Sequence[str]
    files: Sequence[ConvertedFile]
    """The files; empty for a DCP checkpoint, whose files are named when they are written."""
    index: str | None
    replaced: Sequence[str]
    report: ConvertReport | None


def add_convert(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``convert``."""
    parser = commands.add_parser(
        "convert",
        help="convert between DCP checkpoints, safetensors and torch.save files",
        description="Read SOURCE, whichever of the three it is, and write it to DEST: a DCP checkpoint (a folder),\n"
        "safetensors (a folder, or one file *.safetensors) or a file of torch.save. One tensor is in\n"
        "memory at a time; names, dtypes and bytes stay as they are. DEST appears only when it is whole.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="path or URL of a folder or file")
    parser.add_argument("dest", metavar="DEST", help="path or URL of the folder or file to write")
    parser.add_argument(
        "--to",
        choices=("dcp", "safetensors", "torch"),
        help="format of DEST; may be left out where its name ends in .safetensors, .pt, .pth, .bin or .ckpt",
    )
    patterns: dict[str, Any] = {"metavar": "PATTERN", "action": "append", "default": []}
    parser.add_argument("--include", **patterns, help="only names that fit, as model.layers.* (may be repeated)")
    parser.add_argument("--exclude", **patterns, help="no names that fit, as optimizer.* (may be repeated)")
    parser.add_argument("--strip-prefix", metavar="TEXT", default="", help="take TEXT off names that begin with it")
    parser.add_argument("--add-prefix", metavar="TEXT", default="", help="put TEXT in front of all names")
    parser.add_argument("--skip-python", action="store_true", help="leave out values that are not tensors")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_nbytes,
        help="split safetensors in a folder: bytes, or 500MB, 5GB, 2GiB (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is at DEST")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be written")
    parser.add_argument("--json", action="store_true", help="print the same as JSON, all names")
    parser.set_defaults(command=convert_source)


def convert_source(arguments: argparse.Namespace) -> int:
    """Print the plan, then carry it out. Raises where nothing could be planned, or not all could be written."""
    from ray_dcp.cli import output

    # Both need torch, which takes seconds to import: the command line starts without it.
    from ray_dcp.convert.conversion import convert
    from ray_dcp.convert.conversion_plan import ConvertOptions, plan_convert

    options = ConvertOptions(
        to=arguments.to,
        include=arguments.include,
        exclude=arguments.exclude,
        strip_prefix=arguments.strip_prefix,
        add_prefix=arguments.add_prefix,
        skip_python=arguments.skip_python,
        max_shard_nbytes=arguments.max_shard_size,
        overwrite=arguments.overwrite,
    )
    plan = plan_convert(arguments.source, arguments.dest, options)
    if not arguments.json:
        _print_plan(plan)
    report = None
    if not arguments.dry_run:
        with progress_bar("convert", plan.nbytes) as on_progress:
            report = convert(plan, on_progress)
    if arguments.json:
        output.print_json(_conversion(plan, report))
    elif report is not None:
        output.print_line(f"written in {report.seconds:.1f} s")
    return 0


def _nbytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]) if match else 0
    if nbytes <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give bytes, or 500MB, 5GB, 2GiB")
    return nbytes


def _conversion(plan: ConvertPlan, report: ConvertReport | None) -> Conversion:
    num_tensors = sum(planned.value.dtype is not None for planned in plan.values)
    return Conversion(
        source=shown_url(plan.source.location),
        source_format=plan.source.kind,
        dest=shown_url(plan.dest),
        dest_format=plan.dest_kind,
        num_tensors=num_tensors,
        num_objects=len(plan.values) - num_tensors,
        nbytes=plan.nbytes,
        names=[planned.name for planned in plan.values],
        left_out=plan.left_out,
        files=[ConvertedFile(file.key, file.nbytes, len(file.values)) for file in plan.files],
        index=plan.index,
        replaced=plan.replaced,
        report=report,
    )


def _print_plan(plan: ConvertPlan) -> None:
    from ray_dcp.cli import output

    shown = _conversion(plan, None)
    output.print_line(f"from  {shown.source} ({shown.source_format})")
    output.print_line(f"to    {shown.dest} ({shown.dest_format})")
    objects = f", {output.counted(shown.num_objects, 'Python value')}" if shown.num_objects else ""
    output.print_line(f"{output.counted(shown.num_tensors, 'tensor')}, {output.format_nbytes(shown.nbytes)}{objects}")
    if shown.left_out:
        output.print_line(f"{output.counted(len(shown.left_out), 'value')} left out")
    for file in shown.files[:_MAX_ROWS]:
        held = output.counted(file.num_tensors, "tensor")
        output.print_line(f"  {file.key}  {output.format_nbytes(file.nbytes)}, {held}")
    if len(shown.files) > _MAX_ROWS:
        output.print_line(f"  and {len(shown.files) - _MAX_ROWS} more, all of them with --json")
    if shown.index:
        output.print_line(f"  {shown.index}")
    if shown.replaced:
        output.print_line(f"replaces {', '.join(shown.replaced)}")
