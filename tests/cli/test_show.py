"""``ray-dcp show`` as a person and as a program sees it."""

import json

import pytest

from ray_dcp.cli.main import main
from ray_dcp.format.manifest import FORMAT_VERSION, Entry, Manifest, encode_manifest, metadata_digest
from ray_dcp.format.names import MANIFEST, METADATA, POINTER
from ray_dcp.store.open import open_store
from tests.catalog.test_listing import commit

ENTRIES = [
    Entry("model.weight", (0, 0), (2, 8), "bfloat16", "__0_0_ab.distcp", 0, 400, 64, 32, (1,), 0),
    Entry("model.weight", (2, 0), (2, 8), "bfloat16", "__1_0_ab.distcp", 0, 400, 64, 32, (1,), 1),
    Entry("model.weight", (4, 0), (1, 8), "bfloat16", "__3_0_ab.distcp", 0, 400, 64, 16, (1,), 3),
    Entry("[red]model[/red].scale", (), (), "float32", "__0_0_ab.distcp", 400, 400, 464, 4, (1,), 0),
    Entry("config", None, None, None, "__0_0_ab.distcp", 800, 100, 800, 100, (1,), 0),
]


@pytest.fixture
def checkpoint(tmp_path):
    store = open_store(tmp_path / "step-00000007")
    manifest = Manifest(
        ENTRIES, 4, "ab", metadata_digest(b"m"), 1.79e9, 7, {"loss": 0.25}, {"torch": "2.13.0", "ray_dcp": "0.1.0"}
    )
    store.put(MANIFEST, encode_manifest(manifest))
    store.put(METADATA, b"m")
    return store.url


def test_facts_tensors_and_objects_are_shown(checkpoint, capsys):
    assert main(["show", checkpoint]) == 0
    out = capsys.readouterr().out
    words = [line.split() for line in out.splitlines()]
    assert ["checkpoint", checkpoint] in words
    assert ["step", "7"] in words
    assert ["size", "1.7", "KiB", "(1700", "bytes)"] in words
    assert ["saved", "by", "4", "ranks,", "torch", "2.13.0,", "ray_dcp", "0.1.0"] in words
    assert ["metrics", "loss=0.25"] in words
    assert ["2", "tensors,", "84", "B"] in words
    assert ["[red]model[/red].scale", "scalar", "float32", "1", "4", "B", "0"] in words
    assert ["model.weight", "5x8", "bfloat16", "3", "80", "B", "0-1,", "3"] in words
    assert ["1", "Python", "object"] in words
    assert ["config", "100", "B", "0"] in words
    assert max(len(line) for line in out.splitlines()[1:]) <= 80


def test_json_has_the_same(checkpoint, capsys):
    assert main(["show", checkpoint, "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["checkpoint"]["step"] == 7
    assert contents["attempt"] == "ab"
    assert contents["format_version"] == FORMAT_VERSION
    assert contents["tensors"][1] == {
        "fqn": "model.weight",
        "shape": [5, 8],
        "dtype": "bfloat16",
        "num_chunks": 3,
        "nbytes": 80,
        "ranks": [0, 1, 3],
    }
    assert contents["objects"] == [{"fqn": "config", "nbytes": 100, "ranks": [0]}]


def test_long_lists_are_cut_short_for_people_and_whole_in_json(tmp_path, capsys):
    store = open_store(tmp_path)
    entries = [
        Entry(f"layer.{i:03}", (0,), (1,), "float32", "__0_0_ab.distcp", 0, 1, 0, 4, (1,), 0) for i in range(100)
    ]
    manifest = Manifest(list(reversed(entries)), 1, "ab", metadata_digest(b"m"), 1.0)
    store.put(MANIFEST, encode_manifest(manifest))
    store.put(METADATA, b"m")
    main(["show", str(tmp_path)])
    out = capsys.readouterr().out
    assert "layer.000" in out
    assert "layer.099" not in out
    assert "... and 40 more; --json shows all" in out
    main(["show", str(tmp_path), "--json"])
    names = [tensor["fqn"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert names == [entry.fqn for entry in entries]


def test_a_checkpoint_that_torch_wrote_is_shown_from_its_metadata(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as torch_dcp

    state = {"w": torch.zeros(3, 4, dtype=torch.bfloat16), "b": torch.tensor(1.0), "config": {"lr": 0.1}}
    torch_dcp.save(state, checkpoint_id=tmp_path / "step-5", no_dist=True)
    assert main(["show", str(tmp_path / "step-5"), "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["checkpoint"]["step"] == 5
    assert contents["checkpoint"]["world_size"] is None
    assert [(t["fqn"], t["shape"], t["dtype"], t["nbytes"], t["ranks"]) for t in contents["tensors"]] == [
        ("b", [], "float32", 4, [0]),
        ("w", [3, 4], "bfloat16", 24, [0]),
    ]
    assert [one["fqn"] for one in contents["objects"]] == ["config.lr"]
    assert main(["show", str(tmp_path / "step-5")]) == 0
    assert "torch, without a manifest" in capsys.readouterr().out


def test_a_folder_of_safetensors_files_is_shown_from_their_headers(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3, 4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert main(["show", str(tmp_path), "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["checkpoint"]["nbytes"] == 24
    assert [(t["fqn"], t["shape"], t["dtype"], t["ranks"]) for t in contents["tensors"]] == [
        ("w", [3, 4], "bfloat16", [])
    ]
    assert main(["show", str(tmp_path)]) == 0
    assert "safetensors files, without checksums" in capsys.readouterr().out
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    assert main(["show", str(tmp_path)]) == 5


def test_a_pointer_is_followed(checkpoint, tmp_path, capsys):
    open_store(tmp_path / "ray").put(POINTER, json.dumps({"checkpoint_id": checkpoint}).encode())
    assert main(["show", str(tmp_path / "ray"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["checkpoint_id"] == checkpoint


def test_a_root_is_not_found_and_the_newest_is_named(tmp_path, capsys):
    commit(str(tmp_path), "step-00000001")
    assert main(["show", str(tmp_path)]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"ray-dcp: no checkpoint at {tmp_path}: this is a root with 1 checkpoint, the newest is step-00000001; "
        f"pass {tmp_path}/step-00000001\n"
    )


@pytest.mark.parametrize("damage", ["manifest", "newer format", "metadata", "code in metadata"])
def test_what_is_damaged_unsafe_or_newer_is_code_five(tmp_path, capsys, damage):
    commit(str(tmp_path), "c", version=FORMAT_VERSION + (damage == "newer format"))
    store = open_store(tmp_path / "c")
    if damage == "manifest":
        store.put(MANIFEST, store.get(MANIFEST)[:-20])
    elif damage == "metadata":
        store.put(METADATA, b"\x80\x05nonsense")
    elif damage == "code in metadata":
        store.put(METADATA, b"cos\nsystem\n(S'touch pwned'\ntR.")
    assert main(["show", str(tmp_path / "c")]) == 5
    printed = capsys.readouterr()
    assert printed.err.startswith("ray-dcp: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


def test_a_plan_says_what_a_load_would_read(checkpoint, capsys):
    assert main(["show", checkpoint, "--plan", "--ranks", "2"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Rows 0-2 are of rank 0, rows 3-4 of rank 1; the scalar and the Python object are everybody's.
    assert ["0", "2", "3", "536", "B", "152", "B"] in words
    assert ["1", "__3_0_ab.distcp", "1", "16", "B", "64-80"] in words


def test_a_plan_is_of_one_rank_unless_more_are_asked_for(checkpoint, capsys):
    assert main(["show", checkpoint, "--plan", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    (rank,) = planned["ranks"]
    assert [file["file"] for file in rank["files"]] == ["__0_0_ab.distcp", "__1_0_ab.distcp", "__3_0_ab.distcp"]
    assert rank["nbytes_wanted"] == 80 + 4 + 100


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--ranks", "2"], "goes with --plan"), (["--plan", "--ranks", "0"], "1 or more")],
)
def test_ranks_without_a_plan_or_none_at_all_are_refused(checkpoint, capsys, arguments, told):
    assert main(["show", checkpoint, *arguments]) != 0
    assert told in capsys.readouterr().err


def test_without_a_manifest_there_is_no_plan(tmp_path, capsys):
    open_store(tmp_path).put(METADATA, b"m")
    assert main(["show", str(tmp_path), "--plan"]) != 0
    assert "has no manifest" in capsys.readouterr().err
