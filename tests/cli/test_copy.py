"""``ray-dcp copy`` as a person and as a program sees it."""

import json
import os

import pytest

from ray_dcp.cli.main import main
from ray_dcp.store.open import open_store
from tests.maintenance.damage import entries_of, flipped, save_ours, shard_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return save_ours(tmp_path_factory.mktemp("root") / "c")


def test_a_copy_is_made_and_said(store, tmp_path, capsys):
    target = str(tmp_path / "copy")
    assert main(["copy", store.url, target]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("copied 3 files, ")
    assert f" to {target} in " in lines[0]
    assert lines[1:] == ["6 blocks checked"]
    assert printed.err == ""
    assert main(["verify", target]) == 0


def test_json_has_the_report(store, tmp_path, capsys):
    target = str(tmp_path / "copy")
    assert main(["copy", store.url, target, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("seconds") > 0
    assert report == {
        "source": store.url,
        "destination": target,
        "num_files": 3,
        "nbytes": sum(one.nbytes for one in store.list()),
        "num_blocks_checked": 6,
        "replaced": False,
        "unchecked": [],
    }


def test_what_is_there_is_replaced_only_with_overwrite(store, tmp_path, capsys):
    target = str(tmp_path / "copy")
    assert main(["copy", store.url, target]) == 0
    assert main(["copy", store.url, target]) == 2
    assert capsys.readouterr().err == (
        f"ray-dcp: DESTINATION: a checkpoint is committed at {target}; --overwrite replaces it\n"
    )
    assert main(["copy", store.url, target, "--overwrite"]) == 0


def test_a_damaged_checkpoint_is_not_copied(store, tmp_path, capsys):
    entry = next(entry for entry in entries_of(store) if entry.fqn == "model.w")
    with flipped(store, shard_of(store), entry.payload_offset):
        assert main(["copy", store.url, str(tmp_path / "copy")]) == 5
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ray-dcp: model.w: its payload fails its checksum; nothing was copied (")
    assert entry.file in printed.err
    assert not os.path.exists(tmp_path / "copy")


def test_no_checkpoint_is_not_found(tmp_path, capsys):
    assert main(["copy", str(tmp_path / "nope"), str(tmp_path / "copy")]) == 3
    assert "nothing is there" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_a_code(store, tmp_path):
    open_store(tmp_path).put("file", b"")
    assert main(["copy", store.url, str(tmp_path / "file" / "copy")]) == 3
