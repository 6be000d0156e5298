"""Checkpoints go from one Python to another, ours and torch's. CI has a second Python for it: `.ci/other_python`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ray_dcp.cli.main import main
from tests.interop import between_pythons

OTHER = os.environ.get("RAY_DCP_OTHER_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(not OTHER, reason="RAY_DCP_OTHER_PYTHON names no second Python"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def run(python: str, *arguments: str) -> str:
    done = subprocess.run(
        [python, "-m", "tests.interop.between_pythons", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{python} {arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_other_is_another_one():
    assert run_version(OTHER) != run_version(sys.executable)


def run_version(python: str) -> str:
    return subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("writer", ["this", "other"])
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_what_one_saves_the_other_loads(tmp_path, writer, kind):
    place = str(tmp_path / "c")
    if writer == "this":
        between_pythons.save(kind, place)
        run(OTHER, "load", "ours", place)
    else:
        run(OTHER, "save", kind, place)
        between_pythons.load("ours", place)
    assert main(["verify", place]) == 0


@pytest.mark.parametrize("writer", ["this", "other"])
def test_torch_itself_loads_in_one_what_ray_dcp_saved_in_the_other(tmp_path, writer):
    place = str(tmp_path / "c")
    if writer == "this":
        between_pythons.save("ours", place)
        run(OTHER, "load", "torch", place)
    else:
        run(OTHER, "save", "ours", place)
        between_pythons.load("torch", place)


def test_both_write_the_same_bytes():
    assert run(OTHER, "digests").split() == between_pythons.digests()
