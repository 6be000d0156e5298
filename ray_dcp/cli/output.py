"""How commands print: tables for people, JSON of the same dataclasses for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ray_dcp.wording import counted, format_nbytes, number_runs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "add_row",
    "counted",
    "format_metrics",
    "format_nbytes",
    "format_ranks",
    "format_time",
    "new_table",
    "print_json",
    "print_line",
    "print_table",
]

_PIPE_WIDTH = 1000


def print_json(shown: DataclassInstance) -> None:
    """Print a dataclass; numbers that are not finite appear as Python writes them (``NaN``, ``Infinity``)."""
    print(json.dumps(dataclasses.asdict(shown), indent=2, default=list))


def print_line(text: str = "", *, style: str = "") -> None:
    """Print text as it is, on one line; no markup is read from it."""
    _print_rendered(Text(text, style=style), soft_wrap=True)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table of words and spaces, with one line under its head."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add cells as they are: a name such as ``[bold]`` is not markup."""
    table.add_row(*(Text(cell) for cell in cells))


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal at most; a pipe gets each row on one line, for grep."""
    _print_rendered(table)


def _print_rendered(rendered: Text | Table, *, soft_wrap: bool = False) -> None:
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, width=_PIPE_WIDTH if wide else None)
    with console.capture() as capture:
        console.print(rendered, soft_wrap=soft_wrap)
    for line in capture.get().splitlines():
        print(line.rstrip())


def format_time(seconds: float) -> str:
    """A time in this machine's zone, to the minute; a dash where it is not known."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Names and values on one line, floats to four digits."""
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in metrics.items())


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Sorted ranks with runs joined: ``0-3, 6``; a dash for none."""
    return number_runs(ranks) or "-"
