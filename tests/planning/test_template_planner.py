"""Filling a template: what goes where, what is refused, and that a refused template keeps every bit."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import StateDictError
from ray_dcp.planning.template.template_planner import set_at
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAN = float("nan")


def save(state, place):
    dcp.save(state, checkpoint_id=place, no_dist=True)


def load(template, place, **options):
    return dcp.load(template, checkpoint_id=place, no_dist=True, **options)


def problems(template, place, **options) -> tuple[str, ...]:
    with pytest.raises(CheckpointException) as caught:
        load(template, place, **options)
    assert isinstance(caught.value.__cause__, StateDictError), caught.value
    return caught.value.__cause__.problems


def edit_metadata(place, edit: Callable[[Any], None]) -> None:
    """Change ``.metadata`` as if it had been written so; without the manifest, which is bound to the original."""
    metadata = pickle.loads((place / ".metadata").read_bytes())
    edit(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    (place / "manifest.parquet").unlink(missing_ok=True)


class TestPlaces:
    """Values land where the template has them, under the keys and in the containers that it has."""

    def test_nested_dicts_and_lists_are_filled_in_place(self, tmp_path):
        save({"a": {"b": [torch.ones(2), {"c": torch.full((1,), 5.0)}], "n": 3}}, tmp_path)
        template = {"a": {"b": [torch.zeros(2), {"c": torch.zeros(1)}], "n": 0}}
        tensors = [template["a"]["b"][0], template["a"]["b"][1]["c"]]
        containers = [template["a"], template["a"]["b"], template["a"]["b"][1]]
        load(template, tmp_path)
        assert template["a"]["b"][0] is tensors[0]
        assert template["a"]["b"][1]["c"] is tensors[1]
        assert [template["a"], template["a"]["b"], template["a"]["b"][1]] == containers
        assert all(
            x is y for x, y in zip([template["a"], template["a"]["b"], template["a"]["b"][1]], containers, strict=True)
        )
        assert (tensors[0].tolist(), tensors[1].tolist(), template["a"]["n"]) == ([1, 1], [5], 3)

    def test_values_of_integer_keys_land_under_the_integers(self, tmp_path):
        save({"state": {0: {"step": 7, "m": torch.ones(2)}, 1: "x"}}, tmp_path)
        template = {"state": {0: {"step": -1, "m": torch.zeros(2)}, 1: ""}}
        load(template, tmp_path)
        assert template["state"].keys() == {0, 1}
        assert template["state"][0]["step"] == 7
        assert template["state"][1] == "x"
        assert template["state"][0]["m"].tolist() == [1, 1]

    def test_the_types_of_values_and_containers_survive(self, tmp_path):
        state = {
            "tuple": (1, torch.ones(2), [2.5, None]),
            "list": [1, "x", [True]],
            "empty": [],
            "none": None,
            "number": 2**70,
            "ordered": OrderedDict(b=1, a=torch.ones(1)),
            "bytes": b"\x00\xff",
            "set": {1, 2},
        }
        save(state, tmp_path)
        template = dict.fromkeys(state) | {"ordered": OrderedDict(b=0, a=torch.zeros(1))}
        load(template, tmp_path)
        assert template["tuple"][0] == 1
        assert same_bits(template["tuple"][1], torch.ones(2))
        assert template["tuple"][2] == [2.5, None]
        for name in ("list", "empty", "none", "number", "bytes", "set"):
            assert template[name] == state[name]
            assert type(template[name]) is type(state[name])
        assert list(template["ordered"].items()) == [("b", 1), ("a", torch.ones(1))]

    def test_a_tensor_that_appears_twice_in_the_template_is_filled(self, tmp_path):
        save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
        shared = torch.zeros(2)
        load({"a": shared, "b": shared}, tmp_path)
        assert shared.tolist() == [1, 1]

    def test_parameters_views_and_transposed_tensors_are_filled_in_place(self, tmp_path):
        values = torch.arange(12.0).reshape(3, 4)
        save({"p": values, "v": values, "t": values}, tmp_path)
        big = torch.full((5, 6), NAN)
        template = {
            "p": torch.nn.Parameter(torch.full((3, 4), NAN)),
            "v": big[1:4, 1:5],
            "t": torch.full((4, 3), NAN).t(),
        }
        load(template, tmp_path)
        assert all(torch.equal(value.detach(), values) for value in template.values())
        assert template["p"].requires_grad
        assert torch.equal(big[1:4, 1:5], values)
        assert int(big.isnan().sum()) == 30 - 12

    def test_set_at_names_a_key_by_how_it_prints(self):
        container = {"a": [{1: "old", "x": 0}]}
        set_at(container, ("a", 0, "1"), "new")
        set_at(container, ("a", 0, "added"), 5)
        assert container == {"a": [{1: "new", "x": 0, "added": 5}]}


class TestMeta:
    """Meta tensors get memory, but only when the load is going to happen."""

    def test_meta_tensors_get_memory_and_values(self, tmp_path):
        save({"w": torch.ones(2, 3), "l": [torch.ones(1, dtype=torch.int8)]}, tmp_path)
        template = {"w": torch.empty(2, 3, device="meta"), "l": [torch.empty(1, dtype=torch.int8, device="meta")]}
        load(template, tmp_path)
        assert same_bits(template["w"], torch.ones(2, 3))
        assert same_bits(template["l"][0], torch.ones(1, dtype=torch.int8))

    def test_meta_local_shards_get_memory_and_values(self, tmp_path):
        save({"w": torch.arange(6.0)}, tmp_path)
        template = {"w": LocalShards((6,), {(1,): torch.empty(2, device="meta"), (4,): torch.empty(2, device="meta")})}
        load(template, tmp_path)
        assert {o: c.tolist() for o, c in template["w"].chunks.items()} == {(1,): [1, 2], (4,): [4, 5]}

    def test_they_stay_meta_when_anything_is_wrong(self, tmp_path):
        save({"w": torch.ones(2), "x": torch.ones(3)}, tmp_path)
        template = {"w": torch.empty(2, device="meta"), "x": torch.zeros(4)}
        problems(template, tmp_path)
        assert template["w"].device.type == "meta"

    def test_one_that_the_checkpoint_lacks_is_refused_since_it_would_have_no_values(self, tmp_path):
        save({"w": torch.ones(2)}, tmp_path)
        template = {"w": torch.empty(2, device="meta"), "new": torch.empty(9, device="meta")}
        for strict in (True, False):
            (problem,) = problems(template, tmp_path, strict=strict)
            assert problem.startswith("new: Missing key: not in the checkpoint, and a meta tensor")
        load(template, tmp_path, skip="new")
        assert (template["w"].tolist(), template["new"].device.type) == ([1, 1], "meta")


FAULTS = {
    "shape": ({"f32": torch.zeros(2, 2)}, "f32: Size mismatch: the checkpoint has shape (4,), the template (2, 2)"),
    "dimensions": ({"f32": torch.tensor(0.0)}, "f32: Size mismatch: the checkpoint has shape (4,), the template ()"),
    "dtype": ({"f32": torch.zeros(4, dtype=torch.float64)}, "f32: the checkpoint has dtype torch.float32"),
    "object for tensor": ({"f32": [0, 0, 0, 0]}, "f32: the checkpoint holds a tensor, the template a list"),
    "tensor for object": ({"n": torch.tensor(3)}, "n: the checkpoint holds a Python object, the template a tensor"),
    "missing": ({"absent": 1}, "absent: Missing key: not in the checkpoint"),
    "expanded": ({"f32": torch.zeros(1).expand(4)}, "f32: the template is a view whose elements share"),
    "expanded shard": ({"f32": LocalShards((4,), {(0,): torch.zeros(1).expand(4)})}, "f32: the template is a view"),
    "overlapping": (
        {"deep": [{"bf16": torch.zeros(4, dtype=torch.bfloat16).unfold(0, 3, 1)}]},
        "deep.0.bf16: the template is a view",
    ),
}


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(6, 8)[::2, ::2],
        lambda: torch.zeros(5, 3, 7, 4)[2, :, 3],
        lambda: torch.zeros(20).as_strided((3, 4), (1, 4)),
    ],
)
def test_views_whose_elements_lie_apart_are_filled(tmp_path, view):
    values = torch.arange(12.0).reshape(3, 4)
    save({"w": values}, tmp_path)
    template = {"w": view()}
    load(template, tmp_path)
    assert torch.equal(template["w"], values)


class TestRefusals:
    """Anything wrong anywhere leaves everything as it was."""

    @staticmethod
    def _template():
        return {
            "f32": torch.full((4,), NAN),
            "deep": [{"bf16": torch.full((2, 3), NAN, dtype=torch.bfloat16)}],
            "shards": LocalShards((6,), {(1,): torch.full((2,), 7.0), (4,): torch.full((2,), 7.0)}),
            "zero": torch.tensor(7),
            "n": "old",
            "list": ["old"],
        }

    @staticmethod
    def _state():
        return {
            "f32": torch.arange(4.0),
            "deep": [{"bf16": torch.ones(2, 3, dtype=torch.bfloat16)}],
            "shards": torch.arange(6.0),
            "zero": torch.tensor(3),
            "n": 5,
            "list": [1, 2],
        }

    @staticmethod
    def _bits(template):
        tensors = [template["f32"], template["deep"][0]["bf16"], template["zero"], *template["shards"].chunks.values()]
        return [tensor.clone() for tensor in tensors], template["n"], template["list"]

    @pytest.mark.parametrize("fault", FAULTS)
    def test_nothing_is_touched_when_anything_is_wrong(self, tmp_path, fault):
        save(self._state(), tmp_path)
        template = self._template()
        tensors, number, listed = self._bits(template)
        broken, complaint = FAULTS[fault]
        (problem,) = problems(template | broken, tmp_path)
        assert problem.startswith(complaint)
        tensors_now, number_now, listed_now = self._bits(template)
        assert all(same_bits(a, b) for a, b in zip(tensors, tensors_now, strict=True))
        assert (number_now, listed_now) == (number, listed)

    def test_the_same_template_without_the_fault_loads(self, tmp_path):
        save(self._state(), tmp_path)
        template = self._template()
        load(template, tmp_path, strict="exact")
        assert template["f32"].tolist() == [0, 1, 2, 3]
        assert template["deep"][0]["bf16"].float().sum() == 6
        assert {o: c.tolist() for o, c in template["shards"].chunks.items()} == {(1,): [1, 2], (4,): [4, 5]}
        assert (template["zero"].item(), template["n"], template["list"]) == (3, 5, [1, 2])

    def test_exact_names_what_the_template_lacks(self, tmp_path):
        save({"a": 1, "b": {"c": torch.ones(1), "d": 2}}, tmp_path)
        found = problems({"a": 0}, tmp_path, strict="exact")
        assert [line.split(":")[0] for line in found] == ["b.c", "b.d"]

    def test_reports_list_what_was_loaded_missing_and_unexpected(self, tmp_path):
        save({"a": 1, "b": {"c": torch.ones(2), "d": 2}}, tmp_path)
        report = load({"b": {"c": torch.zeros(2), "new": 1}, "z": 0}, tmp_path, strict=False)
        assert (report.loaded, report.missing, report.unexpected) == (("b.c",), ("b.new", "z"), ("a", "b.d"))
        assert report.nbytes_loaded == 8


class TestCoverage:
    """Every element of the template is filled by exactly one stored chunk, or the load is refused."""

    @staticmethod
    def _move_second_chunk(place, offset):
        def edit(metadata):
            metadata.state_dict_metadata["t"].chunks[1] = ChunkStorageMetadata(torch.Size((offset,)), torch.Size((2,)))
            info = metadata.storage_data.pop(MetadataIndex("t", torch.Size((2,))))
            metadata.storage_data[MetadataIndex("t", torch.Size((offset,)))] = info

        edit_metadata(place, edit)

    def _saved(self, place, *, drop: bool = False, move_to: int | None = None):
        save({"t": LocalShards((4,), {(0,): torch.zeros(2), (2,): torch.ones(2)})}, place)
        if drop:
            edit_metadata(place, lambda metadata: metadata.state_dict_metadata["t"].chunks.pop())
        if move_to is not None:
            self._move_second_chunk(place, move_to)

    def test_a_hole_is_refused(self, tmp_path):
        self._saved(tmp_path, drop=True)
        template = {"t": torch.full((4,), NAN)}
        assert problems(template, tmp_path) == (
            "t: no stored chunk covers 2 of 4 elements of the region of shape (4,) at offsets (0,)",
        )
        assert bool(template["t"].isnan().all())

    def test_a_hole_that_nobody_wants_is_none(self, tmp_path):
        self._saved(tmp_path, drop=True)
        template = {"t": LocalShards((4,), {(0,): torch.full((2,), NAN)})}
        load(template, tmp_path)
        assert template["t"].chunks[0,].tolist() == [0, 0]

    @pytest.mark.parametrize("moved_to", [0, 1])
    def test_an_overlap_that_makes_up_for_a_hole_is_refused(self, tmp_path, moved_to):
        self._saved(tmp_path, move_to=moved_to)
        template = {"t": torch.full((4,), NAN)}
        (problem,) = problems(template, tmp_path)
        assert problem.startswith("t: stored chunks overlap")
        assert bool(template["t"].isnan().all())


class TestCast:
    @pytest.mark.parametrize(
        ("saved", "wanted"),
        [
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float8_e4m3fn),
            (torch.int64, torch.int8),
            (torch.uint16, torch.int32),
            (torch.float32, torch.int64),
            (torch.bool, torch.float32),
        ],
        ids=str,
    )
    def test_a_cast_is_what_torch_converts(self, tmp_path, saved, wanted):
        values = torch.tensor([[0, 1, 2], [3, 100, 1]]).to(saved)
        save({"w": values}, tmp_path)
        template = {"w": torch.zeros(2, 3).to(wanted)}
        assert "cast=True converts" in problems(template, tmp_path)[0]
        load(template, tmp_path, cast=True)
        assert same_bits(template["w"], values.to(wanted))

    def test_a_cast_does_not_excuse_another_shape(self, tmp_path):
        save({"w": torch.ones(4)}, tmp_path)
        assert problems({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path, cast=True) == (
            "w: Size mismatch: the checkpoint has shape (4,), the template (2,)",
        )


OLD_STATE = {"opt": {"lr": 0.1, "betas": [0.9, 0.99]}, "names": {"a": {"b": 1}}, "w": {"x": torch.ones(2), "y": 5}}


class TestOldCheckpoints:
    """torch before 2.4 stored containers without tensors whole."""

    @pytest.fixture
    def old(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_version, "_derived_version", "2_3")
        torch_dcp.save(OLD_STATE, checkpoint_id=tmp_path, no_dist=True)
        monkeypatch.undo()
        edit_metadata(tmp_path, lambda metadata: setattr(metadata, "version", None))
        names = pickle.loads((tmp_path / ".metadata").read_bytes()).state_dict_metadata
        assert set(names) == {"opt", "names", "w.x", "w.y"}  # as torch 2.3 has them
        return tmp_path

    def test_they_load_into_todays_template(self, old):
        template = {
            "opt": {"lr": 0.0, "betas": [0.0, 0.0]},
            "names": {"a": {"b": 0}},
            "w": {"x": torch.zeros(2), "y": 0},
        }
        report = load(template, old)
        assert template["opt"] == OLD_STATE["opt"]
        assert template["names"] == OLD_STATE["names"]
        assert (template["w"]["x"].tolist(), template["w"]["y"]) == ([1, 1], 5)
        assert report.missing == report.unexpected == ()

    def test_what_they_lack_is_still_missed(self, old):
        assert problems({"opt": {"lr": 0.0}, "absent": 1}, old) == (
            "absent: Missing key: not in the checkpoint (strict=False loads the rest)",
        )
