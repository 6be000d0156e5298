"""Which tensors of a template share memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp import LocalShards
from ray_dcp.planning.template.overlaps import shared_memory, tied_to


def groups(**values) -> list[tuple[str, ...]]:
    return [shared.fqns for shared in shared_memory(values)]


@st.composite
def views(draw):
    """Some view of one buffer."""
    buffer = torch.zeros(draw(st.sampled_from([(6, 8), (4, 3, 5), (24,)])))

    def view() -> torch.Tensor:
        found = buffer
        for dim in range(found.dim()):
            start = draw(st.integers(0, found.shape[dim]))
            end = draw(st.integers(start, found.shape[dim]))
            cut = [slice(None)] * found.dim()
            cut[dim] = slice(start, end, draw(st.sampled_from([1, 1, 2])))
            found = found[tuple(cut)]
        return found.transpose(0, -1) if draw(st.booleans()) else found

    return buffer, [view() for _ in range(3)]


@given(views())
def test_views_that_have_an_element_in_common_are_always_found(case):
    buffer, (one, two, three) = case
    names = {"one": one, "two": two, "three": three}
    found = {frozenset(pair) for group in groups(**names) for pair in itertools.combinations(group, 2)}
    for first, second in itertools.combinations(names, 2):
        buffer.zero_()
        names[first].fill_(1)
        if bool((names[second] == 1).any()):
            assert frozenset((first, second)) in found


def test_columns_of_one_buffer_lie_apart():
    buffer = torch.zeros(4, 6)
    assert groups(left=buffer[:, :2], middle=buffer[:, 2:5], right=buffer[:, 5:], other=torch.zeros(3)) == []
    assert groups(left=buffer[:, :3], right=buffer[:, 2:], rest=torch.zeros(2)) == [("left", "right")]


@pytest.mark.parametrize(
    "other",
    [lambda w: w, lambda w: w.detach(), torch.nn.Parameter, lambda w: w.view(2, 2)[:]],
    ids=["itself", "detached", "a parameter", "a view of all"],
)
def test_one_tensor_under_two_names_is_tied(other):
    weight = torch.zeros(2, 2)
    (found,) = shared_memory({"a": weight, "b": other(weight), "c": torch.zeros(2, 2)})
    assert (found.fqns, found.is_tied) == (("a", "b"), True)


@pytest.mark.parametrize(
    "other", [lambda w: w[1:], lambda w: w.t(), lambda w: w.view(torch.int32)], ids=["a row", "turned", "as integers"]
)
def test_another_view_of_it_is_not(other):
    weight = torch.zeros(2, 2)
    (found,) = shared_memory({"a": weight, "b": other(weight)})
    assert not found.is_tied


def test_chunks_of_one_value_are_its_own_affair():
    row = torch.zeros(4)
    shards = LocalShards((8,), {(0,): row[:2], (4,): row[2:]})
    assert groups(s=shards, t=torch.zeros(4)) == []
    assert groups(s=shards, t=row[1:]) == [("s", "t")]


def test_meta_tensors_are_known_by_the_storage_that_they_have():
    linear = torch.nn.Linear(2, 2, device="meta")
    linear.again = linear.weight
    assert groups(**linear.state_dict()) == [("again", "weight")]


def test_what_is_filled_under_another_name_is_not_missing():
    weight = torch.zeros(2)
    values = {"a": weight, "b": weight.detach(), "c": torch.zeros(2), "n": 1, "e": torch.zeros(0), "f": torch.zeros(0)}
    assert tied_to(values, ["a", "e"], ["b", "c", "n", "f"]) == {"b"}
