"""Records of Python objects: what torch reads back from them, with tensors in them or without."""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
import sys
import threading
import uuid
import zipfile
from collections import OrderedDict
from datetime import timedelta
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.planning.values.python_record import python_record

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


LARGE = torch.arange(250_000.0).reshape(500, 500)
VIEWS = {
    "one number": lambda: LARGE[3, 4],
    "a row": lambda: LARGE[7],
    "a column": lambda: LARGE[:, 3],
    "nothing": lambda: LARGE[:0],
    "a transposed corner": lambda: LARGE[:3, :2].t(),
    "every tenth": lambda: LARGE[::10, 5],
    "a parameter": lambda: torch.nn.Parameter(LARGE[7], requires_grad=False),
    "with a gradient": lambda: LARGE[7].clone()[:3].requires_grad_(),
    "as whole numbers": lambda: LARGE[7].view(torch.int32),
    "conjugated": lambda: LARGE.view(torch.complex64)[0, :3].conj(),
    "expanded": lambda: LARGE[0, 5].expand(20),
    "in reach of bfloat16": lambda: LARGE.view(torch.bfloat16)[3, 5:9],
}


def held_nbytes(record: bytes) -> int:
    """Of all storages."""
    with zipfile.ZipFile(io.BytesIO(record)) as entries:
        return sum(entry.file_size for entry in entries.infolist() if "/data/" in entry.filename)


@pytest.mark.parametrize("kind", VIEWS)
def test_of_a_view_its_own_bytes_are_stored(kind):
    view = VIEWS[kind]()
    record = python_record((view, {"n": [1]}))
    (found, rest) = loaded(record)
    assert type(found) is type(view)
    assert found.dtype == view.dtype
    assert found.requires_grad == view.requires_grad
    assert torch.equal(found, view)
    assert rest == {"n": [1]}
    assert held_nbytes(record) <= view.nbytes


def test_views_of_one_tensor_share_what_they_shared_where_that_takes_no_more():
    near = [LARGE[3, 2:8], LARGE[3, 4:6], LARGE[3, 2:8]]
    record = python_record(near)
    first, middle, again = loaded(record)
    assert held_nbytes(record) == 24
    first[2] = -5
    assert middle[0] == again[2] == -5
    apart = {"a": LARGE[0, 0], "b": LARGE[499, 499], "same": (LARGE[0, 0],), "int": LARGE.view(torch.int32)[0, 0]}
    record = python_record(apart)
    assert same(loaded(record), apart)
    assert held_nbytes(record) <= 16


def test_attributes_of_a_view_stay_with_it():
    view = LARGE[0, :2]
    view.note = {"other": LARGE[1, 0]}
    record = python_record([view])
    (found,) = loaded(record)
    assert found.note["other"] == LARGE[1, 0]
    assert held_nbytes(record) <= 12


def test_a_view_of_one_ranks_value_and_in_a_tuple_take_their_own_room(tmp_path):
    state = {"a": dcp.PerRank(LARGE[0, :2]), "t": (LARGE[1, :2],), "w": LARGE[2, :2]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 20_000
    template = {"a": dcp.PerRank(None), "t": None, "w": torch.zeros(2)}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(template["a"].value, LARGE[0, :2])
    assert torch.equal(template["t"][0], LARGE[1, :2])
    assert torch.equal(template["w"], LARGE[2, :2])


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


@pytest.mark.parametrize("around", [lambda path: [path, path], lambda path: (path, torch.ones(2))])
def test_a_path_is_named_as_every_python_knows_it_also_where_this_one_has_it_elsewhere(monkeypatch, around):
    """Python 3.13 has its paths in ``pathlib._local``, which others lack."""
    value = around(PurePosixPath("/a/b"))
    record = python_record(value)
    monkeypatch.setattr(PurePosixPath, "__module__", "pathlib._local")
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    assert python_record(value) == record
    assert b"pathlib._local" not in record


def test_an_enum_is_pickled_by_value_also_where_this_python_would_call_getattr(monkeypatch):
    """As Python 3.11 up to 3.11.3 does."""
    record = python_record([uuid.SafeUUID.safe])
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    assert python_record([uuid.SafeUUID.safe]) == record
    assert b"getattr" not in record
