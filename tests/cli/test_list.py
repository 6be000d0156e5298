"""``ray-dcp list`` as a person and as a program sees it."""

import json
import os

import pytest

from ray_dcp.cli.main import main
from ray_dcp.store.open import open_store
from tests.catalog.test_listing import commit, commit_as_torch


@pytest.fixture
def root(tmp_path):
    root = str(tmp_path / "root")
    commit(root, "step-00000100", step=100, nbytes=3 << 20, metrics={"loss": 0.123456, "note": "[bold]"})
    commit(root, "step-00000200", step=200, nbytes=2000)
    commit_as_torch(root, "imported-from-torch")
    return root


def test_checkpoints_are_a_table_of_eighty_columns(root, capsys):
    assert main(["list", root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"3 checkpoints, 3.0 MiB, under {root}"
    assert lines[2].split() == ["step", "folder", "size", "ranks", "created", "metrics"]
    assert lines[4].split()[:5] == ["100", "step-00000100", "3.0", "MiB", "2"]
    assert [lines[4].split()[-1], lines[5].split()[-1]] == ["loss=0.1235,", "note=[bold]"]
    assert lines[6].split()[:5] == ["200", "step-00000200", "2.0", "KiB", "2"]
    assert lines[7].split()[:5] == ["-", "imported-from-torch", "60", "B", "-"]
    assert max(map(len, lines[1:])) <= 80


def test_a_pipe_gets_each_checkpoint_on_one_line(root, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    commit(root, "step-00000300", step=300, metrics={f"metric-{number}": 1 for number in range(30)})
    main(["list", root])
    found = [line for line in capsys.readouterr().out.splitlines() if "step-00000300" in line]
    assert len(found) == 1
    assert found[0].endswith("metric-29=1")


def test_unfinished_saves_are_mentioned_below(root, capsys):
    open_store(root).put("step-00000300/__0_0_ab.distcp", bytes(2048))
    main(["list", root])
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "1 unfinished:",
        "  step-00000300  2.0 KiB  a save that never finished: 1 shard file, no .metadata",
    ]


def test_json_has_the_same(root, capsys):
    open_store(root).put("step-00000300/__0_0_ab.distcp", bytes(2048))
    assert main(["list", root, "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["root"] == root
    assert listing["checkpoints"][0] == {
        "step": 100,
        "checkpoint_id": f"{root}/step-00000100",
        "nbytes": 3 << 20,
        "world_size": 2,
        "created": 5.0,
        "metrics": {"loss": 0.123456, "note": "[bold]"},
        "pace": None,
    }
    assert [one["step"] for one in listing["checkpoints"]] == [100, 200, None]
    assert [one["step"] for one in listing["uncommitted"]] == [300]


def test_an_empty_root_is_said_so(tmp_path, capsys):
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints under {tmp_path}: the folder is empty\n"
    assert main(["list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "root": str(tmp_path),
        "checkpoints": [],
        "uncommitted": [],
        "safetensors": [],
    }


def test_a_checkpoint_for_a_root_is_said_so(root, capsys):
    assert main(["list", f"{root}/step-00000100"]) == 0
    assert "is itself a checkpoint: see ray-dcp show" in capsys.readouterr().out


def test_a_damaged_manifest_is_a_warning_and_no_end(root, capsys):
    open_store(root).put("step-00000100/manifest.parquet", b"damaged")
    assert main(["list", root]) == 0
    assert "step-00000100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("{tmp}/nope", 3, "nothing is there"),
        ("memory://nope", 3, "nothing is there"),
        ("{tmp}/file", 3, "this is a file"),
        ("hdfsx://a/b", 2, "unknown scheme hdfsx://"),
        ("", 2, "is empty"),
    ],
)
def test_an_error_is_one_line_and_a_code(tmp_path, capsys, url, code, said):
    (tmp_path / "file").write_bytes(b"")
    assert main(["list", url.format(tmp=tmp_path)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ray-dcp: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_store_that_refuses_is_a_code(root, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["list", root]) == 4
    assert "Permission denied" in capsys.readouterr().err
