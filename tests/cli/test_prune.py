"""``ray-dcp prune`` as a person and as a program sees it."""

import json
import os

import pytest

from ray_dcp.cli.main import main
from ray_dcp.store.open import open_store
from tests.catalog.test_listing import commit

OLD = "0000000000000001deadbeef"


@pytest.fixture
def root(tmp_path):
    root = str(tmp_path / "root")
    commit(root, "step-00000100", step=100, shard=f"__0_0_{'1' * 24}.distcp")
    for name, nbytes in ((f"__0_0_{OLD}.distcp", 3 << 20), (f"__1_0_{OLD}.distcp", 1024)):
        open_store(root).put(f"step-00000200/{name}", bytes(nbytes))
        os.utime(f"{root}/step-00000200/{name}", (5000, 5000))
    open_store(root).put(f"step-00000300/__0_0_{OLD}.distcp", bytes(10))
    return root


def test_a_dry_run_says_what_it_would_do_and_does_nothing(root, capsys):
    assert main(["prune", root, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"2 leftover files, 3.0 MiB, under {root}"
    assert "step-00000200/__0_0_" in printed
    assert "left for now, too young: 1 file, 10 B" in printed
    assert "removed" not in printed
    assert sorted(os.listdir(root)) == ["step-00000100", "step-00000200", "step-00000300"]


def test_it_prints_the_plan_and_carries_it_out(root, capsys):
    assert main(["prune", root]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"2 leftover files, 3.0 MiB, under {root}"
    assert printed.splitlines()[-1] == "removed 2 files, 3.0 MiB"
    assert sorted(os.listdir(root)) == ["step-00000100", "step-00000300"]
    assert main(["prune", root]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"no leftover files under {root}"


@pytest.mark.parametrize("grace", ["0", "0s", "0m", "0.0h", "0d"])
def test_the_grace_can_be_chosen(root, grace):
    assert main(["prune", root, "--grace", grace]) == 0
    assert os.listdir(root) == ["step-00000100"]


def test_json_has_the_same(root, capsys):
    assert main(["prune", root, "--json", "--dry-run", "--grace", "2h"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["root"], planned["grace_s"], planned["report"]) == (root, 7200.0, None)
    assert (planned["num_files"], planned["nbytes"], planned["unreadable"]) == (2, (3 << 20) + 1024, [])
    assert planned["leftovers"][0] == {
        "key": f"step-00000200/__0_0_{OLD}.distcp",
        "nbytes": 3 << 20,
        "modified": 5000.0,
        "reason": "of a save that never committed",
    }
    assert [one["num_files"] for one in planned["waiting"]] == [1]
    assert main(["prune", root, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["report"]["deleted"]) == 2


def test_a_checkpoint_that_cannot_be_read_stops_it_with_a_code(root, capsys):
    open_store(root).put("step-00000100/.metadata", b"garbage")
    assert main(["prune", root]) == 5
    printed = capsys.readouterr()
    assert "cannot be read: " in printed.out
    assert "step-00000100/.metadata" in printed.out
    assert "nothing is removed: 1 checkpoint cannot be read" in printed.err
    assert os.path.exists(f"{root}/step-00000200/__0_0_{OLD}.distcp")


def test_what_cannot_be_removed_is_a_code(root, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)
    assert main(["prune", root]) == 4
    printed = capsys.readouterr()
    assert f"not removed: step-00000200/__0_0_{OLD}.distcp" in printed.out
    assert "2 files could not be removed" in printed.err


@pytest.mark.parametrize(
    ("place", "code", "said"), [("{}/step-00000100", 2, "is itself a checkpoint"), ("{}/nope", 3, "nothing is there")]
)
def test_a_place_that_is_no_root_is_said_so(root, capsys, place, code, said):
    assert main(["prune", place.format(root)]) == code
    assert said in capsys.readouterr().err
