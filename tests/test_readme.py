"""The README's code runs, and it stays short."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slack import within

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_its_two_commands_come_first_and_exist():
    first = re.search(r"```console\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


def test_it_is_short():
    assert len(README.splitlines()) <= 200
    assert len([line for line in CODE[0].splitlines() if line.strip()]) <= 16


@pytest.mark.ray
@pytest.mark.slow
def test_its_first_program_runs(tmp_path):
    program = (
        CODE[0]
        .replace("/tmp/run", str(tmp_path))
        .replace(
            "ray.init()",
            'ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)',
        )
    )
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    ran = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=within(200),
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "loaded=('step', 'weight')" in ran.stdout
    assert "'step': 100" in ran.stdout
    assert "[3., 3., 3., 3.]" in ran.stdout


@pytest.mark.parametrize("code", CODE)
def test_every_program_parses(code):
    ast.parse(code)


@pytest.mark.parametrize("path", re.findall(r"`((?:jobs|docs|ray_dcp)/[\w/.]+)`", README))
def test_every_file_it_names_exists(path):
    assert (ROOT / path).exists()
