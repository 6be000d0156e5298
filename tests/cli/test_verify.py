"""``ray-dcp verify`` as a person and as a program sees it."""

import json
import subprocess
import sys

import pytest
import torch

from ray_dcp.cli.main import main
from ray_dcp.cli.progress_bar import progress_bar
from ray_dcp.format.names import METADATA, step_folder
from ray_dcp.store.open import open_store
from tests.maintenance.damage import changed, entries_of, flipped, records_of, save_ours, save_torchs, shard_of
from tests.store.failing import Faults

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    save_ours(root / step_folder(1))
    save_ours(root / step_folder(2))
    return root


@pytest.fixture
def store(root):
    return open_store(root / step_folder(2))


def test_a_whole_checkpoint_is_said_to_be_whole(store, capsys):
    assert main(["verify", store.url]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith(f"{store.url}: 7 items in 1 file, ")
    assert lines[1].startswith("checked 6 of 6 blocks, ")
    assert lines[2:] == ["whole"]
    assert printed.err == "", "no progress bar where there is no terminal"


def test_damage_is_a_table_and_a_code(store, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")  # as in a pipe
    entry = next(entry for entry in entries_of(store) if entry.fqn == "model.w")
    with flipped(store, entry.file, entry.payload_offset + 3):
        assert main(["verify", store.url]) == 5
    printed = capsys.readouterr()
    start, end = entry.payload_offset, entry.payload_offset + entry.payload_nbytes
    assert printed.out.splitlines()[-1].split() == [
        entry.file, "model.w", "0", f"{start}-{end}", "its", "payload", "fails", "its", "checksum",
    ]  # fmt: skip
    assert "1 fault" in printed.out.splitlines()
    assert printed.err == (
        f"ray-dcp: model.w: damaged, 1 fault; the first: its payload fails its checksum "
        f"({store.url}/{entry.file}, bytes {start} to {end})\n"
    )


def test_a_table_has_some_of_the_faults_and_json_all(tmp_path, capsys):
    store = save_ours(tmp_path / "c", {f"layer.{number:03}": torch.full((1,), number) for number in range(100)})
    with changed(store, shard_of(store), None):
        assert main(["verify", store.url]) == 5
        printed = capsys.readouterr()
        assert "100 faults" in printed.out
        assert printed.out.splitlines()[-1] == "... and 40 more; --json shows all"
        assert main(["verify", store.url, "--json"]) == 5
    report = json.loads(capsys.readouterr().out)
    assert len(report["faults"]) == 100
    entry = entries_of(store)[0]
    assert report["faults"][0] == {
        "file": entry.file,
        "start": 0,
        "end": entry.record_nbytes,
        "problem": "its file is missing",
        "fqn": entry.fqn,
        "offsets": [0],
        "rank": 0,
    }


def test_json_has_the_report(store, capsys):
    assert main(["verify", store.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("seconds") > 0
    assert report.pop("nbytes_checked") < report.pop("nbytes") == len(store.get(shard_of(store)))
    assert report == {
        "checkpoint_id": store.url,
        "has_manifest": True,
        "num_files": 1,
        "num_items": 7,
        "num_blocks": 6,
        "num_blocks_checked": 6,
        "sample": None,
        "seed": None,
        "faults": [],
        "unchecked": [],
        "notes": [],
    }


def test_a_sample_says_its_share_and_its_seed(tmp_path, capsys):
    store = save_ours(tmp_path / "c", {"w": torch.zeros(5 << 20)})
    assert main(["verify", store.url, "--sample", "10%", "--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("checked 2 of 20 blocks (a sample of 10%, --seed 5), 2.0 MiB")
    assert lines[2] == "no damage found"
    assert main(["verify", store.url, "--sample", "100%"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "whole"


def test_a_root_is_not_found_unless_all_of_it_is_meant(root, capsys):
    assert main(["verify", str(root)]) == 3
    assert f"pass {root}/{step_folder(2)}" in capsys.readouterr().err
    assert main(["verify", str(root), "--all"]) == 0
    assert capsys.readouterr().out.splitlines().count("whole") == 2
    assert main(["verify", str(root / step_folder(1)), "--all"]) == 2
    assert "is itself a checkpoint" in capsys.readouterr().err


def test_all_of_a_root_is_verified_also_behind_a_damaged_step(root, store, capsys):
    first = open_store(root / step_folder(1))
    with flipped(first, shard_of(first), records_of(first)[0].start):
        assert main(["verify", str(root), "--all", "--json"]) == 5
    printed = json.loads(capsys.readouterr().out)
    assert [(one["checkpoint_id"], bool(one["faults"])) for one in printed["checkpoints"]] == [
        (first.url, True),
        (store.url, False),
    ]
    with changed(first, METADATA, b"garbage"):
        assert main(["verify", str(root), "--all"]) == 5
    assert ".metadata" in capsys.readouterr().out


def test_a_root_without_a_checkpoint_is_not_found(tmp_path, capsys):
    assert main(["verify", str(tmp_path), "--all"]) == 3
    assert "none is committed under it" in capsys.readouterr().err


def test_what_torch_wrote_without_checksums_is_not_checkable(tmp_path, capsys):
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        store = save_torchs(tmp_path / "c")
    assert main(["verify", store.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "there is no manifest" in lines[0]
    assert lines[2].startswith("not checkable: 7 items, torch wrote it with its checksums turned off: ")
    assert lines[3] == "no damage found"


@pytest.mark.parametrize("at", [1, 4, 5])
def test_a_store_that_fails_is_a_code(store, capsys, at):
    faults = Faults(only=("get",), fail_at=at, lasting=True)
    assert main(["verify", faults.url(store.url)]) == 4
    assert "Input/output error" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["verify"], ["verify", "--sample", "10%"], ["copy"]])
def test_neither_ray_nor_torch_is_imported_where_there_is_a_manifest(store, tmp_path, command):
    script = """if True:
        import sys
        from ray_dcp.cli.main import main
        code = main()
        print([name for name in ("ray", "torch") if name in sys.modules], file=sys.stderr)
        sys.exit(code)
    """
    places = [store.url, str(tmp_path / "copy")] if command == ["copy"] else [store.url]
    done = subprocess.run(
        [sys.executable, "-c", script, *command, *places], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_an_interrupt_while_it_reads_is_quiet(store):
    script = """if True:
        import os, signal, sys, time
        from ray_dcp.cli.main import main
        from ray_dcp.maintenance.verify import pieces
        def interrupted(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            raise OSError("and nobody waits for this")
        pieces.get_into = interrupted
        sys.exit(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", store.url], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


class Terminal:
    """What is shown on it."""

    def __init__(self):
        self.shown = ""

    def write(self, text):
        self.shown += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("verify [red]step", 100 << 20) as on_bytes:
        on_bytes(25 << 20)
    assert "verify [red]step" in terminal.shown
    assert "25.0/100.0 MiB" in terminal.shown
    terminal.shown = ""
    monkeypatch.setattr(terminal, "isatty", lambda: False, raising=False)
    with progress_bar("verify", 100) as on_bytes:
        on_bytes(25)
    assert terminal.shown == ""
