"""Models as Hugging Face leaves them: names without the model's own, tied weights once, dtypes that torch may lack."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save, save_file

import ray_dcp as dcp
from ray_dcp.cli.main import main
from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.safetensors_header import encode_header, read_header
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.reads.checkpoint import open_checkpoint
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)


class LanguageModel(torch.nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def saved(folder, *, tied: bool) -> LanguageModel:
    model = LanguageModel(tied=tied)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    return model


def require_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    assert all(same_bits(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def emptied(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("key", ["model", "module", "net"])
def test_a_model_under_any_name_loads_as_the_documentation_says(tmp_path, tied, key):
    model = saved(tmp_path, tied=tied)
    filled = emptied(LanguageModel(tied=tied))
    report = dcp.load({key: filled}, checkpoint_id=tmp_path, no_dist=True)
    require_same(filled, model)
    assert (report.missing, report.unexpected) == ((), ())
    assert f"{key}.model.embed_tokens.weight" in report.loaded


@pytest.mark.parametrize("tied", [True, False])
def test_the_state_dict_itself_and_a_part_of_the_model_load_too(tmp_path, tied):
    model = saved(tmp_path, tied=tied)
    filled = emptied(LanguageModel(tied=tied))
    dcp.load(filled.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    require_same(filled, model)
    inner = emptied(Inner())
    dcp.load({"model": inner}, checkpoint_id=tmp_path, no_dist=True)  # these are the names in the files
    require_same(inner, model.model)


def test_several_ranks_load_it(tmp_path):
    model = saved(tmp_path, tied=True)
    filled = [emptied(LanguageModel(tied=True)) for _ in range(3)]
    ranks = ThreadRanks(3)
    require_no_errors(ranks.load([{"model": one} for one in filled], str(tmp_path)))
    for one in filled:
        require_same(one, model)


def test_a_head_that_is_not_tied_is_missing(tmp_path):
    saved(tmp_path, tied=True)
    filled = LanguageModel(tied=False)
    before = {name: value.clone() for name, value in filled.state_dict().items()}
    with pytest.raises(CheckpointException, match=r"model.lm_head.weight: Missing key"):
        dcp.load({"model": filled}, checkpoint_id=tmp_path, no_dist=True)
    assert all(same_bits(value, before[name]) for name, value in filled.state_dict().items())


def test_what_the_caller_renames_is_renamed_so_and_no_other_way(tmp_path):
    model = saved(tmp_path, tied=False)
    filled = emptied(LanguageModel(tied=False))
    dcp.load({"net": filled}, checkpoint_id=tmp_path, no_dist=True, rename={"^": "net."})
    require_same(filled, model)
    with pytest.raises(CheckpointException):
        dcp.load({"net": filled}, checkpoint_id=tmp_path, no_dist=True, rename={"^": "other."})


def test_only_and_skip_are_about_the_templates_names(tmp_path):
    model = saved(tmp_path, tied=False)
    filled = emptied(LanguageModel(tied=False))
    dcp.load({"net": filled}, checkpoint_id=tmp_path, no_dist=True, only=["net.lm_head"])
    assert same_bits(filled.lm_head.weight, model.lm_head.weight)
    assert filled.model.norm.weight.isnan().all()


def test_a_checkpoint_of_ours_is_taken_at_its_word(tmp_path):
    dcp.save(LanguageModel(tied=False).state_dict(), checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"model": LanguageModel(tied=False)}, checkpoint_id=tmp_path / "c", no_dist=True)


def test_old_shard_files_that_a_newer_index_does_not_name_are_left_alone(tmp_path):
    new = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    save_file({"a": new["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": new["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(9), "b": torch.zeros(9)}, tmp_path / "model-00001-of-00003.safetensors")
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"cut short")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    filled = {"a": torch.zeros(2), "b": torch.zeros(3)}
    dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
    assert all(same_bits(filled[name], new[name]) for name in new)
    assert main(["show", str(tmp_path)]) == 0


def float4(*shape: int) -> torch.Tensor:
    nbytes = torch.Size(shape).numel()
    return torch.arange(nbytes, dtype=torch.uint8).reshape(shape).view(torch.float4_e2m1fn_x2)


def test_four_bits_are_two_in_a_byte(tmp_path):
    w = float4(2, 4)
    save_file({"w": w, "x": torch.ones(3)}, tmp_path / "model.safetensors")
    filled = {"w": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "x": torch.zeros(3)}
    dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(filled["w"].view(torch.uint8), w.view(torch.uint8))
    assert torch.equal(filled["x"], torch.ones(3))


def test_four_bits_are_written_as_the_formats_own_library_writes_them():
    w = float4(3, 2)
    front, _ = encode_header([("w", "float4_e2m1fn_x2", (3, 2))], {})
    assert front + w.view(torch.uint8).numpy().tobytes() == save({"w": w})


def with_dtype(folder, dtype: str, shape: list[int], nbytes: int) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "odd": {"dtype": dtype, "shape": shape, "data_offsets": [8, 8 + nbytes]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + torch.ones(2).numpy().tobytes() + bytes(nbytes)
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(("dtype", "nbytes"), [("F6_E2M3", 6), ("I4", 4), ("Q7_NEW", 0)])
def test_a_dtype_that_torch_has_no_word_for_concerns_its_tensor_alone(tmp_path, capsys, dtype, nbytes):
    with_dtype(tmp_path, dtype, [2, 4], nbytes)
    filled = {"a": torch.zeros(2)}
    report = dcp.load(filled, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(filled["a"], torch.ones(2))
    assert report.unexpected == ("odd",)
    for wanted in (torch.zeros(2, 4), torch.zeros(nbytes, dtype=torch.uint8), None):
        with pytest.raises(CheckpointException, match="odd: its dtype is one that torch has no word for"):
            dcp.load({"a": filled["a"], "odd": wanted}, checkpoint_id=tmp_path, no_dist=True, cast=True)
    assert main(["show", str(tmp_path)]) == 0
    assert dtype in capsys.readouterr().out
    dest = tmp_path / "out"
    assert main(["convert", str(tmp_path), str(dest), "--to", "safetensors"]) != 0
    assert "odd" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(dest), "--to", "safetensors", "--exclude", "odd"]) == 0


@pytest.mark.parametrize("shape", [[], [3], [2, 3]])
def test_four_bits_that_fill_no_whole_byte_are_refused(tmp_path, shape):
    with_dtype(tmp_path, "F4", shape, 3)
    with pytest.raises(CorruptCheckpointError, match="two in a byte"):
        open_checkpoint(tmp_path)


def test_a_file_is_still_refused_where_its_bytes_do_not_add_up(tmp_path):
    with_dtype(tmp_path, "F6_E2M3", [2, 4], 6)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="ends too early"):
        open_checkpoint(tmp_path)


def test_the_header_says_what_the_format_calls_it(tmp_path):
    with_dtype(tmp_path, "F6_E2M3", [2, 4], 6)
    content = (tmp_path / "model.safetensors").read_bytes()
    header = read_header(lambda offset, nbytes: content[offset : offset + nbytes], len(content), file="f")
    assert [(one.name, one.dtype, one.shape, one.nbytes) for one in header.tensors][1] == ("odd", "F6_E2M3", (2, 4), 6)
    opened = open_checkpoint(tmp_path)
    assert decode_manifest(opened.manifest, file="m").entries[1].dtype == "F6_E2M3"


def test_verify_looks_at_headers_and_says_that_the_rest_has_no_checksums(tmp_path, capsys):
    saved(tmp_path, tied=True)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        assert main(["verify", str(place)]) == 0
        said = capsys.readouterr().out
        assert "not checkable: 3 items, it lies in a safetensors file, which has no checksums" in said
        assert "no damage found" in said
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["verify", str(tmp_path)]) == 5
    said = capsys.readouterr().out
    assert "ends too early: 1 bytes are missing" in said
    assert "model.safetensors" in said


def test_verify_knows_the_files_that_the_index_names(tmp_path, capsys):
    save_file({"a": torch.ones(2), "empty": torch.ones(0, 3)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(9)}, tmp_path / "old.safetensors")
    weight_map = {"a": "one.safetensors", "empty": "one.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert main(["verify", "--json", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_items"], report["num_files"], len(report["unchecked"])) == (2, 1, 1)


def test_verify_and_list_still_find_nothing_where_nothing_is(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    assert main(["verify", str(tmp_path)]) == 3
    capsys.readouterr()
    assert main(["list", str(tmp_path)]) == 0
    assert "no checkpoints under" in capsys.readouterr().out


def test_list_shows_models_beside_checkpoints_and_says_what_a_model_is(tmp_path, capsys):
    (tmp_path / "llama").mkdir()
    saved(tmp_path / "llama", tied=True)
    (tmp_path / "step-00000007").mkdir()
    saved(tmp_path / "step-00000007", tied=True)
    assert main(["list", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "safetensors: llama" in said
    assert "safetensors: step-00000007" in said
    assert "unfinished" not in said
    assert "no checkpoints" not in said
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert main(["list", "--json", str(tmp_path)]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in listing["checkpoints"]] == [1]
    assert [one["nbytes"] > 0 for one in listing["safetensors"]] == [True, True]
    assert main(["list", str(tmp_path / "llama")]) == 0
    assert "is itself a checkpoint" in capsys.readouterr().out
