"""``ray-dcp convert`` as a person and as a program sees it."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ray_dcp as dcp
from ray_dcp.cli.main import main


@pytest.fixture
def checkpoint(tmp_path):
    state = {"model": {"w": torch.ones(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)
    return str(tmp_path / "step-7")


def test_it_prints_the_plan_and_carries_it_out(checkpoint, tmp_path, capsys):
    dest = str(tmp_path / "m.safetensors")
    assert main(["convert", checkpoint, dest, "--include", "model.*", "--strip-prefix", "model."]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[:4] == [
        f"from  {checkpoint} (dcp)",
        f"to    {dest} (safetensors)",
        "2 tensors, 56 B",
        "1 value left out",
    ]
    assert lines[4].startswith("  m.safetensors  ")
    assert lines[5].startswith("written in ")
    assert printed.err == ""
    assert load_file(dest).keys() == {"w", "b"}


def test_a_dry_run_says_what_it_would_do_and_does_nothing(checkpoint, tmp_path, capsys):
    before = sorted(os.listdir(tmp_path))
    command = ["convert", checkpoint, str(tmp_path / "out"), "--to", "safetensors", "--skip-python"]
    assert main([*command, "--max-shard-size", "50", "--dry-run"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == "model.safetensors.index.json"
    assert lines[-2].startswith("model-00002-of-00002.safetensors")
    assert sorted(os.listdir(tmp_path)) == before
    assert main(command) == 0
    assert main([*command, "--overwrite", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "replaces model.safetensors"


def test_json_has_the_same(checkpoint, tmp_path, capsys):
    dest = str(tmp_path / "all.pt")
    assert main(["convert", checkpoint, dest, "--json", "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["report"] is None
    assert (planned["source_format"], planned["dest_format"], planned["nbytes"]) == ("dcp", "torch", 56)
    assert sorted(planned["names"]) == ["model.b", "model.w", "step"]
    assert planned["files"] == [{"key": "all.pt", "nbytes": 56, "num_tensors": 2}]
    assert main(["convert", checkpoint, dest, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["num_tensors"], report["num_objects"], report["nbytes"]) == (2, 1, 56)
    assert torch.load(dest, weights_only=True)["step"] == 7


def test_a_model_becomes_a_checkpoint_that_the_other_commands_know(tmp_path, capsys):
    (tmp_path / "llama").mkdir()
    save_file({"w": torch.ones(5, 8, dtype=torch.bfloat16)}, tmp_path / "llama/model.safetensors")
    assert main(["show", str(tmp_path / "llama"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main(["convert", str(tmp_path / "llama"), str(tmp_path / "c"), "--to", "dcp"]) == 0
    assert main(["verify", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "c"), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    (as_file,), (as_checkpoint,) = shown["tensors"], stored["tensors"]
    assert as_file == as_checkpoint | {"ranks": []}
    assert (as_file["shape"], as_file["dtype"], as_file["nbytes"]) == ([5, 8], "bfloat16", 80)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["out"], 2, "say which format"),
        (["out", "--to", "gguf"], 2, "invalid choice"),
        (["x.pt", "--include", "nope.*"], 2, "no name fits the pattern 'nope.*'"),
        (["x.pt", "--exclude", "nope.*"], 2, "no name fits the pattern 'nope.*'"),
        (["x.pt", "--exclude", "*"], 2, "leave out all"),
        (["x.pt", "--strip-prefix", "nope."], 2, "no name begins with"),
        (["x.pt", "--max-shard-size", "5GB"], 2, "is for safetensors alone"),
        (["out", "--to", "safetensors", "--max-shard-size", "0"], 2, "is not a size"),
        (["out", "--to", "safetensors", "--max-shard-size", "5XB"], 2, "is not a size"),
        (["out", "--to", "safetensors"], 1, "1 Python value: step; leave it out with --skip-python"),
        ([], 2, "required: DEST"),
    ],
)
def test_what_cannot_be_done_ends_with_a_code_and_one_line(checkpoint, tmp_path, capsys, arguments, code, said):
    before = sorted(os.listdir(tmp_path))
    if arguments:
        arguments = [str(tmp_path / arguments[0]), *arguments[1:]]
    try:
        ended = main(["convert", checkpoint, *arguments])
    except SystemExit as wrong_usage:
        ended = wrong_usage.code
    printed = capsys.readouterr()
    assert ended == code
    assert said in printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("100", 100),
        ("1kb", 1000),
        ("5GB", 5 * 10**9),
        ("2GiB", 2 << 30),
        ("1.5m", 1_500_000),
        ("3 B", None),
        ("B", None),
    ],
)
def test_sizes_are_read_as_people_write_them(checkpoint, tmp_path, capsys, text, nbytes):
    command = ["convert", checkpoint, str(tmp_path / "out"), "--to", "safetensors", "--skip-python", "--dry-run"]
    if nbytes is None:
        with pytest.raises(SystemExit) as ended:
            main([*command, "--max-shard-size", text])
        assert ended.value.code == 2
        return
    from ray_dcp.cli.convert import _nbytes

    assert _nbytes(text) == nbytes
    assert main([*command, "--max-shard-size", text]) == 0


def test_nothing_there_is_code_three_and_damage_is_code_five(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "x.pt")]) == 3
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    assert main(["convert", str(tmp_path), str(tmp_path / "x.pt")]) == 5
    assert "model.safetensors" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_many_python_values_are_counted_where_safetensors_have_no_room_for_them(tmp_path, capsys):
    dcp.save({f"n{i:02}": i for i in range(30)} | {"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "out"), "--to", "safetensors"]) == 1
    assert "30 Python values: n00, n01, n02, n03, n04 and 25 more; leave them out" in capsys.readouterr().err


def test_a_module_is_refused_with_a_way_that_a_command_has(tmp_path, capsys):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert main(["convert", str(tmp_path / "module.pt"), str(tmp_path / "out"), "--to", "dcp"]) == 5
    told = capsys.readouterr().err
    assert "add_safe_globals" not in told
    assert "load it in Python (torch.load(..., weights_only=False)" in told
    assert "save its state_dict()" in told


def test_a_file_in_the_way_of_a_copy_or_conversion_is_named(checkpoint, tmp_path, capsys):
    (tmp_path / "afile").touch()
    for command in (["copy"], ["convert", "--to", "dcp"], ["convert", "--skip-python", "--to", "safetensors"]):
        assert main([*command, checkpoint, str(tmp_path / "afile")]) == 3
        assert f"{tmp_path / 'afile'} is a file, give a folder or another place" in capsys.readouterr().err


def test_what_torch_will_not_load_with_weights_only_is_told_when_it_is_written(tmp_path, caplog):
    state = {"place": Path("/data"), "steps": np.int64(4), "n": 5, "words": ["a"], "w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "all.pt")]) == 0
    (warned,) = [one.getMessage() for one in caplog.records if "weights_only" in one.getMessage()]
    assert "not: place, steps. Leave them out" in warned
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.load(tmp_path / "all.pt", weights_only=False)["place"] == Path("/data")
    caplog.clear()
    assert (
        main(["convert", str(tmp_path / "c"), str(tmp_path / "some.pt"), "--exclude", "place", "--exclude", "steps"])
        == 0
    )
    assert torch.load(tmp_path / "some.pt", weights_only=True)["words"] == ["a"]
    assert not caplog.records
