"""Records of Python objects: what torch reads back from them, with tensors in them or without."""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from collections import OrderedDict
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.planning.python_record import python_record

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLAIN = {
    "none": None,
    "true": True,
    "large number": 2**70,
    "float": 0.1,
    "nan": float("inf"),
    "text": "é \U0001f600",
    "bytes": b"\x00\xff" * 5,
    "long bytes": bytes(range(256)) * 9000,
    "list": [1, [2, [3, []]]],
    "tuple": (1, ("a", None), ()),
    "dict": {"a": {1: 2.5}, (1, 2): "b"},
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "set": {1, 2, 3},
    "complex": 1 + 2j,
    "dtype": torch.bfloat16,
    "size": torch.Size((2, 3)),
    "device": torch.device("cpu"),
}


def loaded(record: bytes, **options):
    return torch.load(io.BytesIO(record), weights_only=True, **options)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_value_comes_back_equal_and_of_its_type(kind):
    value = PLAIN[kind]
    record = python_record(value)
    found = loaded(record)
    assert type(found) is type(value)
    assert found == value
    assert list(found) == list(value) if isinstance(value, OrderedDict) else True
    with zipfile.ZipFile(io.BytesIO(record)) as entries:
        assert entries.testzip() is None


def test_a_value_without_tensors_has_a_record_a_fraction_of_torchs():
    buffer = io.BytesIO()
    torch.save({"lr": 0.1}, buffer)
    assert len(python_record({"lr": 0.1})) < len(buffer.getvalue()) / 2


SHARED = torch.arange(4.0)
WITH_TENSORS = {
    "tensor": torch.arange(6.0).reshape(2, 3),
    "nested": {"a": [1, (torch.ones(2), "b")], "c": {"d": torch.tensor(5)}},
    "late in it": [*range(1000), torch.zeros(3, dtype=torch.float8_e4m3fn)],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "storage": torch.ones(3).untyped_storage(),
    "typed storage": torch.ones(3).storage(),
    "ordered": OrderedDict(w=torch.ones(3)),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "shared": [SHARED, SHARED[1:3]],
}


def same(a, b) -> bool:
    if isinstance(a, torch.storage.TypedStorage | torch.UntypedStorage):
        return a.tolist() == b.tolist()  # torch gives an untyped one a type
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a.float(), b.float())
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", WITH_TENSORS)
def test_a_value_with_tensors_comes_back(kind):
    value = WITH_TENSORS[kind]
    record = python_record(value)
    assert same(loaded(record), value)
    with zipfile.ZipFile(io.BytesIO(record)) as entries:
        assert entries.testzip() is None
        assert all(entry.CRC for entry in entries.infolist() if entry.file_size)


def test_tensors_that_share_memory_still_do():
    whole, part = loaded(python_record(WITH_TENSORS["shared"]))
    whole[1] = 7
    assert part[0] == 7


def test_checksums_are_there_whatever_the_user_has_set_and_that_stays():
    import torch.utils.serialization as serialization

    with serialization.config.patch({"save.compute_crc32": False, "save.storage_alignment": 1}):
        record = python_record({"w": torch.ones(3)})
        assert serialization.config.save.compute_crc32 is False
        assert serialization.config.save.storage_alignment == 1
    with zipfile.ZipFile(io.BytesIO(record)) as entries:
        assert any(entry.CRC for entry in entries.infolist())
        assert entries.testzip() is None


NUMPY = {
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "fortran": np.asfortranarray(np.ones((2, 3))),
    "scalar": np.float32(2.5),
    "random state": np.random.default_rng(5).bit_generator.state,
    "legacy random state": np.random.RandomState(5).get_state(),
}


@pytest.mark.parametrize("kind", NUMPY)
def test_numpys_values_come_back_through_a_checkpoint(tmp_path, kind):
    dcp.save({"x": (NUMPY[kind],)}, checkpoint_id=tmp_path, no_dist=True)  # a tuple is one value
    template = {"x": None}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    np.testing.assert_equal(template["x"], (NUMPY[kind],))


def test_a_class_that_the_user_allowed_comes_back():
    value = {"every": timedelta(hours=3)}
    with torch.serialization.safe_globals([timedelta]):
        assert loaded(python_record(value)) == value
    with pytest.raises(pickle.UnpicklingError, match="timedelta"):
        loaded(python_record(value))


@pytest.mark.parametrize("kind", [*PLAIN, *WITH_TENSORS])
def test_stock_torch_loads_what_a_checkpoint_has_of_it(tmp_path, kind):
    value = {**PLAIN, **WITH_TENSORS}[kind]
    dcp.save({"x": {"y": (value,)}}, checkpoint_id=tmp_path, no_dist=True)
    template = {"x": {"y": None}}
    torch_dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert same(template["x"]["y"], (value,))


class Refusing:
    def __reduce__(self):
        raise ValueError("this one is not to be saved")


@pytest.mark.parametrize("around", [lambda value: value, lambda value: [torch.ones(1), value]])
def test_what_cannot_be_pickled_raises_what_pickling_raises(around):
    with pytest.raises(ValueError, match="this one is not to be saved"):
        python_record(around(Refusing()))
    with pytest.raises(TypeError, match="cannot pickle"):
        python_record(around(threading.Lock()))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        python_record(around(lambda: None))


def test_equal_values_have_equal_records():
    assert python_record({"a": [1, 2.5]}) == python_record({"a": [1, 2.5]})


def test_a_subclass_of_a_plain_type_keeps_its_class():
    value = type("Level", (int,), {"__module__": __name__, "__qualname__": "Level"})(3)
    globals()["Level"] = type(value)
    with torch.serialization.safe_globals([type(value)]):
        found = loaded(python_record(value))
    assert type(found) is type(value)
    assert found == 3


def test_a_record_maps_into_memory_too(tmp_path):
    for value in (PLAIN["dict"], WITH_TENSORS["nested"]):
        (tmp_path / "one").write_bytes(python_record(value))
        assert same(torch.load(tmp_path / "one", weights_only=True, mmap=True), value)
