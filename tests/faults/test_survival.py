"""The README promises what tests show, and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.faults.survival import ROWS, table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_readme_has_the_table():
    assert table() in README, "run python -m tests.faults.survival and put what it prints into the README"


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_every_line_of_it_has_tests_that_exist(test):
    module, _, function = test.partition("::")
    assert callable(getattr(importlib.import_module(f"tests.{module}"), function))
