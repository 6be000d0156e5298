"""What names lose of a state dict, kept in rows: with them the state dict can be had back from its names alone."""

from __future__ import annotations

import datetime
import enum
import json
import os
import subprocess
import sys
from collections import OrderedDict, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._traverse import set_element

import ray_dcp as dcp
from ray_dcp.errors import StateDictError
from ray_dcp.planning.values.containers import containers_of, merged_containers, optimizer_containers, with_containers
from ray_dcp.planning.values.flat import flat_state

WEIGHT = torch.ones(1)
KEYS = st.sampled_from(["a", "b", "c.d", "", 0, 7, -1, True, None, (1, "x"), 0.5, b"k"])
STATES = st.recursive(
    st.sampled_from([1, None, "x", (1, {}), {1}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=12,
)


def rebuilt(state, rows):
    """As ``convert`` does it: the values by their paths, then the rows."""
    flat, paths = flat_state(state)
    nested: dict = {}
    for name, value in flat.items():
        set_element(nested, paths[name], value)
    return with_containers(nested, json.loads(json.dumps(rows)))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, STATES, max_size=3))
def test_a_state_dict_comes_back_from_its_names_and_rows(state):
    try:
        flat_state(state)
    except StateDictError:
        return
    assert same(rebuilt(state, containers_of(state)), state)


def same(one, other):
    """In whatever order: what was empty comes last."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        keys = {repr(key): key for key in one}
        return keys.keys() == {repr(key) for key in other} and all(same(one[key], other[key]) for key in keys.values())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


class Colour(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    LOW = 3

    def __str__(self):
        return "3"


class Level(enum.IntEnum):
    LOW = 3

    def __str__(self):
        return "Level.LOW"


class Place(NamedTuple):
    x: int
    y: int


class Text(str):
    __slots__ = ()


KEPT = [3, -1, 10**400, True, None, 1.5, -0.0, 1j, b"k", (), (1, ("x", None)), np.int64(5), np.str_("u"), Text("t")]
NOT_KEPT = {
    "a member of an enum": Colour.RED,
    "a member of an enum of text": Word.RED,
    "a dtype": torch.float32,
    "a device": torch.device("cpu"),
    "a size": torch.Size([1]),
    "a date": datetime.date(2020, 1, 1),
    "a path": Path("x"),
    "a set": frozenset({1, 2}),
    "a tuple with a set": (frozenset({1}),),
    "a namedtuple": Place(1, 2),
    "a decimal": Decimal("1.5"),
    "a float of numpy": np.float64(1.5),
    "no number": float("nan"),
    "infinity": float("inf"),
    "a class": int,
}


def test_every_key_that_a_save_takes_comes_back_into_an_empty_dict_of_any_process(tmp_path):
    state = {"d": {key: torch.ones(1) for key in KEPT}, "deep": [{"e": {None: {(1, 2): "v"}}}]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    template = {"d": {}, "deep": [{"e": {}}]}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert list(template["d"]) == KEPT
    assert {type(key) for key in template["d"]} == {int, bool, type(None), float, complex, bytes, tuple, str}
    assert template["deep"] == state["deep"]
    program = (
        "import sys, ray_dcp as dcp; t = {'d': {}}; "
        "dcp.load(t, checkpoint_id=sys.argv[1], no_dist=True); print(list(t['d']))"
    )
    variables = {**os.environ, "PYTHONHASHSEED": "7"}
    run = [sys.executable, "-c", program, str(tmp_path)]
    there = subprocess.run(run, env=variables, check=True, capture_output=True, text=True).stdout.strip()
    assert there == repr(list(template["d"]))


@pytest.mark.parametrize("kind", NOT_KEPT)
def test_a_key_that_would_come_back_as_text_is_refused_at_save_by_name(tmp_path, kind):
    key = NOT_KEPT[kind]
    with pytest.raises(dcp.CheckpointException, match="would come back as text") as caught:
        dcp.save({"a": [{"b": {key: torch.ones(1), "c": 1}}], "w": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    (problem,) = caught.value.__cause__.problems
    assert problem == f"a.0.b: {key!r}, a {type(key).__name__}, as key"
    assert not (tmp_path / "c").exists()


def test_a_dict_that_is_one_value_may_have_any_key(tmp_path):
    inner = {datetime.date(2020, 1, 1): 1, torch.float32: 2}
    dcp.save({"a": (inner,)}, checkpoint_id=tmp_path, no_dist=True)
    template = {"a": None}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert template["a"] == (inner,)


def test_keys_of_numpy_and_of_enums_of_numbers_become_numbers():
    state = {"x": {np.int64(5): 1, Number.LOW: 2, "k": 3}}
    assert rebuilt(state, containers_of(state)) == {"x": {5: 1, 3: 2, "k": 3}}


def test_a_number_that_prints_as_something_else_is_no_number():
    with pytest.raises(StateDictError, match="as key"):
        containers_of({Level.LOW: 2})  # as every IntEnum before Python 3.11


def test_dicts_of_a_class_of_their_own_become_plain():
    state = {"x": defaultdict(list, {1: 2}), "y": defaultdict(list)}
    found = rebuilt(state, containers_of(state))
    assert found == {"x": {1: 2}, "y": {}}
    assert {type(value) for value in found.values()} == {dict}


def test_plain_states_have_no_rows():
    assert containers_of({"a": {"b": [{"c": WEIGHT}, 1]}, "n": 5, "t": (1, {2: 3}), "l": [1, [2]]}) == []


def test_ranks_that_differ_are_merged():
    first = containers_of({"x": {}, "y": {0: 1}, "z": {None: 1, "a": 2}, "only": OrderedDict(a=1)})
    second = containers_of({"x": {3: 1}, "y": {1: 1}, "z": {True: 1}, "other": {}})
    merged = {".".join(path): [kind, keys] for path, kind, keys in merged_containers([first, second])}
    assert merged == {
        "x": ["dict", "int"],
        "y": ["dict", "int"],
        "z": ["dict", {"None": "None", "True": "True"}],
        "only": ["OrderedDict", None],
        "other": ["dict", "none"],
    }


def test_an_empty_dict_of_one_rank_gives_way_to_values_of_another():
    rows = [[["a"], "dict", "none"], [["b", "c"], "dict", "none"], [["l", 0], "dict", "none"]]
    assert with_containers({"a": 5, "b": 6, "l": [7]}, rows) == {"a": 5, "b": 6, "l": [7]}
    assert with_containers({"a": {"x": 1}, "b": {}, "l": [None, 7]}, rows) == {
        "a": {"x": 1},
        "b": {"c": {}},
        "l": [{}, 7],
    }


def test_of_an_optimizer_whose_rows_are_lost_the_layout_tells_the_keys():
    state = {
        "opt": {"state": {0: {"step": 1}, 1: {"step": 2}}, "param_groups": [{"params": [0, 1]}]},
        "by name": {"state": {"0": {"step": 1}, "w": {"step": 2}}, "param_groups": [{"params": ["0", "w"]}]},
        "not one": {"state": {"0": 1}},
        "state": {"0": 1},
    }
    _, paths = flat_state(state)
    assert rebuilt(state, optimizer_containers(paths.values())) == state
    top = {"state": {5: {"step": 1}}, "param_groups": [{"params": [5]}]}
    assert rebuilt(top, optimizer_containers(flat_state(top)[1].values())) == top


@pytest.mark.parametrize("key", ["٣", "01", "-0", "", "-", "1_0"])
def test_text_that_is_no_number_as_python_prints_it_stays_text(key):
    assert with_containers({"x": {key: 1, "5": 2, "-7": 3}}, [[["x"], "dict", "int"]]) == {"x": {key: 1, 5: 2, -7: 3}}


@pytest.mark.parametrize(
    "row",
    [
        5,
        [],
        ["x", "dict", "none"],
        [["l", 1 << 40], "dict", "none"],
        [["l", -1], "dict", "none"],
        [[None], "dict", "none"],
        [["x"], "dict", {"k": "__import__('os').getcwd()"}],
        [["x"], "dict", {"k": "["}],
        [["x"], "dict", {"k": "[1]"}],
        [["x"], "dict", {"k": 7}],
        [["x"], 5, 5],
        [["x", "k", "deeper"], "dict", "none"],
        [["l", "a"], "dict", "none"],
    ],
    ids=str,
)
def test_a_row_that_a_file_made_up_changes_nothing(row):
    state = {"x": {"k": 1}, "l": [1]}
    assert with_containers(state, [row]) == {"x": {"k": 1}, "l": [1]}
