"""What mypy and pyright see of an installed ray_dcp: every public name with its type, a misspelt one as an error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ray_dcp

ROOT = Path(__file__).parent.parent

PROGRAM = """
import ray_dcp as dcp
import ray_dcp.filesystem
from ray_dcp.api import CheckpointException as AlsoThere
from ray_dcp.format_utils import dcp_to_torch_save
from ray_dcp.staging import StagingOptions
from ray_dcp.state_dict import StateDictOptions
from ray_dcp.storage import WriteResult
from torch.distributed.checkpoint import metadata, planner, state_dict
from typing_extensions import assert_type

assert_type(dcp.save({"n": 1}, checkpoint_id="c"), metadata.Metadata)
assert_type(dcp.async_save({"n": 1}, checkpoint_id="c", no_dist=True), dcp.AsyncSaveResponse)
assert_type(dcp.load({"n": 1}, checkpoint_id="c", strict="exact"), dcp.LoadReport)
assert_type(dcp.load({"n": 1}, checkpoint_id="c").missing, tuple[str, ...])
assert_type(dcp.save_state_dict({"n": 1}, dcp.FileSystemWriter("c"), coordinator_rank=1), metadata.Metadata)
assert_type(dcp.current_group(), "dcp.RankGroup | None")
assert_type(dcp.CheckpointManager("root").latest(), "dcp.CheckpointInfo | None")
assert_type(dcp.DefaultLoadPlanner(allow_partial_load=True).create_local_plan(), planner.LoadPlan)
assert_type(dcp.FileSystemReader("c").read_metadata(), metadata.Metadata)
assert_type(ray_dcp.filesystem.FileSystemReader("c"), dcp.FileSystemReader)
assert_type(StateDictOptions(cpu_offload=True), state_dict.StateDictOptions)
assert_type(dcp.state_dict.StateDictOptions(), state_dict.StateDictOptions)
assert_type(dcp.storage.WriteResult, type[WriteResult])
assert_type(StagingOptions().use_pinned_memory, bool)
dcp_to_torch_save("c", "file")
failed: type[dcp.CheckpointException] = AlsoThere

dcp.sav({"n": 1}, checkpoint_id="c")  # wrong
dcp.save({"n": 1}, checkpoint="c")  # wrong
dcp.load([1], checkpoint_id="c")  # wrong
dcp.DefaultLoadPlanner(allow_partial=True)  # wrong
dcp.state_dict.get_stat_dict  # wrong
dcp.staging.DefaultStage  # wrong
dcp.storage.Nonsense  # wrong
dcp.api.nonsense  # wrong
ray_dcp.state_dict_saver.sav  # wrong
StateDictOptions(cpu_offlod=True)  # wrong
"""
# It takes mypy most of a minute to read all that torch imports.
NOT_LOOKED_INTO = """
ray numpy sympy pyarrow networkx torch._dynamo torch._functorch torch._higher_order_ops torch._inductor
torch._library torch._prims torch._refs torch._subclasses torch.ao torch.autograd torch.backends torch.cuda
torch.distributed.pipelining torch.distributed.rpc torch.distributed.tensor._ops torch.export torch.fx torch.jit
torch.masked torch.nested torch.nn torch.onnx torch.optim torch.profiler torch.sparse torch.testing
torch.utils.data
"""
MYPY_SETTINGS = f"""
[mypy]
strict = True
[mypy-{",".join(f"{name}.*" for name in NOT_LOOKED_INTO.split())}]
follow_imports = skip
"""
NAMES = "".join(f"reveal_type(dcp.{name})\n" for name in sorted(ray_dcp.__all__))
WRONG = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request, tmp_path_factory):
    """An interpreter that has ray_dcp installed, and all else from the one that runs the tests."""
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "source"
    shutil.copytree(ROOT / "ray_dcp", source / "ray_dcp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    at_home = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True
    )
    (Path(at_home.stdout.strip()) / "all_else.pth").write_text(sysconfig.get_paths()["purelib"])
    what = ["-e", source] if request.param == "editable" else [source]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index"]
    installer = [sys.executable, "-m", "pip", "--python", python, "install", "--ignore-installed", *options]
    subprocess.run([*installer, *what], check=True, cwd=folder)
    return python


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + NAMES)
    return tmp_path / "program.py"


def require_typed(types: list[str]) -> None:
    """None of what is revealed is unknown to the checker."""
    assert len(types) == len(ray_dcp.__all__)
    assert [revealed for revealed in types if re.fullmatch(r'"?(Any|Unknown)"?', revealed.strip())] == []


def test_mypy_sees_every_name(python, program, request):
    cache = request.config.cache.mkdir("mypy")  # torch is checked once, not in each run of the tests
    (program.parent / "mypy.ini").write_text(MYPY_SETTINGS)
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", cache, "program.py"]
    ran = subprocess.run(command, cwd=program.parent, capture_output=True, text=True)
    found = re.findall(r"^(.+?):(\d+): (\w+): (.*)$", ran.stdout, re.MULTILINE)
    wrong = {(file, int(line)): said for file, line, kind, said in found if kind == "error"}
    assert {file for file, _ in wrong} <= {"program.py"}, ran.stdout + ran.stderr
    assert {line for _, line in wrong} == WRONG, ran.stdout + ran.stderr
    require_typed([said.removeprefix("Revealed type is ") for *_, said in found if said.startswith("Revealed")])


def test_pyright_sees_every_name(python, program):
    settings = {"typeCheckingMode": "standard", "pythonVersion": "3.10", "include": ["program.py"]}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    ran = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python, "--project", program.parent],
        capture_output=True,
        text=True,
    )
    found = json.loads(ran.stdout)["generalDiagnostics"]
    wrong = {one["range"]["start"]["line"] + 1: one["message"] for one in found if one["severity"] == "error"}
    assert wrong.keys() == WRONG, found
    revealed = [one["message"] for one in found if one["message"].startswith("Type of ")]
    require_typed([said.split(" is ", 1)[1] for said in revealed])
