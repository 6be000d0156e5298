"""What a benchmark leaves behind when it ends, however it ends: nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator


def clean_up_on_sigterm() -> None:
    """Give a plain SIGTERM the clean-up that Ctrl-C gets."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def temporary_folder(parent: str | None, prefix: str) -> Iterator[str]:
    """A folder in ``parent`` (None: in the temporary folder) for the length of the block; its absolute path."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    try:
        yield os.path.abspath(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
