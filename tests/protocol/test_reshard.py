"""Save on n ranks, load on m: every kind and dtype at once, and random shardings."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp as dcp
from tests import shardings
from tests.ranks import ThreadRanks, require_no_errors


@pytest.mark.parametrize(("saving", "loading"), list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 5))))
def test_every_kind_and_dtype_survives_a_change_of_ranks(tmp_path, saving, loading):
    require_no_errors(ThreadRanks(saving).save(lambda rank: shardings.state(rank, saving), tmp_path / "c"))
    templates = [shardings.templates(rank, loading) for rank in range(loading)]
    reports = require_no_errors(ThreadRanks(loading).load(templates, tmp_path / "c"))
    assert [shardings.differences(templates[rank], rank, loading) for rank in range(loading)] == [[]] * loading
    assert reports[0].missing == reports[0].unexpected == ()


def test_the_templates_differ_from_the_values_before_a_load():
    untouched = shardings.templates(0, 1)
    nothing_to_differ = {name for name in untouched if name.startswith("no_rows")}
    assert set(shardings.differences(untouched, 0, 1)) == untouched.keys() - nothing_to_differ


@st.composite
def _tilings(draw, shape):
    """A cut of ``shape`` into boxes, each given to a rank."""
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))}) for length in shape]
    boxes = [
        (tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        for spans in itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    ]
    num_ranks = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(boxes), max_size=len(boxes)))
    return num_ranks, list(zip(owners, boxes, strict=True))


def _chunks(values, tiling, rank):
    return {
        offsets: values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
        for owner, (offsets, sizes) in tiling
        if owner == rank
    }


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=0, max_size=3))
def test_any_tiling_loads_into_any_other(tmp_path_factory, data, shape):
    place = tmp_path_factory.mktemp("tilings")
    values = torch.rand(shape)
    saving, tiling = data.draw(_tilings(shape))
    loading, other_tiling = data.draw(_tilings(shape))
    require_no_errors(
        ThreadRanks(saving).save(lambda rank: {"t": dcp.LocalShards(shape, _chunks(values, tiling, rank))}, place)
    )
    nothing = torch.full(shape, float("nan"))
    templates = [{"t": dcp.LocalShards(shape, _chunks(nothing, other_tiling, rank))} for rank in range(loading)]
    require_no_errors(ThreadRanks(loading).load(templates, place))
    for rank, filled in enumerate(templates):
        expected = _chunks(values, other_tiling, rank)
        assert all(torch.equal(filled["t"].chunks[offsets], chunk) for offsets, chunk in expected.items())
