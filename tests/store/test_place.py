"""Where a checkpoint goes is what the user said, or nothing is written at all."""

import os
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointManager, StoreReader, StoreWriter
from ray_dcp.cli.main import main
from ray_dcp.errors import ConfigError, RayDcpError, UnknownSchemeError
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import folder_name, join_url, split_url
from tests.protocol.plugins import PtFolderWriter

STATE = {"w": torch.ones(3)}
NO_PLACES = [
    *("", "  ", None, Path(""), Path("."), 5, b"", "a\0b"),
    *(
        Path("s3://bucket/x"),
        Path("file:///x"),
        Path("memory://x"),
        "s3:/bucket/x",
        "gs:/x",
        "s3:bucket/x",
        "S3:bucket",
    ),
    *(" s3://bucket/x", '"s3://bucket/x"', "root=s3://bucket/x", "/scratch/s3:/bucket/x", "runs/gs://b/x", "./s3:/b"),
    *("~no-such-user/runs", "runs/~/x", "/scratch/~", "file://~/x", "file:///~/x", "file://host/x", "file:///a?b"),
    *("hdfsx://a/b", "s3://", "s3:///x", "s3://AKIA:se/cret@bucket/x", "s3://b/a/../c", "s3://b/x\n"),
]
DOORS = {
    "save": lambda place: dcp.save(dict(STATE), checkpoint_id=place, no_dist=True),
    "async_save": lambda place: dcp.async_save(dict(STATE), checkpoint_id=place, no_dist=True),
    "load": lambda place: dcp.load(dict(STATE), checkpoint_id=place, no_dist=True),
    "manager": lambda place: CheckpointManager(place).save(1, dict(STATE)),
    "manager, asked": lambda place: CheckpointManager(place).latest(),
    "writer": lambda place: dcp.save(dict(STATE), storage_writer=StoreWriter(place), no_dist=True),
    "reader": lambda place: dcp.load(dict(STATE), storage_reader=StoreReader(place), no_dist=True),
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Working directory and home, empty and apart."""
    for name in ("cwd", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", NO_PLACES, ids=repr)
def test_what_names_no_place_is_refused_at_every_door(door, place, home):
    with pytest.raises(RayDcpError) as caught:
        DOORS[door](place)
    told = str(caught.value)
    assert any(word in told for word in ("pass", "s3://", "written", "bucket", "local folder", "NUL", "parameters"))
    assert "se/cret" not in told
    assert os.listdir() == os.listdir(home) == []


@pytest.mark.parametrize("command", ["list", "show", "verify", "prune", "verify --all"])
@pytest.mark.parametrize("place", [place for place in NO_PLACES if isinstance(place, str) and "\0" not in place])
def test_what_names_no_place_is_wrong_usage_of_each_command(command, place, capsys):
    assert main([*command.split(), place]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert os.listdir() == []


def test_an_unset_variable_is_said_to_be_one(monkeypatch):
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    for door in ("save", "load", "manager"):
        for value in (os.environ.get("NO_SUCH_VARIABLE"), os.environ.get("NO_SUCH_VARIABLE", "")):
            with pytest.raises(RayDcpError, match="is it an unset variable"):
                DOORS[door](value)


@pytest.mark.parametrize("spelling", ["~/runs/step-00000001", Path("~/runs/step-00000001"), b"~/runs/step-00000001"])
def test_a_tilde_is_the_home_of_this_user(spelling, home):
    dcp.save(dict(STATE), checkpoint_id=spelling, no_dist=True)
    assert (home / "runs/step-00000001/.metadata").exists()
    dcp.load({"w": torch.zeros(3)}, checkpoint_id=spelling, no_dist=True)
    manager = CheckpointManager("~/runs")
    assert manager.root == f"{home}/runs"
    assert [info.step for info in manager.list()] == [1]
    assert main(["verify", os.fsdecode(spelling)]) == 0
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("place", "path"),
    [
        *(("runs", "runs"), ("./~x", "~x"), (".", "."), ("a?b#c%20d", "a?b#c%20d"), ("12:30/run", "12:30/run")),
        *((b"runs/\xff", "runs/\udcff"), (Path("a b"), "a b"), ("line\nbreak", "line\nbreak"), ("s3", "s3")),
    ],
)
def test_a_path_is_taken_as_it_is(place, path):
    assert absolute(place) == os.path.abspath(path)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("file:///runs/a%20b%3Fc", "/runs/a b?c"),
        ("file://localhost/runs/", "/runs"),
        ("s3://bucket/a b/%20/?region=x", "s3://bucket/a b/%20?region=x"),
        ("S3://bucket/", "s3://bucket"),
        ("s3://id:se%2Fcret@bucket/a@b", "s3://id:se%2Fcret@bucket/a@b"),
        ("memory://x/y", "memory://x/y"),
    ],
)
def test_a_url_has_one_form(place, expected):
    assert absolute(place) == expected
    assert absolute(absolute(place)) == expected


def test_the_setting_that_is_wrong_is_named():
    with pytest.raises(ConfigError, match=r"^root: is empty"):
        CheckpointManager("")
    with pytest.raises(ConfigError, match=r"^root: is None"):
        CheckpointManager(os.environ.get("NO_SUCH_VARIABLE"))
    with pytest.raises(UnknownSchemeError, match=r"pass it as str, not as a pathlib\.Path"):
        CheckpointManager(Path("s3://bucket/x"))


def test_a_folder_that_an_earlier_program_left_can_be_read_and_copied(capsys):
    os.makedirs("s3:/bucket")
    dcp.save(dict(STATE), checkpoint_id="./s3:/bucket/step-00000001", no_dist=True)
    assert main(["list", "./s3:/bucket"]) == 0
    assert main(["copy", "./s3:/bucket/step-00000001", "rescued"]) == 0
    assert main(["verify", "rescued"]) == 0


class ElsewhereWriter(PtFolderWriter):
    """Knows places that ray_dcp does not."""

    def reset(self, checkpoint_id=None):
        self.asked = checkpoint_id


@pytest.mark.parametrize("place", ["my-store://7", Path("s3://kept/as/it/is"), "~/x", 7], ids=repr)
def test_storage_of_the_users_gets_the_place_that_the_user_says(place, tmp_path):
    writer = ElsewhereWriter(tmp_path / "own")
    dcp.save(dict(STATE), checkpoint_id=place, storage_writer=writer, no_dist=True)
    assert writer.asked == place
    assert os.listdir() == []


@pytest.mark.parametrize(
    "name", ["what?", "a#b", "100%", "a%20b", "with space", "Gewicht-ä-重み", "line\nbreak", "a?b=c&d", "\udcff"]
)
def test_every_command_takes_a_folder_of_any_name(name, tmp_path, capsys):
    root = str(tmp_path / name)
    manager = CheckpointManager(root)
    manager.save(1, dict(STATE))
    info = manager.async_save(2, dict(STATE)).upload_completion.result() and manager.latest()
    assert (info.step, info.checkpoint_id) == (2, f"{root}/step-00000002")
    assert [one.step for one in manager.list()] == [1, 2]
    found = {"w": torch.zeros(3)}
    assert manager.load(found) == 2
    assert found["w"].eq(1).all()
    place = f"{root}/step-00000001"
    for command in (["list", root], ["show", place], ["verify", place], ["verify", "--all", root], ["prune", root]):
        assert main(command) == 0, command
    assert main(["list", root]) == 0
    assert "step-00000001" in capsys.readouterr().out
    assert main(["copy", place, str(tmp_path / f"copy of {name}")]) == 0
    assert main(["verify", str(tmp_path / f"copy of {name}")]) == 0
    assert main(["convert", place, str(tmp_path / f"{name}.pt")]) == 0


def test_names_come_off_a_place_as_they_were_put_on():
    assert folder_name("/runs/what?/step-00000001") == "step-00000001"
    assert folder_name("/runs/what?") == "what?"
    assert folder_name("s3://b/x?region=y/z") == "x"
    assert split_url(join_url("/runs/what?", "step-1")) == ("/runs/what?", "step-1")
    assert split_url("s3://b") == ("s3://", "b")
