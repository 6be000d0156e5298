"""``ray-dcp show CKPT``: what is in one checkpoint, or (``--plan``) what a load of it would read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ray_dcp.catalog.committed import open_manifest
from ray_dcp.catalog.facts import describe
from ray_dcp.cli.contents import CheckpointContents, read_contents
from ray_dcp.errors import ConfigError
from ray_dcp.format.manifest import ranks_by_value
from ray_dcp.reads.plan.shape import read_shape
from ray_dcp.reads.plan.whole_load import PlannedLoad, plan_load
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import traits_of

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_MAX_ROWS = 60
_MAX_RANGES = 4


def add_show(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``show``."""
    parser = commands.add_parser(
        "show",
        help="show what is in a checkpoint",
        description=f"Show the facts of a checkpoint and the first {_MAX_ROWS} of its tensors and Python objects,\n"
        "sorted by name. --json has all of them. With --plan, show instead which bytes of which files\n"
        "--ranks ranks would read to load all of it. No shard file is read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="path or URL of the checkpoint's folder")
    parser.add_argument("--json", action="store_true", help="print the same as JSON, all names")
    parser.add_argument("--plan", action="store_true", help="show what a load would read; a manifest is needed")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="with --plan: so many ranks load, tensors split by rows (default: 1)"
    )
    parser.set_defaults(command=show_checkpoint)


def show_checkpoint(arguments: argparse.Namespace) -> int:
    """Show a checkpoint. Raises ``CheckpointNotFoundError`` where none is committed."""
    from ray_dcp.cli import output

    checkpoint_id = absolute(arguments.checkpoint, setting="CKPT")
    if arguments.plan:
        return _show_load(checkpoint_id, 1 if arguments.ranks is None else arguments.ranks, as_json=arguments.json)
    if arguments.ranks is not None:
        raise ConfigError("--ranks", "it goes with --plan")
    contents = read_contents(checkpoint_id)
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


def _show_load(checkpoint_id: str, num_ranks: int, *, as_json: bool) -> int:
    """Print the plan. Raises ``ConfigError`` where the checkpoint has no manifest to make it from."""
    from ray_dcp.cli import output

    if num_ranks < 1:
        raise ConfigError("--ranks", f"must be 1 or more, not {num_ranks}")
    location = describe(checkpoint_id).checkpoint_id
    store = open_store(location)
    manifest = open_manifest(store)
    if manifest is None:
        raise ConfigError("--plan", f"{shown_url(location)} has no manifest, which ray_dcp writes and torch does not")
    planned = plan_load(location, manifest.entries, read_shape(traits_of(store)), num_ranks)
    if as_json:
        output.print_json(planned)
    else:
        _print_ranks(planned)
        _print_files(planned)
    return 0


def _print_ranks(planned: PlannedLoad) -> None:
    from ray_dcp.cli import output

    by = "1 rank" if planned.num_ranks == 1 else f"{planned.num_ranks} ranks, tensors split by rows, each for itself"
    output.print_line(f"{shown_url(planned.checkpoint_id)}, loaded by {by}")
    output.print_line()
    columns = ("rank", "files", "requests", "read", "wanted")
    table = output.new_table(*columns, right=columns)
    for rank in planned.ranks[:_MAX_ROWS]:
        read, wanted = output.format_nbytes(rank.nbytes_read), output.format_nbytes(rank.nbytes_wanted)
        output.add_row(table, str(rank.rank), str(len(rank.files)), str(rank.num_requests), read, wanted)
    output.print_table(table)
    _print_rest(len(planned.ranks))


def _print_files(planned: PlannedLoad) -> None:
    from ray_dcp.cli import output

    rows = [(rank.rank, file) for rank in planned.ranks for file in rank.files]
    output.print_line()
    table = output.new_table(
        "rank", "file", "requests", "read", "bytes of the file", right=("rank", "requests", "read")
    )
    for rank, file in rows[:_MAX_ROWS]:
        read = output.format_nbytes(file.nbytes)
        output.add_row(table, str(rank), file.file, str(file.num_requests), read, _shown(file.ranges))
    if rows:
        output.print_table(table)
    _print_rest(len(rows))


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    first = ", ".join(f"{start}-{end}" for start, end in ranges[:_MAX_RANGES])
    return first + (f" and {len(ranges) - _MAX_RANGES} more" if len(ranges) > _MAX_RANGES else "")
