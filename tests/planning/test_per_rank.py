"""``PerRank`` values: their names in a checkpoint, and the template that takes them."""

from __future__ import annotations

import pytest

from ray_dcp import PerRank
from ray_dcp.planning.per_rank import (
    PerRankTemplate,
    is_per_rank_name,
    per_rank_world_sizes,
)
from ray_dcp.planning.values.collect import collect_state


def fill(template, rank, world_size, saved):
    """What a load does: expand, put the saved values under their keys, restore."""
    per_rank = PerRankTemplate(template, rank, world_size)
    with per_rank.expanded(saved):
        for fqn, value in saved.items():
            place = template
            *path, key = fqn.split(".")
            for part in path:
                place = place[int(part) if isinstance(place, list) else part]
            if key in place:
                place[key] = value


def saved_by(world_size, name="rng"):
    return {f"{name}.__rank_{rank}__": (f"of {rank}",) for rank in range(world_size)}


def test_each_value_becomes_an_item_of_its_rank_alone():
    assert collect_state({"rng": PerRank([1]), "n": 1}, 3) == {"rng": {"__rank_3__": ([1],)}, "n": 1}


def test_they_are_found_in_dicts_and_lists_and_nothing_else_is_copied():
    untouched = {"deep": [1, {"x": 2}]}
    state = {"l": [0, {"rng": PerRank(5)}], "same": untouched, "same_list": [1, 2]}
    marked = collect_state(state, 0)
    assert marked["l"] == [0, {"rng": {"__rank_0__": (5,)}}]
    assert marked["same"] is untouched
    assert marked["same_list"] is state["same_list"]
    assert isinstance(state["l"][1]["rng"], PerRank)  # the caller's own dict is as it was


@pytest.mark.parametrize(
    ("name", "per_rank"),
    [
        ("rng.__rank_0__", True),
        ("a.b.1.__rank_12__", True),
        ("rng", False),
        ("__rank_0__", False),
        ("rng.__rank_0__.x", False),
        ("rng.__rank_x__", False),
    ],
)
def test_their_names_are_known(name, per_rank):
    assert is_per_rank_name(name) == per_rank


def test_how_many_ranks_saved_each_is_read_from_the_names():
    names = [*saved_by(3), *saved_by(11, "a.cursor"), "w", "n.x"]
    assert per_rank_world_sizes(names) == {"rng": 3, "a.cursor": 11}


def test_at_the_same_world_size_a_rank_gets_its_own():
    template = {"rng": PerRank(None), "deep": [{"rng": PerRank(None)}]}
    inner, outer = template["deep"][0]["rng"], template["rng"]
    fill(template, 1, 2, saved_by(2) | saved_by(2, "deep.0.rng"))
    assert template["rng"] is outer
    assert template["deep"][0]["rng"] is inner
    assert (outer.value, inner.value) == ("of 1", "of 1")


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 3), (1, 3), (3, 1), (11, 2)])
def test_at_another_world_size_reshard_gets_all_in_rank_order(saving, loading):
    for rank in range(loading):
        template = {"rng": PerRank(None, reshard=lambda values, rank, world_size: (values, rank, world_size))}
        fill(template, rank, loading, saved_by(saving))
        assert template["rng"].value == ([f"of {r}" for r in range(saving)], rank, loading)


def test_without_reshard_another_world_size_is_a_problem_that_names_both():
    template = {"rng": PerRank(None), "ok": PerRank(None, reshard=lambda *a: 0), "new": PerRank(None)}
    (problem,) = PerRankTemplate(template, 0, 2).problems(saved_by(4) | saved_by(4, "ok"))
    assert problem.startswith("rng: saved by 4 ranks, loading on 2: pass PerRank(..., reshard=")
    assert PerRankTemplate(template, 0, 4).problems(saved_by(4) | saved_by(4, "ok")) == []


def test_a_load_that_fails_gives_the_template_back_as_it_was():
    template = {"rng": PerRank("old"), "l": [PerRank("old too")]}
    before = (template["rng"], template["l"][0])

    def fail_after_one_value():
        with PerRankTemplate(template, 0, 1).expanded(saved_by(1)):
            template["rng"]["__rank_0__"] = ("new",)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail_after_one_value()
    assert (template["rng"], template["l"][0]) == before
    assert (template["rng"].value, template["l"][0].value) == ("old", "old too")


def test_a_value_that_the_checkpoint_lacks_stays():
    template = {"rng": PerRank("old")}
    fill(template, 0, 2, {})
    assert template["rng"].value == "old"


def test_it_shows_its_value():
    assert repr(PerRank({"a": 1})) == "PerRank({'a': 1})"
