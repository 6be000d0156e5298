"""Folders of safetensors files as checkpoints: those of Hugging Face's libraries, of torch, and damaged ones."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

import ray_dcp as dcp
from ray_dcp.errors import CheckpointNotFoundError, CorruptCheckpointError
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.metadata_file import decode_metadata
from ray_dcp.format.safetensors_header import MAX_HEADER_NBYTES, encode_header, has_dtype, read_header
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.reads.checkpoint import open_checkpoint
from ray_dcp.reads.reader import StoreReader
from ray_dcp.store.open import open_store
from tests import shardings
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
ODD_NAMES = ("", "a/b", "../up", "a.b.0", "\u91cd\u307f \U0001f9ca", 'quo"te\\', "new\nline", "\x00", " ")


def of_every_dtype() -> dict[str, torch.Tensor]:
    state = {
        f"t.{dtype}": torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3) for dtype in DTYPES
    }
    state["t.torch.bool"] = torch.tensor([[True, False, True], [False, True, True]])
    return state | {"empty": torch.empty(0, 3), "none": torch.empty(4, 0), "scalar": torch.tensor(2.5)}


def unlike(state):
    return {
        name: (~value.view(-1).view(torch.uint8)).view(value.dtype).reshape(value.shape) if value.numel() else value
        for name, value in ((name, value.reshape(value.shape)) for name, value in state.items())
    }


def loaded(place, state):
    """``state`` read back from ``place`` into tensors that are unlike it."""
    template = unlike({name: value.clone() for name, value in state.items()})
    dcp.load(template, checkpoint_id=place, no_dist=True)
    return template


def require_same(got, state):
    assert got.keys() == state.keys()
    assert [name for name in state if not same_bits(got[name], state[name])] == []


def put_index(folder, weight_map, name="model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def sharded(folder, **files):
    """A folder with an index; one tensor a keyword: its file."""
    weight_map = {}
    for number, (name, file) in enumerate(files.items()):
        save_file({name: torch.full((2, number + 1), number + 1.0)}, folder / file)
        weight_map[name] = file
    put_index(folder, weight_map)
    return {name: torch.full((2, number + 1), number + 1.0) for number, name in enumerate(files)}


# What is read.


def test_every_dtype_shape_and_name_of_one_file(tmp_path):
    state = of_every_dtype() | {name: torch.tensor([float(n)]) for n, name in enumerate(ODD_NAMES)}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    require_same(loaded(tmp_path, state), state)


def test_the_file_itself_is_a_checkpoint_too(tmp_path, monkeypatch):
    state = {"w": torch.arange(6.0)}
    save_file(state, tmp_path / "one.safetensors")
    save_file({"w": torch.zeros(6)}, tmp_path / "two.safetensors")
    require_same(loaded(tmp_path / "one.safetensors", state), state)
    monkeypatch.chdir(tmp_path)
    require_same(loaded("one.safetensors", state), state)


def test_a_folder_of_that_name_is_a_folder(tmp_path):
    save_file(
        {"w": torch.ones(2)}, (tmp_path / "m.safetensors").mkdir() or tmp_path / "m.safetensors/model.safetensors"
    )
    require_same(loaded(tmp_path / "m.safetensors", {"w": torch.ones(2)}), {"w": torch.ones(2)})


def test_shards_with_an_index(tmp_path):
    state = sharded(tmp_path, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")  # the index does not name it
    require_same(loaded(tmp_path, state), state)


def test_all_files_where_there_is_no_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "y.safetensors")
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    require_same(loaded(tmp_path, state), state)


def test_the_model_where_there_are_other_files_too(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(2), "adapter": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    require_same(loaded(tmp_path, {"w": torch.ones(2)}), {"w": torch.ones(2)})
    assert decode_metadata(open_checkpoint(tmp_path).metadata, file="").state_dict_metadata.keys() == {"w"}


def test_names_of_a_nested_state_dict_are_joined_by_dots(tmp_path):
    save_file({"model.layer.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    template = {"model": {"layer": {"weight": torch.zeros(3)}}}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert template["model"]["layer"]["weight"].tolist() == [1, 1, 1]


def test_from_a_store_that_is_no_folder_and_through_a_pointer(tmp_path):
    state = {"w": torch.arange(4.0)}
    store = open_store("memory://safetensors-folder/model")
    store.put("model.safetensors", save(state))
    require_same(loaded(store.url, state), state)
    open_store(tmp_path).put("ray_dcp_pointer.json", json.dumps({"checkpoint_id": store.url}).encode())
    require_same(loaded(tmp_path, state), state)


def test_a_committed_checkpoint_wins(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    require_same(loaded(tmp_path, {"w": torch.ones(3)}), {"w": torch.ones(3)})


def test_it_is_said_that_nothing_vouches_for_the_bytes(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    assert opened.unchecked
    manifest = decode_manifest(opened.manifest, file="")
    assert [(e.fqn, e.sizes, e.dtype, e.payload_nbytes, e.block_crcs) for e in manifest.entries] == [
        ("w", (3,), "float32", 12, ())
    ]
    assert decode_metadata(opened.metadata, file="").state_dict_metadata.keys() == {"w"}
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert not open_checkpoint(tmp_path).unchecked


def test_only_what_the_template_wants_is_read(tmp_path):
    save_file({"big": torch.zeros(1 << 20), "small": torch.ones(4, 256)}, tmp_path / "model.safetensors")
    shards = dcp.LocalShards((4, 256), {(1, 0): torch.zeros(1, 256)})
    report = dcp.load({"small": shards}, checkpoint_id=tmp_path, no_dist=True)
    assert shards.chunks[1, 0].tolist() == [[1.0] * 256]
    assert report.nbytes_read <= 4096


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_that_each_load_their_part(tmp_path, world_size):
    values = {
        f"{kind}.{dtype}".replace("torch.", ""): shardings.whole_tensor(kind, dtype)
        for kind in shardings.KINDS
        for dtype in shardings.DTYPES
    }
    save_file(values, tmp_path / "model.safetensors")
    templates = [shardings.templates(rank, world_size) for rank in range(world_size)]
    require_no_errors(ThreadRanks(world_size).load(templates, tmp_path))
    differing = [shardings.differences(templates[rank], rank, world_size) for rank in range(world_size)]
    assert differing == [[]] * world_size


def test_torchs_own_load_reads_them_through_the_reader(tmp_path):
    state = of_every_dtype()
    save_file(state, tmp_path / "model.safetensors")
    template = unlike(state)
    torch_dcp.load(template, storage_reader=StoreReader(tmp_path), no_dist=True)
    require_same(template, state)


def test_a_folder_with_neither_says_what_is_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match=r"1 file, but no \.metadata"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="this is a file; a checkpoint is a folder"):
        open_checkpoint(tmp_path / "config.json")
    with pytest.raises(CheckpointNotFoundError, match="nothing is there"):
        open_checkpoint(tmp_path / "none.safetensors")


def test_a_template_that_does_not_fit_is_refused_before_anything_is_read(tmp_path):
    save_file({"w": torch.ones(3), "v": torch.ones(2)}, tmp_path / "model.safetensors")
    template = {"w": torch.zeros(4), "v": torch.zeros(2, dtype=torch.bfloat16), "x": torch.zeros(1)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    said = str(caught.value)
    assert "w: Size mismatch: the checkpoint has shape (3,)" in said
    assert "v: the checkpoint has dtype torch.float32" in said
    assert "x" in said
    assert template["v"].tolist() == [0, 0]


# What torch writes.


def save_as_torch(folder, state, **kwargs):
    torch_dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), **kwargs), no_dist=True)


def test_what_torchs_writer_writes(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(3)}
    save_as_torch(tmp_path / "one", state)
    save_as_torch(tmp_path / "two", state, fqn_to_index_mapping={"a": 1, "b": 2, "s": 2})
    save_as_torch(tmp_path / "sharded", state, save_distributed=True)
    for folder in ("one", "two", "sharded"):
        require_same(loaded(tmp_path / folder, state), state)
    # Torch's consolidation makes zeros of scalars and fails for integers.
    floats = {"a": state["a"], "b": state["b"]}
    save_as_torch(tmp_path / "both", floats, save_distributed=True, enable_consolidation=True)
    for folder in ("both", "both/sharded"):
        require_same(loaded(tmp_path / folder, floats), floats)


def write_chunks(folder, chunks):
    """One file a chunk, with the header that torch's writer gives to a chunk of a ``DTensor``."""
    for number, (offsets, chunk) in enumerate(chunks, 1):
        texts = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": list(offsets)}}), "DCP_VERSION": "1.0"}
        file = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file({"w": chunk.contiguous()}, file, texts)


@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_of_a_tensor_over_several_files_are_read_as_one_as_torch_does(tmp_path, dim):
    whole = torch.arange(60.0).reshape(6, 10)
    starts = (0, 3) if dim == 0 else (0, 4, 9)
    parts = torch.tensor_split(whole, starts[1:], dim=dim)
    write_chunks(tmp_path, [((n, 0) if dim == 0 else (0, n), part) for n, part in zip(starts, parts, strict=True)])
    require_same(loaded(tmp_path, {"w": whole}), {"w": whole})
    theirs = {"w": torch.zeros(6, 10)}
    torch_dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    require_same(theirs, {"w": whole})


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([((0, 0), torch.ones(2, 3)), ((3, 0), torch.ones(2, 3))], "3 of 15 elements lie in no file"),
        ([((0, 0), torch.ones(2, 3)), ((1, 0), torch.ones(2, 3))], "more than one file holds it"),
        ([((0, 0), torch.ones(2, 3)), ((0, 0), torch.ones(2, 3))], "more than one file holds it"),
        ([((0, 0), torch.ones(2, 0)), ((0, 0), torch.ones(2, 0))], "more than one file holds it"),
        ([((0,), torch.ones(2, 3))], "saved_offsets"),
        ([((0, -1), torch.ones(2, 3))], "saved_offsets"),
        ([((True, 0), torch.ones(2, 3))], "saved_offsets"),
        ([((0, 0), torch.ones(2, 3)), ((2, 0, 0), torch.ones(2, 3, 1))], "float32 of shape"),
    ],
)
def test_chunks_that_are_no_whole_are_refused(tmp_path, chunks, said):
    write_chunks(tmp_path, chunks)
    with pytest.raises(CorruptCheckpointError, match=said) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.fqn == "w"


def test_chunks_of_two_dtypes_are_refused(tmp_path):
    write_chunks(tmp_path, [((0, 0), torch.ones(2, 3)), ((2, 0), torch.ones(2, 3))])
    texts = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4, 0]}})}
    save_file({"w": torch.ones(1, 3, dtype=torch.int8)}, tmp_path / "z.safetensors", texts)
    with pytest.raises(CorruptCheckpointError, match="int8"):
        open_checkpoint(tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.fp16.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "model.fp32.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"w: more than one file.*model.fp16.*model.fp32"):
        open_checkpoint(tmp_path)


# An index that does not fit its files.


def test_names_that_only_the_index_or_only_a_file_has_are_told(tmp_path):
    sharded(tmp_path, a="x.safetensors", b="y.safetensors")
    put_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors", "gone": "y.safetensors"})
    with pytest.raises(CorruptCheckpointError, match=r"the index names gone in y\.safetensors, which the files lack"):
        open_checkpoint(tmp_path)
    save_file({"b": torch.ones(1), "new": torch.ones(1)}, tmp_path / "y.safetensors")
    put_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CorruptCheckpointError, match=r"the index lacks new in y\.safetensors, which the files hold"):
        open_checkpoint(tmp_path)
    put_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors", "new": "z.safetensors"})
    with pytest.raises(CorruptCheckpointError, match=r"z\.safetensors is missing.*new"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}',
     '{"weight_map": {"a": "x", "a": "y"}}', '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": ""}}',
     "[" * 100_000],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path, text):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_of_another_name_counts_and_two_of_them_do_not(tmp_path):
    state = sharded(tmp_path, a="x.safetensors", b="y.safetensors")
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "unet.safetensors.index.json")
    save_file({"a": torch.zeros(5)}, tmp_path / "other.safetensors")
    require_same(loaded(tmp_path, state), state)
    put_index(tmp_path, {}, "vae.safetensors.index.json")
    with pytest.raises(CorruptCheckpointError, match="several models in one folder"):
        open_checkpoint(tmp_path)


# Headers that are wrong.


def file_of(header, payload=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def parsed(content):
    return read_header(lambda offset, nbytes: content[offset : offset + nbytes], len(content), file="f.safetensors")


def tensor(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_right_header_passes():
    header = parsed(file_of({"__metadata__": {"format": "pt"}, "w": tensor()}))
    (stored,) = header.tensors
    assert (stored.name, stored.dtype, stored.shape, stored.nbytes) == ("w", "float32", (4,), 16)
    assert header.texts == {"format": "pt"}


WRONG = {
    "no file": b"",
    "seven bytes": bytes(7),
    "a header longer than the file": struct.pack("<Q", 17) + bytes(16),
    "a header longer than allowed": struct.pack("<Q", MAX_HEADER_NBYTES + 1) + bytes(16),
    "a length of 2**63": struct.pack("<Q", 1 << 63) + bytes(16),
    "an empty header": file_of(b""),
    "a list": file_of(b"[]"),
    "space first": file_of(b" {}", b""),
    "no JSON": file_of(b'{"w": '),
    "no text": file_of(b'{"\xff": {}}'),
    "half a character": file_of(b'{"\\ud800": {"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    "deep": file_of(b'{"w":' + b"[" * 100_000),
    "a number of many digits": file_of(b'{"w":' + b"9" * 10_000 + b"}"),
    "bytes without a tensor": file_of({}),
    "metadata that is no texts": file_of({"__metadata__": {"a": 1}, "w": tensor()}),
    "metadata that is no object": file_of({"__metadata__": [], "w": tensor()}),
    "a name twice": file_of(
        json.dumps({"w": tensor()})[:-1].encode() + b',"w":' + json.dumps(tensor()).encode() + b"}"
    ),
}
WRONG_TENSORS = {
    "no object": 7,
    "a key too few": {"dtype": "F32", "shape": [4]},
    "a key too many": {**tensor(), "scale": 1},
    "a dtype that is no text": tensor(["F32"]),
    "a dtype of half bytes": tensor("F4"),
    "a shape that is a number": {**tensor(), "shape": 4},
    "a negative size": tensor(shape=(-4,)),
    "two negative sizes": tensor(shape=(-2, -2)),
    "a size that is a fraction": tensor(shape=(4.0,)),
    "a size that is true": tensor("U8", shape=(16, True)),
    "sizes beyond counting": tensor(shape=(1 << 62, 4)),
    "one offset": tensor(offsets=(0,)),
    "three offsets": tensor(offsets=(0, 16, 16)),
    "offsets the wrong way": tensor(offsets=(16, 0)),
    "a negative offset": tensor(offsets=(-16, 0)),
    "fewer bytes than its shape": tensor(shape=(5,)),
    "more bytes than its shape": tensor(shape=(3,)),
    "past the end": tensor(shape=(5,), offsets=(0, 20)),
    "a gap in front": tensor(shape=(3,), offsets=(4, 16)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_whose_header_is_wrong_is_refused_by_name(kind):
    with pytest.raises(CorruptCheckpointError, match=r"f\.safetensors"):
        parsed(WRONG[kind])


@pytest.mark.parametrize("kind", WRONG_TENSORS)
def test_a_tensor_that_is_described_wrongly_is_refused_by_name(kind):
    with pytest.raises(CorruptCheckpointError, match=r"f\.safetensors") as caught:
        parsed(file_of({"w": WRONG_TENSORS[kind]}))
    assert caught.value.fqn == "w"


@pytest.mark.parametrize(
    "others",
    [
        {"v": tensor(shape=(2,), offsets=(0, 8)), "w": tensor(shape=(3,), offsets=(4, 16))},
        {"v": tensor(), "w": tensor()},
        {"v": tensor(shape=(1,), offsets=(0, 4)), "w": tensor(shape=(2,), offsets=(8, 16))},
        {"v": tensor(shape=(0,), offsets=(8, 8)), "w": tensor()},
    ],
    ids=["overlap", "one place", "gap", "an empty one within"],
)
def test_bytes_that_are_not_one_after_the_other_are_refused(others):
    with pytest.raises(CorruptCheckpointError, match="one after the other"):
        parsed(file_of(others))


def test_a_file_that_was_cut_short_or_is_longer_is_refused(tmp_path):
    content = save({"w": torch.ones(4), "v": torch.ones(2)})
    for wrong in (content[:-1], content + b"\0", content[:30]):
        (tmp_path / "model.safetensors").write_bytes(wrong)
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            open_checkpoint(tmp_path)


@given(st.data())
def test_a_damaged_header_is_refused_or_reads_within_the_file(data):
    content = bytearray(save({"w": torch.ones(4), "v": torch.ones(2, dtype=torch.int8)}, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 25))
        content[at] = data.draw(st.integers(0, 255))
    try:
        header = parsed(bytes(content))
    except CorruptCheckpointError:
        return
    assert all(0 <= stored.offset <= stored.offset + stored.nbytes <= len(content) for stored in header.tensors)


def test_a_header_of_ours_is_read_by_the_formats_own_library(tmp_path):
    state = of_every_dtype()
    assert all(has_dtype(str(value.dtype).removeprefix("torch.")) for value in state.values())
    assert not has_dtype("complex128")
    described = [(name, str(value.dtype).removeprefix("torch."), value.shape) for name, value in state.items()]
    front, header = encode_header(described, {"format": "pt"})
    assert len(front) % 8 == 0
    payload = b"".join(bytes(value.reshape(-1).view(torch.uint8).tolist()) for value in state.values())
    (tmp_path / "f.safetensors").write_bytes(front + payload)
    require_same(load_file(tmp_path / "f.safetensors"), state)
    assert parsed(front + payload) == header
