"""A bar for what takes long: bytes, rate and time left, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(doing: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while the block runs; yield a function to call with each number of bytes that are done.

    Nothing is shown where stderr is not a terminal. The bar goes away at the end.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(doing, total=nbytes)
        yield lambda done: progress.advance(task, done)
