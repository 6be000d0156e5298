"""What ranks compute beside a save: pieces of work of about a millisecond, to be counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

_MATRIX_ROWS = 256
_PYTHON_STEPS = 20_000


def _matmul() -> Callable[[], object]:
    """Products of matrices that fit into a core's cache, by one thread of torch."""
    left, right = torch.rand(_MATRIX_ROWS, _MATRIX_ROWS), torch.rand(_MATRIX_ROWS, _MATRIX_ROWS)
    into = torch.empty(_MATRIX_ROWS, _MATRIX_ROWS)
    return lambda: torch.matmul(left, right, out=into)


def _python() -> Callable[[], object]:
    """A loop of Python, which needs the interpreter's lock all the time."""

    def count() -> int:
        total = 0
        for number in range(_PYTHON_STEPS):
            total += number & 3
        return total

    return count


LOOPS: Mapping[str, Callable[[], Callable[[], object]]] = {"matmul": _matmul, "python": _python}
"""Makers of a piece of work, by name."""


def rate_while(piece: Callable[[], object], goes_on: Callable[[], bool]) -> float:
    """How many pieces are done a second for as long as ``goes_on``, one at least."""
    began_s, count = time.monotonic(), 0
    while True:
        piece()
        count += 1
        if not goes_on():
            return count / (time.monotonic() - began_s)
