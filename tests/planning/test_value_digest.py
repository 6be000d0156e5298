"""Digests of Python values: equal for equal ones, whatever process made them and how."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import pathlib
import subprocess
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.planning.save_plan.value_digest import NoDigestError, scalar_digest, value_digest


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Cursor:
    epoch: int
    seen: set = field(default_factory=set)


Point = collections.namedtuple("Point", "x y")

_DIFFERENT = [
    None,
    True,
    1,
    1.0,
    "1",
    b"1",
    [1],
    (1,),
    {1},
    frozenset({1}),
    {1: 1},
    {1: 2},
    {"1": 1},
    [],
    (),
    {},
    set(),
    [[1], 2],
    [[1, 2]],
    [1, [2]],
    [{"a": 1}, {"b": 2}],
    [{"a": 1, "b": 2}],
    collections.OrderedDict(a=1, b=2),
    collections.OrderedDict(b=2, a=1),
    collections.deque([1, 2]),
    collections.deque([1, 2], maxlen=2),
    collections.Counter("aab"),
    Point(1, 2),
    Point(2, 1),
    Colour.RED,
    Colour.BLUE,
    Cursor(1, {1, 2}),
    Cursor(1, {1, 3}),
    types.SimpleNamespace(a=1),
    types.SimpleNamespace(a=2),
    functools.partial(max, 1),
    functools.partial(min, 1),
    datetime.date(2026, 1, 1),
    pathlib.PurePosixPath("/a"),
    decimal.Decimal("1.0"),
    decimal.Decimal("1.00"),
    torch.tensor([1.0]),
    torch.tensor([1], dtype=torch.int32),
    torch.tensor([[1.0]]),
    (torch.tensor([1.0]), torch.tensor([2.0])),
    (torch.tensor([2.0]), torch.tensor([1.0])),
    np.array([1.0]),
    np.array([1.0], dtype=np.float32),
    np.array(["a"]),
    np.array([[1.0], [2.0]]),
    np.array([1.0, 2.0]),
    np.array([]),
    np.array([], dtype="M8[s]"),
    np.array(["2026-01-01"], dtype="M8[D]"),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array(3.0),
    np.array([None, 1], dtype=object),
    np.array([1, None], dtype=object),
    np.float32(1),
    np.float64(1),
    1j,
    bytearray(b"1"),
    Cursor,
    Colour,
    2**3000,
]


def test_values_that_differ_in_anything_have_different_digests():
    digests = [value_digest(value) for value in _DIFFERENT]
    assert len(set(digests)) == len(_DIFFERENT)


def test_values_are_taken_apart_the_same_way_each_time():
    text = "".join(["ab", "cd"])  # not the object that the literal is
    assert value_digest(["abcd", "abcd", {}]) == value_digest([text, "abcd", {}]) == value_digest([text, text, {}])
    assert value_digest({"a": 1, "b": [2]}) == value_digest({"b": [2], "a": 1})
    assert value_digest(torch.arange(6.0).view(2, 3).t()) == value_digest(torch.arange(6.0).view(2, 3).t().contiguous())


def test_arrays_count_by_their_values_however_they_lie():
    array = np.arange(12.0).reshape(3, 4)
    assert value_digest(array.T) == value_digest(np.ascontiguousarray(array.T)) != value_digest(array)
    assert value_digest(array[::2, ::2]) == value_digest(array[::2, ::2].copy())


def test_sets_have_one_digest_whatever_the_hash_seed():
    program = (
        "from ray_dcp.planning.save_plan.value_digest import value_digest; "
        "print(value_digest([{'a', 'b', 'c', 'd'}, frozenset('xyz'), {'k': {'l', 'm'}}]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_value_that_holds_itself_has_a_digest():
    first, second, other = [1], [1], [2]
    for one in (first, second, other):
        one.append(one)
    assert value_digest(first) == value_digest(second) != value_digest(other)


@pytest.mark.parametrize("value", [(n for n in ()), lambda: 0, [{"a": (n for n in ())}]])
def test_what_cannot_be_taken_apart_says_so(value):
    with pytest.raises(NoDigestError):
        value_digest(value)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(_VALUES)
def test_a_copy_has_the_digest_of_its_original(value):
    import pickle

    assert value_digest(pickle.loads(pickle.dumps(value))) == value_digest(value)


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text())
def test_a_scalar_has_one_digest(value):
    assert scalar_digest(value) == value_digest(value)
