"""Scalars are read without torch, and nothing else is taken for one."""

from __future__ import annotations

import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.format.scalar_record import NotAScalarError, read_scalar
from ray_dcp.format.zip_record import frame_pickle
from ray_dcp.planning.values.python_record import python_record

scalars = st.none() | st.booleans() | st.integers() | st.integers(-300, 70_000) | st.floats() | st.text(max_size=20)


@given(scalars)
def test_what_is_read_is_what_torch_reads(value):
    record = python_record(value)
    loaded = torch.load(io.BytesIO(record), weights_only=True)
    try:
        read = read_scalar(io.BytesIO(record))
    except NotAScalarError:
        assert isinstance(value, int | str)  # long ones are left to torch
        assert isinstance(value, str) or value.bit_length() > 2000
        return
    assert type(read) is type(loaded)
    assert read == loaded or (math.isnan(read) and math.isnan(loaded))
    assert not isinstance(value, float) or math.copysign(1, read) == math.copysign(1, value)


class Evil:
    def __reduce__(self):
        return eval, ("1/0",)


@pytest.mark.parametrize(
    "value", [[1.0], (), {}, {"a": 1}, b"x", 1j, Evil(), torch.ones(1), [None]], ids=lambda v: type(v).__name__
)
def test_everything_else_is_left_to_torch(value):
    with pytest.raises(NotAScalarError):
        read_scalar(io.BytesIO(python_record(value)))


@given(st.binary(max_size=24) | scalars.map(lambda value: pickle.dumps(value, 2)), st.data())
def test_only_pickles_that_mean_the_same_to_pickle_are_read(pickled, data):
    mutated = bytearray(pickled)
    if mutated:
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    try:
        value = read_scalar(io.BytesIO(frame_pickle(bytes(mutated))))
    except NotAScalarError:
        return
    assert repr(value) == repr(pickle.loads(bytes(mutated)))


@given(scalars, st.data())
def test_a_record_with_one_byte_changed_is_never_read_as_another_value(value, data):
    record = bytearray(python_record(value))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] ^= data.draw(st.integers(1, 255))
    try:
        read = read_scalar(io.BytesIO(bytes(record)))
    except NotAScalarError:
        return
    assert repr(read) == repr(value)  # what stands behind the pickle was changed


def test_what_is_read_from_elsewhere_is_left_to_torch():
    content = io.BytesIO(python_record(1.5))
    content.read(1)
    with pytest.raises(NotAScalarError):
        read_scalar(content)
