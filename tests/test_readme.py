"""The README's code runs, and it stays short."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.cli.main import main
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


def test_what_its_programs_name_of_ray_dcp_is_imported_and_there():
    imported = {alias.asname or alias.name for node in ast.walk(ast.parse("".join(CODE))) for alias in _names(node)}
    assert {"dcp", "ray_dcp.train"} <= imported
    import ray_dcp.train

    for dotted in set(re.findall(r"ray_dcp\.train\.(\w+)", "".join(CODE))):
        assert hasattr(ray_dcp.train, dotted)


def _names(node):
    return node.names if isinstance(node, ast.Import) else []


def test_it_says_how_to_make_the_environment_alone():
    (target,) = re.findall(r"`make (\.venv/\S+)`", README)
    makefile = (ROOT / "Makefile").read_text()
    assert target == ".venv/" + re.findall(r"STAMP := \$\(VENV\)/(\S+)", makefile)[0]


def test_its_rename_and_its_conversion_are_those_of_its_own_programs(tmp_path):
    (rename,) = re.findall(r"`rename=(\{.*?\})`", README)
    dcp.save({"model": {"module.w": torch.ones(1)}, "step": 100}, checkpoint_id=tmp_path / "c", no_dist=True)
    template = {"model": {"w": torch.zeros(1)}}
    dcp.load(template, checkpoint_id=tmp_path / "c", no_dist=True, rename=ast.literal_eval(rename))
    assert template["model"]["w"].item() == 1
    (options,) = re.findall(r"ray-dcp convert \S+ \S+ (.*?)  +#", README)
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "out"), *options.split()]) == 0


@pytest.mark.parametrize("path", re.findall(r"`((?:jobs|docs|ray_dcp)/[\w/.]+)`", README))
def test_every_file_it_names_exists(path):
    assert (ROOT / path).exists()
