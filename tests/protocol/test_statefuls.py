"""``Stateful`` objects anywhere in dicts and lists: asked for their state at save, given it back at load."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, PerRank
from ray_dcp.errors import StateDictError
from ray_dcp.planning.values.collect import CollectedTemplate, collect_state
from tests.ranks import ThreadRanks, require_no_errors


class Cursor:
    """The smallest ``Stateful``: a number and a tensor."""

    def __init__(self, at: int, loaded: list[str] | None = None, name: str = "") -> None:
        self.at = at
        self.seen = torch.full((2,), float(at))
        self.loaded = loaded if loaded is not None else []
        self.name = name

    def state_dict(self):
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.seen = state["seen"].clone()
        self.loaded.append(self.name)

    def __eq__(self, other):
        return self.at == other.at and torch.equal(self.seen, other.seen)

    __hash__ = None


class Outer:
    """A ``Stateful`` that hands over another one as a part of its own state."""

    def __init__(self, at: int, loaded: list[str] | None = None) -> None:
        self.inner = Cursor(at, loaded, "inner")
        self.loaded = self.inner.loaded
        self.at = at

    def state_dict(self):
        return {"inner": self.inner, "at": self.at, "own": PerRank(self.at)}

    def load_state_dict(self, state):
        self.at = state["at"]
        assert state["inner"]["at"] == self.inner.at  # its plain state, and it has been given its own
        self.loaded.append("outer")


PLACES = {
    "top": lambda x: {"x": x},
    "dict": lambda x: {"deep": {"er": {"x": x, "n": 5}}, "n": 4},
    "int keys": lambda x: {"deep": {0: x, 1: 7}},
    "list": lambda x: {"xs": [1, x, {"w": torch.ones(1)}]},
    "list of one": lambda x: {"xs": [x]},
    "ordered": lambda x: {"deep": OrderedDict(x=x, y=2)},
    "list in list": lambda x: {"deep": [[x], {"also": [2]}]},
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", [Cursor, Outer])
@pytest.mark.parametrize("place", PLACES)
def test_one_is_asked_wherever_it_lies_and_given_its_state_back(tmp_path, place, kind, mode):
    state = PLACES[place](kind(7))
    if mode == "sync":
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        dcp.async_save(state, checkpoint_id=tmp_path, no_dist=True).upload_completion.result()
    blank = kind(-1)
    template = PLACES[place](blank)
    report = dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert report.missing == report.unexpected == ()
    assert blank.at == 7
    inner = blank if kind is Cursor else blank.inner
    assert inner == Cursor(7)
    assert "at" in str(report.loaded)


def test_values_beside_one_are_put_into_the_callers_own_containers(tmp_path):
    dcp.save({"a": {"x": Cursor(7), "n": 5, "list": [1, 2]}, "l": [Cursor(8), 3]}, checkpoint_id=tmp_path, no_dist=True)
    inside, entries = {"x": Cursor(0), "n": 0, "list": None}, [Cursor(0), 0]
    template = {"a": inside, "l": entries}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert template == {"a": inside, "l": entries}
    assert template["a"] is inside
    assert template["l"] is entries
    assert inside == {"x": Cursor(7), "n": 5, "list": [1, 2]}
    assert entries == [Cursor(8), 3]


def test_an_optimizer_and_a_module_below_the_top_go_on_as_if_nothing_had_been(tmp_path):
    def trained():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, optimizer

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).sum().backward()
        optimizer.step()

    model, optimizer = trained()
    step(model, optimizer)
    dcp.save({"agent": {"model": model, "opts": [optimizer]}}, checkpoint_id=tmp_path, no_dist=True)
    other, its_optimizer = trained()
    step(other, its_optimizer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    dcp.load({"agent": {"model": other, "opts": [its_optimizer]}}, checkpoint_id=tmp_path, no_dist=True)
    step(model, optimizer)
    step(other, its_optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (3, 3)])
def test_with_several_ranks_each_asks_its_own(tmp_path, saving, loading):
    require_no_errors(ThreadRanks(saving).save(lambda rank: {"a": {"x": Cursor(7)}, "n": 1}, tmp_path))
    cursors = [Cursor(-1) for _ in range(loading)]
    require_no_errors(ThreadRanks(loading).load([{"a": {"x": one}, "n": 0} for one in cursors], tmp_path))
    assert cursors == [Cursor(7)] * loading


def test_inner_ones_are_given_their_state_before_outer_ones_and_plain_values_before_both():
    order: list[str] = []
    state = {"outer": Outer(1, order), "last": Cursor(2, order, "last"), "n": 1}
    template = CollectedTemplate(state)
    template.values["n"] = 5
    last = state["last"]
    last.load_state_dict = lambda loaded: order.append(f"n is {state['n']}")
    template.restore()
    assert order == ["n is 5", "inner", "outer"]


def test_containers_without_any_are_the_callers_own():
    plain, held = {"a": [1, {"w": torch.ones(1)}]}, {"x": Cursor(1)}
    template = CollectedTemplate({"plain": plain, "held": held, "w": torch.ones(1)})
    assert template.values["plain"] is plain
    assert template.values["held"] is not held
    assert isinstance(held["x"], Cursor)
    assert not CollectedTemplate({"plain": plain}).runs_code


def test_a_mapping_that_cannot_be_changed_may_hold_one(tmp_path):
    dcp.save({"a": MappingProxyType({"x": Cursor(7), "w": torch.ones(2)})}, checkpoint_id=tmp_path, no_dist=True)
    blank, w = Cursor(0), torch.zeros(2)
    dcp.load({"a": MappingProxyType({"x": blank, "w": w})}, checkpoint_id=tmp_path, no_dist=True)
    assert blank == Cursor(7)
    assert w.tolist() == [1, 1]


def test_a_template_with_one_in_a_tuple_is_refused_by_name(tmp_path):
    dcp.save({"a": {"t": [Cursor(7)]}}, checkpoint_id=tmp_path, no_dist=True)
    template = {"a": {"t": (Cursor(0),)}}
    with pytest.raises(CheckpointException, match=r"a\.t: a tuple holds an object with load_state_dict; use a list"):
        dcp.load(template, checkpoint_id=tmp_path, no_dist=True)


def test_a_class_is_no_object_that_has_state():
    assert collect_state({"kind": Cursor}, 0) == {"kind": Cursor}


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_dict_that_contains_itself_is_refused_by_its_path(tmp_path, way):
    state = {"a": {"list": [1, {}]}}
    state["a"]["list"][1]["again"] = state["a"]
    with pytest.raises(StateDictError, match=r"contains itself, or is nested too deep: a\.list\.1\.again$"):
        collect_state(state, 0) if way == "save" else CollectedTemplate(state)
