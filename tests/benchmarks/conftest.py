"""Parts of the benchmarks, which are no package that is installed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def side_by_side(monkeypatch):
    """Import a module of the comparison."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"side_by_side.{name}")
