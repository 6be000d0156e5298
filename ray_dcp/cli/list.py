"""``ray-dcp list ROOT``: the committed checkpoints of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_dcp.catalog.committed import is_committed
from ray_dcp.catalog.explain import require_checkpoint, require_folder, root_exists, what_is_there
from ray_dcp.catalog.facts import CheckpointInfo, is_safetensors
from ray_dcp.catalog.listing import UncommittedFolder, list_checkpoints, list_safetensors, list_uncommitted
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import folder_name, shown_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store

if TYPE_CHECKING:
    from argparse import _SubParsersAction


@dataclass(frozen=True, slots=True)
class RootListing:
    """What ``list`` prints."""

    root: str
    checkpoints: Sequence[CheckpointInfo]
    uncommitted: Sequence[UncommittedFolder]
    safetensors: Sequence[CheckpointInfo]
    """Folders of safetensors files, which load as well."""


def add_list(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``list``."""
    parser = commands.add_parser(
        "list",
        help="list the committed checkpoints under a root",
        description="List the committed checkpoints under ROOT, oldest step first, and saves that never finished.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", metavar="ROOT", help="path or URL of the folder that holds the step folders")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(command=list_root)


def list_root(arguments: argparse.Namespace) -> int:
    """List a root. Raises ``CheckpointNotFoundError`` where there is not even a root."""
    from ray_dcp.cli import output

    root = absolute(arguments.root, setting="ROOT")
    store = open_store(root)
    require_folder(store)
    found = list_checkpoints(root)
    listing = RootListing(store.url, found, list_uncommitted(root), list_safetensors(root, known=found))
    nothing = not listing.checkpoints and not listing.uncommitted and not listing.safetensors
    if nothing and not root_exists(store):
        require_checkpoint(store)
    if arguments.json:
        output.print_json(listing)
        return 0
    if listing.checkpoints:
        _print_checkpoints(listing)
    elif is_committed(store):
        output.print_line(f"{shown_url(root)} is itself a checkpoint: see ray-dcp show")
    elif is_safetensors(root):
        output.print_line(f"{shown_url(root)} holds safetensors files, and is itself a checkpoint: see ray-dcp show")
    elif not listing.safetensors:
        output.print_line(f"no checkpoints under {shown_url(root)}{_why_none(store)}")
    for model in listing.safetensors:
        output.print_line(f"safetensors: {_name(model)}  {output.format_nbytes(model.nbytes)}: see ray-dcp show")
    if listing.uncommitted:
        output.print_line()
        output.print_line(f"{len(listing.uncommitted)} unfinished:", style="yellow")
        for one in listing.uncommitted:
            output.print_line(f"  {_name(one)}  {output.format_nbytes(one.nbytes)}  {one.reason}")
    return 0


def _why_none(store: Store) -> str:
    """What lies there, where it has no folders: it may have been taken for a root."""
    return "" if store.list_folders() else f": {what_is_there(store)}"


def _print_checkpoints(listing: RootListing) -> None:
    from ray_dcp.cli import output

    total = output.format_nbytes(sum(info.nbytes for info in listing.checkpoints))
    count = output.counted(len(listing.checkpoints), "checkpoint")
    output.print_line(f"{count}, {total}, under {shown_url(listing.root)}")
    output.print_line()
    table = output.new_table("step", "folder", "size", "ranks", "created", "metrics", right=("step", "size", "ranks"))
    for info in listing.checkpoints:
        output.add_row(
            table,
            "-" if info.step is None else str(info.step),
            _name(info),
            output.format_nbytes(info.nbytes),
            "-" if info.world_size is None else str(info.world_size),
            output.format_time(info.created),
            output.format_metrics(info.metrics),
        )
    output.print_table(table)


def _name(one: CheckpointInfo | UncommittedFolder) -> str:
    return folder_name(one.checkpoint_id)
