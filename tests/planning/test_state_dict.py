"""What a rank hands over: which values are refused, and when the others are frozen."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from ray_dcp import LocalShards, PerRank
from ray_dcp.errors import StateDictError
from ray_dcp.planning.collect import collect_state
from ray_dcp.planning.state_dict import StatePlanner, for_global_step, plan_cache_off


class Counter:
    """A ``Stateful``: two methods are enough."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self):
        return {"count": self.count, "own": PerRank(self.count)}

    def load_state_dict(self, state):
        self.count = state["count"]


def local_plan(state, rank=0):
    planner = StatePlanner()
    planner.set_up_planner(collect_state(state, rank), None, rank == 0)
    return planner, planner.create_local_plan()


def problems(state):
    with pytest.raises(StateDictError) as caught:
        local_plan(state)
    return caught.value.problems


def test_stateful_objects_are_asked_and_their_per_rank_values_marked():
    collected = collect_state({"c": Counter(4), "lr": 0.5}, rank=2)
    assert collected == {"c": {"count": 4, "own": {"__rank_2__": (4,)}}, "lr": 0.5}


def test_values_are_the_callers_own_objects():
    weights, options = torch.ones(2), {"deep": [1, {"er": torch.ones(1)}]}
    collected = collect_state({"w": weights, "options": options}, rank=0)
    assert collected["w"] is weights
    assert collected["options"] is options


def test_any_mapping_will_do_and_nothing_else():
    assert collect_state(collections.OrderedDict(a=1), 0) == {"a": 1}
    with pytest.raises(StateDictError, match="state_dict is a list"):
        collect_state([1], 0)


ODD = {
    "meta tensor": lambda: torch.empty(3, device="meta"),
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "torch.jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "TwoTensor wraps other tensors": lambda: TwoTensor(torch.ones(3), torch.zeros(3)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("words", ODD)
def test_a_tensor_whose_bytes_are_not_its_values_is_refused_while_planning(words):
    (problem,) = problems({"good": torch.ones(2), "bad": {"x": ODD[words]()}})
    assert problem.startswith("bad.x: ")
    assert words in problem


@pytest.mark.parametrize("wrap", [lambda t: (t,), lambda t: ([{"x": t}], 1), lambda t: ((t, 1), 2)])
def test_a_sharded_tensor_in_a_tuple_is_refused_as_one_rank_alone_would_save_its_part(wrap):
    (problem,) = problems({"bad": wrap(LocalShards((4,), {(0,): torch.ones(2)}))})
    assert problem.startswith("bad: a sharded tensor in a tuple")


def test_a_per_rank_value_in_a_tuple_is_refused_as_ranks_would_share_it():
    for state in ({"t": (1, PerRank(2))}, {"d": {"l": [({"deep": PerRank(2)},)]}}):
        with pytest.raises(StateDictError, match=r"PerRank in it would be lost: use a list: .*PerRank\(2\)"):
            collect_state(state, 0)


def test_plain_tensors_in_tuples_and_all_else_that_pickles_is_accepted():
    _, plan = local_plan({"t": (torch.ones(2), [torch.ones(1)]), "e": [], "n": None, "s": {1, 2}})
    assert {item.index.fqn for item in plan.items} == {"t", "e", "n", "s"}


def test_a_tensor_that_still_arrives_from_a_collective_is_accepted():
    _, plan = local_plan({"w": AsyncCollectiveTensor(torch.ones(2))})
    assert [item.index.fqn for item in plan.items] == ["w"]


def test_python_values_are_what_they_were_when_the_plan_was_made():
    values = {"names": ["a"]}
    planner, plan = local_plan(values)
    values["names"].append("b")
    (item,) = plan.items
    assert torch.load(planner.resolve_data(item), weights_only=True) == ["a"]
    assert torch.load(planner.resolve_data(item), weights_only=True) == ["a"]  # asked twice


def test_a_planner_used_again_forgets_the_python_values_of_before():
    planner, _ = local_plan({"names": ["a"], "gone": 1})
    planner.set_up_planner({"names": ["b"]}, None, True)
    (item,) = planner.create_local_plan().items
    assert torch.load(planner.resolve_data(item), weights_only=True) == ["b"]
    assert planner._pickled.keys() == {"names"}


def test_of_our_own_planner_the_coordinator_gets_the_settings_and_of_a_users_all():
    planner, _ = local_plan({"w": torch.ones(2)})
    planner.dedup_save_to_lowest_rank = True
    carried = for_global_step(planner)
    assert carried.dedup_save_to_lowest_rank
    assert not hasattr(carried, "state_dict")
    assert planner.state_dict["w"].tolist() == [1, 1]

    class Theirs(StatePlanner):
        pass

    theirs = Theirs()
    assert for_global_step(theirs) is theirs


def test_torchs_plan_cache_is_off_and_then_as_it_was():
    class Caching(StatePlanner):
        pass

    planner = Caching(enable_plan_caching=True)
    for dtype in (torch.float32, torch.bfloat16):
        with plan_cache_off(planner):
            planner.set_up_planner({"w": torch.ones(2, dtype=dtype)}, None, True)
            (item,) = planner.finish_plan(planner.create_local_plan()).items
        assert item.tensor_data.properties.dtype == dtype
        assert planner._enable_plan_caching


@pytest.mark.parametrize("state", [{"x": {0: 1, "0": 2}}, {"a.b": 1, "a": {"b": 2}}], ids=str)
def test_two_values_of_one_name_are_refused(state):
    """Torch's names are paths joined by dots; to keep one of the two would lose the other."""
    with pytest.raises(ValueError, match=r"duplicated flatten key (x\.0|a\.b)"):
        local_plan(state)
