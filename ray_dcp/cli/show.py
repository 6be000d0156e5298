"""``ray-dcp show CKPT``: what is in one checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ray_dcp.cli.contents import CheckpointContents, read_contents
from ray_dcp.format.manifest import ranks_by_value
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_MAX_ROWS = 60


def add_show(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``show``."""
    parser = commands.add_parser(
        "show",
        help="show what is in a checkpoint",
        description=f"Show the facts of a checkpoint and the first {_MAX_ROWS} of its tensors and Python objects,\n"
        "sorted by name. --json has all of them. No shard file is read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="path or URL of the checkpoint's folder")
    parser.add_argument("--json", action="store_true", help="print the same as JSON, all names")
    parser.set_defaults(command=show_checkpoint)


def show_checkpoint(arguments: argparse.Namespace) -> int:
    """Show a checkpoint. Raises ``CheckpointNotFoundError`` where none is committed."""
    from ray_dcp.cli import output

    contents = read_contents(absolute(arguments.checkpoint, setting="CKPT"))
    if arguments.json:
        output.print_json(contents)
        return 0
    _print_facts(contents)
    _print_tensors(contents)
    _print_objects(contents)
    _print_differing(contents)
    return 0


def _print_facts(contents: CheckpointContents) -> None:
    from ray_dcp.cli import output

    info = contents.checkpoint
    versions = ", ".join(f"{name} {version}" for name, version in contents.versions.items())
    unknown = "torch, without a manifest" if contents.files == "dcp" else f"{contents.files} files, without checksums"
    by = f"{output.counted(info.world_size, 'rank')}" if info.world_size is not None else unknown
    facts = {
        "checkpoint": shown_url(info.checkpoint_id),
        "step": _step(contents),
        "created": output.format_time(info.created),
        "size": f"{output.format_nbytes(info.nbytes)} ({info.nbytes} bytes)",
        "saved by": by + (f", {versions}" if versions else ""),
        "metrics": output.format_metrics(info.metrics),
        "attempt": contents.attempt or "",
        "format": "" if contents.format_version is None else str(contents.format_version),
    }
    for name, value in facts.items():
        if value:
            output.print_line(f"{name:<12}{value}")


def _step(contents: CheckpointContents) -> str:
    step, saved = contents.checkpoint.step, contents.saved_as_step
    shown = "-" if step is None else str(step)
    return shown if saved is None or saved == step else f"{shown} (saved as step {saved})"


def _print_tensors(contents: CheckpointContents) -> None:
    from ray_dcp.cli import output

    total = output.format_nbytes(sum(tensor.nbytes for tensor in contents.tensors))
    output.print_line()
    output.print_line(f"{output.counted(len(contents.tensors), 'tensor')}, {total}", style="bold")
    table = output.new_table("name", "shape", "dtype", "chunks", "size", "ranks", right=("chunks", "size"))
    for tensor in contents.tensors[:_MAX_ROWS]:
        output.add_row(
            table,
            tensor.fqn,
            "x".join(str(extent) for extent in tensor.shape) or "scalar",
            tensor.dtype,
            str(tensor.num_chunks),
            output.format_nbytes(tensor.nbytes),
            output.format_ranks(tensor.ranks),
        )
    if contents.tensors:
        output.print_table(table)
    _print_rest(len(contents.tensors))


def _print_objects(contents: CheckpointContents) -> None:
    from ray_dcp.cli import output

    if not contents.objects:
        return
    output.print_line()
    output.print_line(output.counted(len(contents.objects), "Python object"), style="bold")
    table = output.new_table("name", "size", "ranks", right=("size",))
    for one in contents.objects[:_MAX_ROWS]:
        output.add_row(table, one.fqn, output.format_nbytes(one.nbytes), output.format_ranks(one.ranks))
    output.print_table(table)
    _print_rest(len(contents.objects))


def _print_differing(contents: CheckpointContents) -> None:
    from ray_dcp.cli import output

    if not contents.differing:
        return
    output.print_line()
    values = output.counted(len(contents.differing), "value")
    output.print_line(f"{values} differed between ranks when this was saved; the first rank's is stored", style="bold")
    table = output.new_table("name", "ranks by value", "largest difference", right=("largest difference",))
    for one in contents.differing[:_MAX_ROWS]:
        apart = "" if one.largest_difference is None else f"{one.largest_difference:.3g}"
        output.add_row(table, one.fqn, ranks_by_value(one.ranks).removeprefix("ranks "), apart)
    output.print_table(table)
    _print_rest(len(contents.differing))


def _print_rest(number: int) -> None:
    from ray_dcp.cli import output

    if number > _MAX_ROWS:
        output.print_line(f"... and {number - _MAX_ROWS} more; --json shows all")
