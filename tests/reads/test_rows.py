"""Boxes as rows: the same elements as slicing picks, however the payload is cut up on its way."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_dcp.reads.fill import RowsTarget
from ray_dcp.reads.plan.rows import rows_of, spans


@st.composite
def boxes(draw, min_side=1):
    sizes = draw(st.lists(st.integers(min_side, 6), max_size=4))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in sizes]
    return tuple(sizes), tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


def sliced(sizes, offsets, lengths) -> torch.Tensor:
    """The positions in the payload of what the box holds."""
    whole = torch.arange(math.prod(sizes)).reshape(sizes)
    return whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def runs(positions: list[int]) -> list[tuple[int, int]]:
    """(start, end) of what lies one after the other."""
    found: list[list[int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1][1] += 1
        else:
            found.append([position, position + 1])
    return [(a, b) for a, b in found]


@settings(max_examples=400, deadline=None)
@given(boxes())
@example(((), (), ()))
@example(((4, 4, 4), (0, 1, 0), (2, 1, 2)))  # one index in the middle: rows all the same
@example(((1, 5, 1), (0, 2, 0), (1, 2, 1)))
def test_a_box_is_rows_just_where_its_runs_are_as_long_and_as_far_apart(case):
    positions = sliced(*case).reshape(-1).tolist()
    found = runs(positions)
    apart = {b[0] - a[0] for a, b in itertools.pairwise(found)}
    rows = rows_of(*case)
    if len(apart) > 1:
        assert rows is None
        return
    assert rows is not None
    assert (rows.first, rows.end, rows.num) == (positions[0], positions[-1] + 1, len(found))
    assert [p for row in range(rows.num) for p in range(rows.width)] == [p for a, b in found for p in range(b - a)]
    assert [(rows.first + row * rows.stride) for row in range(rows.num)] == [a for a, _ in found]
    assert rows.stride >= rows.width > 0


@settings(max_examples=400, deadline=None)
@given(boxes(), st.lists(st.integers(0, 1300), max_size=12), st.integers(0, 3))
def test_elements_that_pass_in_any_pieces_end_where_slicing_has_them(case, cuts, in_front):
    rows = rows_of(*case)
    if rows is None:
        return
    total = math.prod(case[0])
    payload = torch.arange(in_front + total + 3)  # the pieces are views into something larger
    target = torch.full((rows.num + 2, rows.width + 2), -1)
    inner = target[1:-1, 1:-1]
    bounds = sorted({0, total, *(cut % (total + 1) for cut in cuts)})
    for start, end in itertools.pairwise(bounds):
        RowsTarget(rows, inner).take(payload[in_front + start : in_front + end], start)
    assert torch.equal(inner.reshape(-1), sliced(*case).reshape(-1) + in_front)
    assert int((target == -1).sum()) == target.numel() - inner.numel()


@settings(max_examples=200, deadline=None)
@given(boxes(), st.integers(0, 1300), st.integers(0, 1300))
def test_elements_that_did_not_pass_are_not_touched(case, a, b):
    rows = rows_of(*case)
    if rows is None:
        return
    total = math.prod(case[0])
    start, end = sorted((a % (total + 1), b % (total + 1)))
    target = torch.full((rows.num, rows.width), -1)
    RowsTarget(rows, target).take(torch.arange(total)[start:end], start)
    wanted = sliced(*case).reshape(-1)
    passed = (wanted >= start) & (wanted < end)
    assert torch.equal(target.reshape(-1), torch.where(passed, wanted, -1))


@settings(max_examples=400, deadline=None)
@given(boxes(), st.integers(1, 40))
def test_spans_hold_all_rows_and_leave_out_every_unit_that_holds_none(case, unit):
    rows = rows_of(*case)
    if rows is None:
        return
    units = {position // unit for position in sliced(*case).reshape(-1).tolist()}
    found = list(spans(rows, unit))
    assert all(start % unit == 0 and end % unit == 0 and start < end for start, end in found)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    read = {number for start, end in found for number in range(start // unit, end // unit)}
    assert units <= read
    if rows.stride - rows.width >= unit:  # gaps smaller than that may be read
        assert read - units == set() or rows.stride - rows.width < 2 * unit


def test_a_gap_with_a_whole_unit_in_it_is_left_out():
    rows = rows_of((4, 100), (0, 10), (4, 20))
    assert rows is not None
    assert list(spans(rows, 30)) == [(0, 30), (90, 150), (210, 240), (300, 330)]
    assert list(spans(rows, 100)) == [(0, 400)]


@pytest.mark.parametrize("sizes", [(2**40, 2**20), (2**20, 2**40)])
def test_numbers_beyond_what_memory_holds_are_no_problem(sizes):
    rows = rows_of(sizes, (sizes[0] - 1, 5), (1, 3))
    assert rows is not None
    assert (rows.first, rows.num, rows.width) == ((sizes[0] - 1) * sizes[1] + 5, 1, 3)
    assert list(spans(rows, 8)) == [(rows.first // 8 * 8, rows.first // 8 * 8 + 8)]
