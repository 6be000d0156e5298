"""Conversions between DCP checkpoints, safetensors and torch.save files, vouched for by the formats' own libraries."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ray_dcp as dcp
from ray_dcp.catalog.facts import describe
from ray_dcp.convert.conversion import convert
from ray_dcp.convert.conversion_plan import ConvertOptions, plan_convert
from ray_dcp.convert.new_files import new_files
from ray_dcp.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StateDictError,
    StoreError,
    UnsafeDataError,
)
from ray_dcp.format.names import METADATA
from ray_dcp.reads.safetensors_folder import find_safetensors
from ray_dcp.store import local
from ray_dcp.store.open import open_store
from ray_dcp.write.writer import StoreWriter
from tests.reads.test_safetensors_folder import ODD_NAMES, of_every_dtype, require_same
from tests.shardings import same_bits
from tests.test_memory import MIB, ExtraMemory

ALL = of_every_dtype() | {name: torch.tensor([float(n), -0.0]) for n, name in enumerate(ODD_NAMES)}
NESTED = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(4, dtype=torch.bfloat16)},
    "optimizer": {"groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.8, 0.9)}]},
    "step": 7,
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "rng": (torch.arange(5, dtype=torch.uint8),),
}


def run(source, dest, **options):
    return convert(plan_convert(source, dest, ConvertOptions(**options)))


def same_state(one, other):
    """Equal structures with equal tensors and values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_bits(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(same_state(a, b) for a, b in zip(one, other, strict=True))
    return one == other and type(one) is type(other)


def zeros_like(state):
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return [zeros_like(value) for value in state] if isinstance(state, list) else None


def files_in(folder):
    return sorted(os.listdir(folder)) if os.path.exists(folder) else []


def write(kind, folder, state):
    """``state`` in one of the formats, by the format's own library; where it lies."""
    place = folder / f"{kind}-source"
    if kind == "dcp":
        dcp.save(state, checkpoint_id=place, no_dist=True)
    elif kind == "torch's dcp":
        torch_dcp.save(state, checkpoint_id=place, no_dist=True)
    elif kind == "safetensors":
        place.mkdir()
        save_file(state, place / "model.safetensors")
    else:
        torch.save(state, place)
    return place


def read(kind, place, state):
    """What lies at ``place``, read by the format's own library."""
    if kind == "dcp":
        template = zeros_like(state)
        torch_dcp.load(template, checkpoint_id=place, no_dist=True)
        return template
    return load_file(place / "model.safetensors") if kind == "safetensors" else torch.load(place, weights_only=True)


# Every way, bit by bit.


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
@pytest.mark.parametrize("source", ["dcp", "torch's dcp", "safetensors", "torch"])
def test_tensors_of_every_dtype_shape_and_name_come_out_as_they_went_in(tmp_path, source, to):
    report = run(write(source, tmp_path, ALL), tmp_path / "dest", to=to)
    require_same(read(to, tmp_path / "dest", ALL), ALL)
    assert (report.num_tensors, report.num_objects) == (len(ALL), 0)
    assert report.nbytes == sum(value.nbytes for value in ALL.values())


@pytest.mark.parametrize("source", ["dcp", "torch's dcp", "torch"])
def test_a_nested_state_dict_with_python_values_stays_as_it_is(tmp_path, source):
    place = write(source, tmp_path, NESTED)
    run(place, tmp_path / "dest.pt")
    assert same_state(torch.load(tmp_path / "dest.pt", weights_only=True), NESTED)
    assert same_state(torch.load(tmp_path / "dest.pt", weights_only=True, mmap=True), NESTED)
    run(place, tmp_path / "dest", to="dcp")
    for load in (dcp.load, torch_dcp.load):
        template = zeros_like(NESTED)
        load(template, checkpoint_id=tmp_path / "dest", no_dist=True)
        assert same_state(template, NESTED)


def test_torchs_own_converters_make_the_same(tmp_path):
    torch.save(NESTED, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "theirs")
    run(tmp_path / "a.pt", tmp_path / "ours", to="dcp")
    for folder in ("theirs", "ours"):
        run(tmp_path / folder, tmp_path / f"{folder}.pt")
        dcp_to_torch_save(tmp_path / folder, tmp_path / f"{folder}-by-torch.pt")
        for file in (f"{folder}.pt", f"{folder}-by-torch.pt"):
            assert same_state(torch.load(tmp_path / file, weights_only=True), NESTED), file


def test_a_tensor_that_many_ranks_saved_becomes_one(tmp_path):
    whole = torch.arange(77.0).reshape(7, 11)
    shards = dcp.LocalShards((7, 11), {(0, 0): whole[:3], (3, 0): whole[3:, :5], (3, 5): whole[3:, 5:]})
    dcp.save({"w": shards}, checkpoint_id=tmp_path / "c", no_dist=True)
    run(tmp_path / "c", tmp_path / "m.safetensors")
    require_same(load_file(tmp_path / "m.safetensors"), {"w": whole})


def test_views_and_tied_tensors_of_a_torch_file_become_copies(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "whole": base, "tied": base, "row": base[2], "column": base[:, 3], "turned": base.t(), "part": base[1:3, 2:5],
        "repeated": torch.ones(1, 3).expand(5, 3), "parameter": torch.nn.Parameter(base + 1),
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    run(tmp_path / "a.pt", tmp_path / "m.safetensors")
    require_same(load_file(tmp_path / "m.safetensors"), {k: v.detach().clone().contiguous() for k, v in state.items()})


def test_tensors_within_a_python_value_are_read_with_it(tmp_path):
    counts = Counter({"a": 2})
    state = {"w": torch.ones(2), "kept": ({"rng": torch.arange(3), "more": [torch.ones(1)]}, "x", counts)}
    torch.save(state, tmp_path / "a.pt")
    run(tmp_path / "a.pt", tmp_path / "b.pt")
    run(tmp_path / "a.pt", tmp_path / "c", to="dcp")
    run(tmp_path / "c", tmp_path / "d.pt")
    for file in ("b.pt", "d.pt"):
        assert same_state(torch.load(tmp_path / file, weights_only=True), state)


def test_tensors_within_a_python_value_go_on_sharing_memory(tmp_path):
    base = torch.arange(6.0)
    dcp.save({"kept": (base, base[2:])}, checkpoint_id=tmp_path / "c", no_dist=True)
    run(tmp_path / "c", tmp_path / "c.pt")
    whole, part = torch.load(tmp_path / "c.pt", weights_only=True)["kept"]
    assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    assert part.tolist() == [2, 3, 4, 5]


def test_a_value_of_one_rank_is_kept_under_its_name(tmp_path):
    state = {"w": torch.ones(2), "rng": dcp.PerRank({"cursor": 5})}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    run(tmp_path / "c", tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", weights_only=True)["rng"] == {"__rank_0__": ({"cursor": 5},)}
    run(tmp_path / "c.pt", tmp_path / "back", to="dcp")
    again = {"w": torch.zeros(2), "rng": dcp.PerRank(None)}
    dcp.load(again, checkpoint_id=tmp_path / "back", no_dist=True)
    assert again["rng"].value == {"cursor": 5}


def test_from_and_to_stores_that_are_no_folders(tmp_path):
    url = "memory://convert-stores"
    state = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.int8)}
    torch.save(state, tmp_path / "a.pt")
    open_store(f"{url}/files").put("a.pt", (tmp_path / "a.pt").read_bytes())
    run(f"{url}/files/a.pt", f"{url}/dcp", to="dcp")
    run(f"{url}/dcp", f"{url}/split", to="safetensors", max_shard_nbytes=10)
    run(f"{url}/split", f"{url}/files/one.safetensors")
    run(f"{url}/files/one.safetensors", f"{url}/files/b.pt")
    loaded = torch.load(io.BytesIO(open_store(f"{url}/files").get("b.pt")), weights_only=True)
    assert same_state(loaded, state)
    assert [one.key for one in open_store(f"{url}/split").list()] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip


# What the files look like.


def test_shards_and_their_index_are_as_hugging_face_has_them(tmp_path):
    state = {f"layer.{n}": torch.full((10,), float(n)) for n in range(7)}  # 40 bytes each
    run(write("dcp", tmp_path, state), tmp_path / "out", to="safetensors", max_shard_nbytes=100)
    names = [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert files_in(tmp_path / "out") == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 280}
    assert set(index["weight_map"].values()) == set(names)
    read_back = {}
    for name in names:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            read_back |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
            assert [key for key in file.keys() if index["weight_map"][key] != name] == []  # noqa: SIM118
    require_same(read_back, state)
    template = zeros_like(state)
    torch_dcp.load(template, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    require_same(template, state)


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path):
    state = {"a": torch.ones(1), "big": torch.ones(100), "z": torch.ones(1)}
    plan = plan_convert(
        write("torch", tmp_path, state), tmp_path / "out", ConvertOptions(to="safetensors", max_shard_nbytes=50)
    )
    assert [[one.name for one in file.values] for file in plan.files] == [["a"], ["big"], ["z"]]
    convert(plan)
    assert [(tmp_path / "out" / file.key).stat().st_size for file in plan.files] == [file.nbytes for file in plan.files]


def test_each_tensor_of_a_safetensors_file_is_aligned_to_its_dtype(tmp_path):
    state = {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(1, dtype=torch.bfloat16), "c": torch.ones(1)}
    run(write("torch", tmp_path, state), tmp_path / "out", to="safetensors")
    content = (tmp_path / "out/model.safetensors").read_bytes()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    described = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert {name: described[name]["data_offsets"][0] for name in "abc"} == {"c": 0, "a": 4, "b": 6}


def test_a_torch_file_is_laid_out_as_torchs_own(tmp_path):
    run(write("dcp", tmp_path, NESTED), tmp_path / "ours.pt")
    with zipfile.ZipFile(tmp_path / "ours.pt") as archive:
        assert archive.testzip() is None
        names = [record.filename.partition("/")[2] for record in archive.infolist()]
    assert names[0] == "data.pkl"
    assert {"version", "byteorder", ".format_version", ".storage_alignment", "data/0"} <= set(names)
    mapped = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=True)["model"]["weight"]
    assert mapped.data_ptr() % 64 == 0
    again = io.BytesIO()
    torch.save(torch.load(tmp_path / "ours.pt", weights_only=True), again)
    again.seek(0)
    assert same_state(torch.load(again, weights_only=True), NESTED)


def test_a_checkpoint_has_a_manifest_with_checksums(tmp_path):
    run(write("safetensors", tmp_path, {"w": torch.ones(4)}), tmp_path / "c", to="dcp")
    assert describe(tmp_path / "c").world_size == 1
    (shard,) = [name for name in files_in(tmp_path / "c") if name.endswith(".distcp")]
    content = bytearray((tmp_path / "c" / shard).read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes())] ^= 1
    (tmp_path / "c" / shard).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        run(tmp_path / "c", tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


# Which values, under which names.


def test_a_file_that_holds_nothing_is_called_so(tmp_path):
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(ConfigError, match=r"empty.pt holds nothing"):
        run(tmp_path / "empty.pt", tmp_path / "c", to="dcp")


def test_patterns_choose_names(tmp_path):
    place = write("dcp", tmp_path, {f"{part}.{n}": torch.ones(1) for part in ("enc", "dec") for n in range(3)})
    plan = plan_convert(
        place, tmp_path / "m.safetensors", ConvertOptions(include=["enc.*", "dec.[01]"], exclude=["*.1"])
    )
    assert sorted(one.name for one in plan.values) == ["dec.0", "enc.0", "enc.2"]
    assert sorted(plan.left_out) == ["dec.1", "dec.2", "enc.1"]
    convert(plan)
    assert load_file(tmp_path / "m.safetensors").keys() == {"dec.0", "enc.0", "enc.2"}
    with pytest.raises(ConfigError, match=r"no name fits the pattern 'nope\.\*'"):
        run(place, tmp_path / "n.safetensors", include=["nope.*"])
    with pytest.raises(ConfigError, match="leave out all"):
        run(place, tmp_path / "n.safetensors", exclude=["*"])


def test_prefixes_are_taken_off_and_put_on(tmp_path):
    place = write("dcp", tmp_path, {"model": {"w": torch.ones(1)}, "other": torch.zeros(1)})
    run(place, tmp_path / "a.pt", strip_prefix="model.", add_prefix="net.")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same_state(loaded, {"net.w": torch.ones(1), "net.other": torch.zeros(1)})
    run(tmp_path / "a.pt", tmp_path / "b", to="dcp", strip_prefix="net.", include=["net.w"])
    template = {"w": torch.zeros(1)}
    torch_dcp.load(template, checkpoint_id=tmp_path / "b", no_dist=True)
    assert template["w"].item() == 1
    with pytest.raises(ConfigError, match="no name begins with 'modle'"):
        run(place, tmp_path / "c.pt", strip_prefix="modle")


def test_two_values_of_one_name_are_refused(tmp_path):
    place = write("torch", tmp_path, {"a.w": torch.ones(1), "w": torch.zeros(1)})
    with pytest.raises(ConfigError, match="several values would have the name 'w'"):
        run(place, tmp_path / "x.safetensors", strip_prefix="a.")


def test_python_values_are_named_where_safetensors_cannot_hold_them(tmp_path):
    place = write("dcp", tmp_path, NESTED)
    with pytest.raises(StateDictError) as caught:
        run(place, tmp_path / "out", to="safetensors")
    (problem,) = caught.value.problems
    assert problem.startswith("6 Python values: ")
    assert "step" in problem
    assert not (tmp_path / "out").exists()
    run(place, tmp_path / "out", to="safetensors", skip_python=True)
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"model.weight", "model.bias", "scalar", "empty"}


def test_a_dtype_that_safetensors_lack_is_refused_by_name(tmp_path):
    place = write("torch", tmp_path, {"fine": torch.ones(1), "wide": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(StateDictError, match="wide: the format has no dtype complex128"):
        run(place, tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()
    run(place, tmp_path / "c", to="dcp")
    run(tmp_path / "c", tmp_path / "back.pt")
    assert torch.load(tmp_path / "back.pt", weights_only=True)["wide"].dtype == torch.complex128


def test_the_name_that_the_format_uses_itself_is_refused(tmp_path):
    with pytest.raises(StateDictError, match="__metadata__"):
        run(write("torch", tmp_path, {"__metadata__": torch.ones(1)}), tmp_path / "out", to="safetensors")


# Where it goes.


@pytest.mark.parametrize(
    ("dest", "to"), [("x.pt", None), ("x.safetensors", None), ("folder", "safetensors"), ("ckpt", "dcp")]
)
def test_what_is_there_is_only_replaced_on_request(tmp_path, dest, to):
    place = write("torch", tmp_path, {"w": torch.ones(3)})
    run(place, tmp_path / dest, to=to)
    torch.save({"w": torch.zeros(3)}, place)
    with pytest.raises(ConfigError, match=r"already; pass --overwrite"):
        run(place, tmp_path / dest, to=to)
    run(tmp_path / dest, tmp_path / "look.pt")
    assert torch.load(tmp_path / "look.pt", weights_only=True)["w"].tolist() == [1, 1, 1]
    run(place, tmp_path / dest, to=to, overwrite=True)
    run(tmp_path / dest, tmp_path / "look.pt", overwrite=True)
    assert torch.load(tmp_path / "look.pt", weights_only=True)["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("url", ["", "memory://convert-replaced"])
def test_a_replaced_model_leaves_no_file_of_its_own(tmp_path, url):
    folder = url or str(tmp_path / "out")
    place = write("torch", tmp_path, {f"w{n}": torch.full((10,), float(n)) for n in range(3)})
    run(place, folder, to="safetensors", max_shard_nbytes=40)
    open_store(folder).put("config.json", b"{}")
    run(place, folder, to="safetensors", overwrite=True)
    assert [one.key for one in open_store(folder).list()] == ["config.json", "model.safetensors"]
    run(place, folder, to="safetensors", overwrite=True, max_shard_nbytes=80)
    run(place, folder, to="safetensors", overwrite=True, max_shard_nbytes=90)
    assert [one.key for one in open_store(folder).list()] == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    assert find_safetensors(open_store(folder)) is not None


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path):
    place = write("torch", tmp_path, {"w": torch.ones(1)})
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        run(place, tmp_path / "folder.pt")
    with pytest.raises(ConfigError, match="say which format"):
        run(place, tmp_path / "out")
    with pytest.raises(ConfigError, match="is where SOURCE lies"):
        run(place, place, to="torch", overwrite=True)
    with pytest.raises(StoreError):
        run(place, place / "below", to="dcp")
    checkpoint = write("dcp", tmp_path, {"w": torch.ones(1)})
    with pytest.raises(ConfigError, match="a checkpoint is committed"):
        run(place, checkpoint, to="safetensors", overwrite=True)
    with pytest.raises(ConfigError, match="is where SOURCE lies"):
        run(checkpoint, checkpoint, to="dcp", overwrite=True)
    model = write("safetensors", tmp_path, {"w": torch.ones(1)})
    with pytest.raises(ConfigError, match="is where SOURCE lies"):
        run(model / "model.safetensors", model, to="safetensors", overwrite=True)
    with pytest.raises(ConfigError, match="is where SOURCE lies"):
        run(model, model / "more.safetensors")
    with pytest.raises(ConfigError, match="is one file"):
        run(place, tmp_path / "x.safetensors", max_shard_nbytes=5)
    with pytest.raises(ConfigError, match="for safetensors alone"):
        run(place, tmp_path / "x.pt", max_shard_nbytes=5)


def test_a_torch_file_may_lie_in_the_folder_that_it_is_converted_to(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    run(tmp_path / "pytorch_model.bin", tmp_path, to="safetensors")
    assert files_in(tmp_path) == ["model.safetensors", "pytorch_model.bin"]


# Sources that are no good.


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_source_that_asks_to_run_code_is_refused_and_nothing_is_run(tmp_path, kind):
    state = {"w": torch.ones(1), "config": Evil(tmp_path / "pwned")}
    place = write("torch's dcp" if kind == "dcp" else kind, tmp_path, state)
    with pytest.raises(UnsafeDataError, match="system"):
        run(place, tmp_path / "out.pt")
    assert not (tmp_path / "pwned").exists()
    assert not (tmp_path / "out.pt").exists()


def test_a_file_that_is_no_state_dict_is_refused(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(StateDictError, match="holds a list"):
        run(tmp_path / "list.pt", tmp_path / "o.safetensors")
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptCheckpointError, match=r"before 1\.6"):
        run(tmp_path / "old.pt", tmp_path / "o.safetensors")
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises((StateDictError, CorruptCheckpointError), match="sparse"):
        run(tmp_path / "sparse.pt", tmp_path / "o.safetensors")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(CheckpointNotFoundError, match="file"):
        run(tmp_path / "text.pt", tmp_path / "o.safetensors")
    (tmp_path / "zip.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CorruptCheckpointError, match="zip"):
        run(tmp_path / "zip.pt", tmp_path / "o.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="nothing is there"):
        run(tmp_path / "none", tmp_path / "o.safetensors")


def test_a_torch_file_with_a_flipped_bit_is_refused_by_name(tmp_path):
    torch.save({"a": torch.ones(1000), "w": torch.full((1000,), 3.0)}, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.index(torch.full((1000,), 3.0).numpy().tobytes()) + 1234] ^= 4
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="w: stored bytes fail their checksum"):
        run(tmp_path / "a.pt", tmp_path / "o", to="dcp")
    assert files_in(tmp_path / "o") == []


def test_a_view_past_the_end_of_its_storage_is_refused(tmp_path):
    """Also where the storage claims more bytes than are there, which would be those of another tensor."""
    torch.save({"a": torch.arange(4.0), "b": torch.ones(64)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for record in old.infolist():
            content = old.read(record)
            if record.filename.endswith("data.pkl"):
                content = content.replace(b"K\x04tq", b"K\x08tq", 1)
            new.writestr(record.filename, content)
    changed = torch.load(tmp_path / "b.pt", weights_only=True, map_location="meta")
    assert changed["a"].untyped_storage().nbytes() == 32
    with pytest.raises(CorruptCheckpointError, match="a: its storage has 32 bytes, of which 16 are there"):
        run(tmp_path / "b.pt", tmp_path / "o.safetensors")


def test_a_list_index_out_of_all_reason_is_not_believed(tmp_path):
    place = write("torch's dcp", tmp_path, {"w": torch.ones(1)})
    metadata = pickle.loads((place / METADATA).read_bytes())
    described = metadata.state_dict_metadata.pop("w")
    name = f"w.{10**12}"
    metadata.state_dict_metadata[name] = described
    (index, place_of) = metadata.storage_data.popitem()
    metadata.storage_data[type(index)(name, index.offset)] = place_of
    metadata.planner_data = {name: ("w", 10**12)}
    (place / METADATA).write_bytes(pickle.dumps(metadata))
    run(place, tmp_path / "o.pt")
    assert list(torch.load(tmp_path / "o.pt", weights_only=True)) == [name]


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_values_that_would_hide_each_other_are_refused(tmp_path, names):
    place = write("torch's dcp", tmp_path, {name: torch.ones(1) for name in names})
    metadata = pickle.loads((place / METADATA).read_bytes())
    metadata.planner_data = {"a.b": ("a", "b"), "a": ("a",)}
    (place / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateDictError, match="state dict"):
        run(place, tmp_path / "o.pt")
    assert not (tmp_path / "o.pt").exists()


# A failure in the middle.


class FailingSource:
    """A source whose ``fails_at``-th tensor cannot be read."""

    def __init__(self, source, fails_at):
        self._source = source
        self._left = fails_at

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read_tensor(self, value):
        self._left -= 1
        if self._left == 0:
            raise StoreError("the disk is gone", url="x")
        return self._source.read_tensor(value)


@pytest.mark.parametrize("url", ["", "memory://convert-fails"])
@pytest.mark.parametrize(
    ("dest", "to"), [("x.pt", None), ("x.safetensors", None), ("folder", "safetensors"), ("ckpt", "dcp")]
)
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failure_in_the_middle_leaves_nothing_and_what_was_there(tmp_path, url, dest, to, fails_at):
    base = f"{url}-{to}-{dest}-{fails_at}" if url else str(tmp_path / "base")
    place = write("torch", tmp_path, {f"w{n}": torch.ones(10) for n in range(3)})
    split = {"max_shard_nbytes": 40} if dest == "folder" else {}

    def failing(**options):
        plan = plan_convert(place, f"{base}/{dest}", ConvertOptions(to=to, **split, **options))
        failing_plan = dataclasses.replace(plan, source=FailingSource(plan.source, fails_at))
        with pytest.raises(StoreError, match="the disk is gone"):
            convert(failing_plan)

    failing()
    assert open_store(base).list() == []
    run(place, f"{base}/{dest}", to=to, **split)
    before = {one.key: open_store(base).get(one.key) for one in open_store(base).list()}
    if not url or to == "dcp":  # a bucket has no rename, so there the old files go first
        failing(overwrite=True)
        assert {one.key: open_store(base).get(one.key) for one in open_store(base).list()} == before
        temporaries = [name for _, _, names in os.walk(base) for name in names if name.endswith(".tmp")]
        assert temporaries == []


def test_a_checkpoint_that_cannot_be_committed_leaves_no_shard_file(tmp_path, monkeypatch):
    def fail(*_):
        raise StoreError("no", url="x")

    monkeypatch.setattr(StoreWriter, "finish", fail)
    with pytest.raises(StoreError):
        run(write("torch", tmp_path, {"w": torch.ones(3)}), tmp_path / "c", to="dcp")
    assert files_in(tmp_path / "c") == []


def test_a_store_that_fails_while_a_torch_file_is_written_ends_with_its_error(tmp_path, monkeypatch):
    place = write("torch", tmp_path, {f"w{n}": torch.ones(10) for n in range(3)})
    plan = plan_convert(place, tmp_path / "out/x.pt", ConvertOptions())
    real = local.write_fully
    calls = []

    def failing(descriptor, chunk):
        calls.append(len(memoryview(chunk)))
        if len(calls) == 6:
            raise OSError(28, "No space left on device")
        return real(descriptor, chunk)

    monkeypatch.setattr(local, "write_fully", failing)
    with pytest.raises(StoreError, match="No space left"):
        convert(plan)
    assert len(calls) == 6
    assert files_in(tmp_path / "out") == []


def test_shards_without_the_rest_are_never_read_as_a_model():
    """In a bucket, where the process dies in the middle: the index is there first, and names what is missing."""
    store = open_store("memory://convert-dies")
    index = b'{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}'

    def die_in_the_middle():
        with new_files(store, index=("model.safetensors.index.json", index)) as create:
            with create("x.safetensors") as sink:
                sink.write(b"whole")
            assert [one.key for one in store.list()] == ["model.safetensors.index.json", "x.safetensors"]
            with pytest.raises(CorruptCheckpointError, match=r"y\.safetensors is missing"):
                find_safetensors(store)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_in_the_middle()
    assert store.list() == []


# Memory.

BY_DAY = {("dcp", "torch"), ("torch's dcp", "dcp"), ("safetensors", "safetensors"), ("torch", "dcp")}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
# Each source and each target by day, all pairs by night: 200 MB of tensors are written, and copied.
@pytest.mark.parametrize(
    ("source", "to"),
    [
        pytest.param(source, to, marks=[] if (source, to) in BY_DAY else [pytest.mark.soak])
        for source in ("dcp", "torch's dcp", "safetensors", "torch")
        for to in ("dcp", "safetensors", "torch")
    ],
)
def test_no_more_than_a_tensor_is_in_memory(tmp_path, source, to):
    (tmp_path / "small").mkdir()
    run(write(source, tmp_path / "small", {"w": torch.ones(1)}), tmp_path / "small/out", to=to)  # imports what it needs
    state = {f"w{n}": torch.full((MIB * 20 // 4,), float(n)) for n in range(10)}
    place = write(source, tmp_path, state)
    del state
    plan = plan_convert(place, tmp_path / "out", ConvertOptions(to=to))
    with ExtraMemory() as extra:
        convert(plan)
    assert extra.nbytes < (64 + 20) * MIB
