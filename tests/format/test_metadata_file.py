"""``.metadata`` and Python objects: what is let in, what is refused, and that refusing runs nothing."""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError
from ray_dcp.format.metadata_file import decode_metadata, decode_python, encode_metadata
from tests.shardings import same_bits
from tests.slack import within

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class Bomb:
    """Pickles as a call of ``function``; harmless until somebody loads it."""

    def __init__(self, function, *args) -> None:
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def bombs(marker: Path) -> dict[str, object]:
    """Each creates ``marker`` when it goes off."""
    return {
        "os.system": Bomb(os.system, f"touch {marker}"),
        "open": Bomb(open, str(marker), "w"),
        "eval": Bomb(eval, f"open({str(marker)!r}, 'w')"),
        "Path.touch": Bomb(Path.touch, Path(marker)),
        "os.mkdir": Bomb(os.mkdir, str(marker)),
        "torch.save": Bomb(torch.save, 1, str(marker)),
        "numpy": Bomb(np.save, str(marker) + ".npy", np.ones(1)),
    }


BOMBS = tuple(bombs(Path("x")))


def went_off(marker: Path) -> bool:
    return marker.exists() or Path(f"{marker}.npy").exists()


def metadata_of(**planner_data) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))
    index = MetadataIndex("w", torch.Size((0, 0)), 0)
    return Metadata(
        {
            "w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((2, 3)), [chunk]),
            "n": BytesStorageMetadata(),
        },
        planner_data or {"w": ("w",), "n": ("n",)},
        {index: _StorageInfo("__0_0.distcp", 0, 100), MetadataIndex("n"): _StorageInfo("__0_0.distcp", 100, 7)},
        StorageMeta("/c", "some-save"),
        "1.0.0",
    )


class TestMetadata:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    @pytest.mark.parametrize("bomb", BOMBS)
    def test_code_in_it_is_refused_by_name_and_not_run(self, tmp_path, bomb, protocol):
        marker = tmp_path / "marker"
        content = pickle.dumps(metadata_of(x=bombs(marker)[bomb]), protocol=protocol)
        with pytest.raises(UnsafeDataError, match="it was not loaded") as caught:
            decode_metadata(content, file="c/.metadata")
        assert caught.value.file == "c/.metadata"
        assert not went_off(marker)
        pickle.loads(content)
        assert went_off(marker)  # the bomb was a real one

    def test_an_item_costs_little_beside_its_name(self):
        """Its class, its place's and its file are each named in two bytes; pickle by itself takes twice as much."""
        saved = TensorStorageMetadata(
            TensorProperties(), torch.Size(()), [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
        )
        names = [f"optim.state.{number}.step" for number in range(5000)]
        places = {
            MetadataIndex(name, torch.Size(()), 0): _StorageInfo("__0_0.distcp", 256 * number, 448)
            for number, name in enumerate(names)
        }
        metadata = Metadata(dict.fromkeys(names, saved), {name: (name,) for name in names}, places)
        content = encode_metadata(metadata)
        assert len(content) < 52 * len(names) + sum(map(len, names))
        loaded = pickle.loads(content)
        assert loaded == metadata
        assert list(loaded.storage_data) == list(places)

    @pytest.mark.parametrize("index", [None, 0, 3])
    @pytest.mark.parametrize("offset", [None, (), (0,), (1 << 40, 7)])
    def test_an_index_comes_back_with_all_that_it_has(self, offset, index):
        stored = MetadataIndex("w", offset, index)
        for load in (pickle.loads, functools.partial(decode_metadata, file="f")):
            loaded = load(encode_metadata(Metadata({}, None, {stored: _StorageInfo("f", 0, 1)})))
            (found,) = loaded.storage_data
            assert vars(found) == vars(stored)
            assert type(found.offset) is type(stored.offset)

    def test_trusted_lets_in_what_a_planner_has_put_there(self):
        content = encode_metadata(metadata_of(x=Bomb(complex, 1, 2)))
        assert decode_metadata(content, file="f", trusted=True).planner_data == {"x": 1 + 2j}

    @pytest.mark.parametrize("digest_checked", [True, False])
    @pytest.mark.parametrize(
        ("named", "state"),
        [
            ("torch.distributed.checkpoint.metadata\nMetadataIndex\n", {"__hash__": None}),
            ("torch.distributed.checkpoint.metadata\nMetadataIndex\n", {"brand_new": 1}),
            ("torch.distributed.checkpoint.filesystem\n_StorageInfo\n", {"relative_path": "x", "__eq__": 5}),
            ("pathlib\nPosixPath\n", {"exists": 5}),
            ("torch.serialization\n_get_layout\n", {"__defaults__": (1,)}),
        ],
    )
    def test_it_cannot_change_the_classes_that_it_names(self, named, state, digest_checked):
        """A pickle sets any attribute of an object, and a class is one."""
        content = f"c{named}(N".encode() + pickle.dumps(state, protocol=1)[:-1] + b"tb."
        module, name = named.split()
        target = getattr(importlib.import_module(module), name)
        before = dict(vars(target)), getattr(target, "__defaults__", None)
        with pytest.raises((UnsafeDataError, CorruptCheckpointError)):
            decode_metadata(content, file="f", digest_checked=digest_checked)
        assert (dict(vars(target)), getattr(target, "__defaults__", None)) == before
        assert decode_metadata(encode_metadata(metadata_of()), file="f", digest_checked=digest_checked) == metadata_of()

    @pytest.mark.parametrize("name", ["__main__.x", "os.system", "Metadata.__init__", "__builtins__"])
    def test_the_allowed_modules_are_no_way_round(self, name):
        module = "torch.distributed.checkpoint.metadata"
        content = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
        content += b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(UnsafeDataError):
            decode_metadata(content, file="f")

    @pytest.mark.parametrize("name", ["load", "save", "nn", "hub", "Tensor", "float32.__reduce__", "_C"])
    def test_of_torch_itself_only_dtypes_are_let_in(self, name):
        with pytest.raises(UnsafeDataError):
            decode_metadata(f"ctorch\n{name}\n.".encode(), file="f")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_of_torch_comes_back(self, dtype):
        metadata = metadata_of()
        metadata.state_dict_metadata["w"].properties.dtype = dtype
        assert decode_metadata(encode_metadata(metadata), file="f") == metadata

    @pytest.mark.parametrize(
        "properties",
        [
            TensorProperties(layout=torch.sparse_coo, requires_grad=True, pin_memory=True),
            TensorProperties(memory_format=torch.channels_last),
            TensorProperties(memory_format=torch.preserve_format),
            OldTensorProperties(dtype=torch.bfloat16),
            OldTensorProperties(memory_format=torch.channels_last),
        ],
        ids=str,
    )
    def test_every_property_of_a_tensor_comes_back(self, properties):
        metadata = metadata_of()
        metadata.state_dict_metadata["w"].properties = properties
        assert decode_metadata(encode_metadata(metadata), file="f") == metadata

    @pytest.mark.parametrize("place", [Path("/a/b"), PurePosixPath("c"), "s3://b/c", None], ids=repr)
    def test_every_kind_of_checkpoint_id_comes_back(self, place):
        metadata = metadata_of()
        metadata.storage_meta.checkpoint_id = place
        assert decode_metadata(pickle.dumps(metadata), file="f") == metadata
        found = decode_metadata(encode_metadata(metadata), file="f")  # which has a text where torch has a path
        assert found.storage_meta.checkpoint_id == (place if place is None else str(place))

    @pytest.mark.parametrize(
        "content",
        [
            b"\x80\x04Nr\xff\xff\xff\x7f.",  # remember None as number 2**31: the fast unpickler makes room for all
            b"\x80\x05\x96\x00\x00\x00\x00\x04\x00\x00\x00.",  # a bytearray of 16 GiB that does not follow
        ],
    )
    def test_a_damaged_number_does_not_take_all_memory(self, content):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CorruptCheckpointError):
            decode_metadata(content, file="f")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB

    @pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
    def test_plain_values_of_planners_come_back(self, protocol):
        metadata = metadata_of(a=[1, {"x": (2.5, None, True)}], b={3, 4}, c=frozenset({5}), d=b"6", e=1j)
        assert decode_metadata(pickle.dumps(metadata, protocol=protocol), file="f") == metadata

    @pytest.mark.parametrize("value", [{"a": 1}, [], None, 5, "text"])
    def test_anything_else_than_metadata_is_corrupt(self, value):
        with pytest.raises(CorruptCheckpointError, match=f"holds a {type(value).__name__} instead of metadata"):
            decode_metadata(pickle.dumps(value), file="f")

    @pytest.mark.parametrize(
        "damage",
        [
            lambda metadata: vars(metadata).pop("state_dict_metadata"),
            lambda metadata: setattr(metadata, "state_dict_metadata", ["w"]),
            lambda metadata: setattr(metadata, "storage_data", ["w"]),
            lambda metadata: metadata.state_dict_metadata.update(w=5),
            lambda metadata: vars(metadata.state_dict_metadata["w"]).pop("size"),
            lambda metadata: vars(metadata.state_dict_metadata["w"]).pop("properties"),
            lambda metadata: setattr(metadata.state_dict_metadata["w"].properties, "dtype", None),
            lambda metadata: metadata.state_dict_metadata["w"].chunks.append(None),
            lambda metadata: setattr(metadata.state_dict_metadata["w"].chunks[0], "sizes", torch.Size((2,))),
            lambda metadata: setattr(metadata.state_dict_metadata["w"].chunks[0], "sizes", torch.Size((-2, 3))),
            lambda metadata: setattr(metadata.state_dict_metadata["w"].chunks[0], "offsets", "ab"),
            lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", (2.0, 3.0)),
            lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", (2, 1 << 63)),
        ],
    )
    def test_one_with_parts_missing_is_corrupt(self, damage):
        metadata = metadata_of()
        damage(metadata)
        with pytest.raises(CorruptCheckpointError, match="is not readable metadata: parts of it are missing"):
            decode_metadata(encode_metadata(metadata), file="f")

    def test_what_torchs_class_has_got_since_it_was_written_is_there_and_is_saved_again(self):
        """An older torch's ``StorageMeta`` has no ``modules``, which its class then has nowhere."""
        metadata = metadata_of()
        metadata.storage_meta = StorageMeta("/somewhere")
        del metadata.storage_meta.modules
        loaded = decode_metadata(pickle.dumps(metadata), file="f")
        assert loaded.storage_meta == StorageMeta("/somewhere", modules=[])
        loaded.storage_meta.checkpoint_id = PurePosixPath("/elsewhere")
        assert decode_metadata(encode_metadata(loaded), file="f").storage_meta.checkpoint_id == "/elsewhere"

    @pytest.mark.parametrize(
        "part", [{"offset": -1}, {"length": 1 << 63}, {"length": "5"}, {"relative_path": 5}], ids=str
    )
    def test_a_place_that_is_none_is_corrupt_and_told_with_its_name(self, part):
        metadata = metadata_of()
        vars(metadata.storage_data[MetadataIndex("n")]).update(part)
        with pytest.raises(CorruptCheckpointError, match="a place in it is invalid") as caught:
            decode_metadata(encode_metadata(metadata), file="f")
        assert caught.value.fqn == "n"

    @pytest.mark.parametrize(
        "part",
        [{"offset": MetadataIndex}, {"offset": (-1, 0)}, {"offset": (0.0, 0)}, {"index": "0"}, {"fqn": 5}],
        ids=str,
    )
    def test_an_index_that_is_invalid_is_corrupt(self, part):
        metadata = metadata_of()
        index = next(index for index in metadata.storage_data if index.fqn == "w")
        place = metadata.storage_data.pop(index)
        vars(index).update(part)
        metadata.storage_data[index] = place
        with pytest.raises(CorruptCheckpointError, match="a place in it is invalid"):
            decode_metadata(pickle.dumps(metadata), file="f")

    @pytest.mark.parametrize("part", ["relative_path", "offset", "length"])
    def test_a_place_that_lacks_a_part_is_corrupt_and_told_with_its_name(self, part):
        metadata = metadata_of()
        del vars(metadata.storage_data[MetadataIndex("n")])[part]
        with pytest.raises(CorruptCheckpointError, match="a place in it is invalid") as caught:
            decode_metadata(pickle.dumps(metadata), file="f")
        assert caught.value.fqn == "n"

    def test_a_truncated_one_is_corrupt_wherever_it_ends(self):
        content = encode_metadata(metadata_of())
        for end in range(len(content)):
            with pytest.raises(CorruptCheckpointError) as caught:
                decode_metadata(content[:end], file="f")
            assert caught.value.file == "f"

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200))
    def test_garbage_is_corrupt_or_refused(self, content):
        with pytest.raises((CorruptCheckpointError, UnsafeDataError)):
            decode_metadata(content, file="f")

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, 10_000), st.integers(1, 255))
    def test_a_damaged_one_is_corrupt_or_refused_or_still_metadata(self, place, flip):
        content = bytearray(encode_metadata(metadata_of()))
        content[place % len(content)] ^= flip
        with suppress(CorruptCheckpointError, UnsafeDataError):
            assert isinstance(decode_metadata(bytes(content), file="f"), Metadata)


def stored(value) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content


def decoded(content: io.BytesIO, *, trusted: bool = False):
    return decode_python(content, file="f", fqn="x", trusted=trusted)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
class TestPythonObjects:
    @pytest.mark.parametrize("bomb", BOMBS)
    @pytest.mark.parametrize("written_by", ["ray_dcp", "torch"])
    def test_code_in_one_is_refused_by_name_and_not_run(self, tmp_path, bomb, written_by):
        marker = tmp_path / "marker"
        save = {"ray_dcp": dcp.save, "torch": torch_dcp.save}[written_by]
        save({"w": torch.ones(2), "x": bombs(marker)[bomb]}, checkpoint_id=tmp_path / "c", no_dist=True)
        template = {"w": torch.zeros(2), "x": "old"}
        with pytest.raises(CheckpointException) as caught:
            dcp.load(template, checkpoint_id=tmp_path / "c", no_dist=True)
        assert isinstance(caught.value.__cause__, UnsafeDataError)
        assert caught.value.__cause__.fqn == "x"
        assert template["x"] == "old"
        assert not went_off(marker)
        dcp.load(template, checkpoint_id=tmp_path / "c", no_dist=True, trusted=True)
        assert went_off(marker)  # the bomb was a real one, and trusted is the way round

    def test_code_in_place_of_a_tensor_is_refused_even_when_trusted(self, tmp_path):
        """A tensor needs no code: where one is expected, nothing else is unpickled."""
        marker = tmp_path / "marker"
        torch_dcp.save({"w": torch.ones(2), "x": bombs(marker)["open"]}, checkpoint_id=tmp_path / "c", no_dist=True)
        metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
        metadata.storage_data[MetadataIndex("w", torch.Size((0,)))] = metadata.storage_data[MetadataIndex("x")]
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "c", no_dist=True, trusted=True)
        assert isinstance(caught.value.__cause__, UnsafeDataError)
        assert not went_off(marker)

    @pytest.mark.parametrize(
        "value",
        [
            {"a": [1, (2.5, None), {"b": b"c"}], 5: {1, 2}},
            torch.tensor([1, 65535], dtype=torch.uint16),
            np.float64(1.5),
            np.int32(7),
        ],
        ids=str,
    )
    def test_plain_values_come_back(self, value):
        loaded = decoded(stored(value))
        assert type(loaded) is type(value)
        assert same_bits(loaded, value) if isinstance(value, torch.Tensor) else loaded == value

    @pytest.mark.parametrize("kind", "?bhilqBHILQefdFD")
    def test_numpy_arrays_of_every_plain_dtype_come_back(self, kind):
        value = np.ones((2, 3), dtype=kind)
        loaded = decoded(stored({"a": value}))["a"]
        assert (loaded.dtype, loaded.tolist()) == (value.dtype, value.tolist())

    def test_a_class_that_the_user_allowed_is_loaded_and_stays_allowed(self):
        from collections import Counter

        with pytest.raises(UnsafeDataError, match=r"add_safe_globals.*trusted=True"):
            decoded(stored(threading.Thread))
        with torch.serialization.safe_globals([Counter, np.ndarray]):
            assert decoded(stored(Counter("aab"))) == Counter("aab")
            assert {Counter, np.ndarray} <= set(torch.serialization.get_safe_globals())

    def test_nothing_stays_allowed_that_was_not_before(self):
        before = torch.serialization.get_safe_globals()
        decoded(stored(np.ones(2)))
        assert set(torch.serialization.get_safe_globals()) == set(before)

    def test_loads_in_two_threads_leave_each_others_allowances_alone(self):
        """torch's allow-list belongs to the process: whoever is done first must not shut the other out."""
        first_reads, second_reads, first_done = threading.Event(), threading.Event(), threading.Event()

        class Gated(io.BytesIO):
            def read(self, *args):
                (first_reads if self is first else second_reads).set()
                (second_reads if self is first else first_done).wait(0.2)
                return super().read(*args)

        content = stored(np.ones(3)).getvalue()
        first, second = Gated(content), Gated(content)
        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(decoded, first)
            loading.add_done_callback(lambda _: first_done.set())
            assert first_reads.wait(within(10))
            assert decoded(second).tolist() == [1, 1, 1]
            assert loading.result(30).tolist() == [1, 1, 1]

    @pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x04", bytes(100)])
    @pytest.mark.parametrize("trusted", [True, False])
    def test_garbage_names_file_and_value(self, content, trusted):
        with pytest.raises((CorruptCheckpointError, UnsafeDataError)) as caught:
            decoded(io.BytesIO(content), trusted=trusted)
        assert (caught.value.file, caught.value.fqn) == ("f", "x")
