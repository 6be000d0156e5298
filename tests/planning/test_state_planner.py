"""What a rank hands over: which values are refused, and when the others are frozen."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.testing._internal.two_tensor import TwoTensor

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, PerRank
from ray_dcp.errors import StateDictError
from ray_dcp.planning.save_plan.state_planner import StatePlanner, for_global_step, plan_cache_off, require_storable
from ray_dcp.planning.values.collect import collect_state


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


@dataclasses.dataclass
class Held:
    part: Any
    other: int = 1


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part):
        self.part = part


class Pair(NamedTuple):
    first: int
    part: Any


def function(part):
    return part


HOLDERS = {
    "t (at [0])": lambda part: (part,),
    "t (at [0][0]['x'])": lambda part: ([{"x": part}], 1),
    "t (at .part)": Held,
    "t (at .part.part)": lambda part: Held(Slotted(part)),
    "t (at [1])": lambda part: collections.deque([1, part]),
    "t (at .x)": lambda part: types.SimpleNamespace(x=part),
    "t (at .args[0])": lambda part: functools.partial(function, part),
    "t (at .keywords['part'])": lambda part: functools.partial(function, part=part),
    "t (at {Held}.part)": lambda part: frozenset([IdentityHeld(part)]),
    "t (at .first.part)": lambda part: Held(Pair(1, part)),
    "t (at .x) with tensors": lambda part: types.SimpleNamespace(first=torch.ones(2), x=part, last=torch.ones(1)),
}


class IdentityHeld(Held):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


HIDDEN = {
    "LocalShards": lambda: LocalShards((4,), {(0,): torch.ones(2)}),
    "PerRank": lambda: PerRank(5),
    "Counter": lambda: Counter(3),
    "Linear": lambda: torch.nn.Linear(1, 1),
    "SGD": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "UninitializedParameter": lambda: torch.nn.LazyLinear(2).weight,
    "Tensor": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_would_be_lost_in_a_value_that_is_stored_whole_is_refused_by_its_path(holder, kind):
    value = HOLDERS[holder](HIDDEN[kind]())
    (problem,) = problems({"a": {"t": value}, "good": (1, torch.ones(2))})
    assert problem.startswith(f"a.t: a {type(value).__name__} is stored as one value; the {kind} in it (at ")
    where = problem.split("(at ")[1].split(")")[0]
    assert part_at(value, where) in (kind, "frozenset")
    with pytest.raises(StateDictError) as caught:
        torchs_plan({"a": {"t": value}})
    assert caught.value.problems == (problem,)


def part_at(value, path):
    """The kind of what Python finds there."""
    if path.startswith("{"):
        return "frozenset"
    return type(eval(f"value{path}", {"value": value})).__name__


def torchs_plan(state):
    """What a planner of the user's that builds on torch's plans."""

    class Theirs(DefaultSavePlanner):
        pass

    planner = Theirs()
    collected = collect_state(state, 0)
    planner.set_up_planner(collected, None, True)
    plan = planner.create_local_plan()
    require_storable(planner, plan, collected)
    return plan


def test_everything_that_is_wrong_is_named_at_once():
    found = problems(
        {
            "tuple": (PerRank(1), 2),
            "rng": PerRank(lambda: None),
            "cursors": [PerRank((Counter(1),))],
            "function": lambda: None,
            "lazy": torch.nn.LazyLinear(2).weight,
            "meta": torch.empty(1, device="meta"),
            "fine": {1, 2},
        }
    )
    starts = [
        "tuple: a tuple is stored as one value; the PerRank in it (at [0]) would be stored by one rank for all",
        "rng: a function that cannot be pickled: ",
        "cursors.0: a tuple is stored as one value; the Counter in it (at [0]) would not be asked for its state_dict()",
        "function: a function that cannot be pickled: ",
        "lazy: a UninitializedParameter has no values before its module's first forward pass",
        "meta: a meta tensor has no values to save",
    ]
    assert [problem[: len(start)] for problem, start in zip(found, starts, strict=True)] == starts


def test_a_value_whose_class_fails_while_it_is_pickled_is_named():
    class Failing:
        def __reduce__(self):
            raise ValueError("not now")

    (problem,) = problems({"a": {"b": [Failing()]}})
    assert problem == "a.b: a list that cannot be pickled: not now"


def test_a_per_rank_value_among_the_values_of_one_name_is_refused():
    """Without names for what is in a dict, one rank's dict is stored for all."""
    planner = StatePlanner(flatten_state_dict=False)
    planner.set_up_planner(collect_state({"a": {"rng": PerRank(1)}}, 0), None, True)
    with pytest.raises(StateDictError, match=r"a: a dict is stored as one value; the PerRank in it \(at \['rng'\]\)"):
        planner.create_local_plan()

    class Theirs(DefaultSavePlanner):
        pass

    state = {"a": [{"rng": PerRank(1)}], "rng": PerRank(2)}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, checkpoint_id="memory://none", planner=Theirs(flatten_state_dict=False), no_dist=True)
    assert [problem.split(": ")[0] for problem in caught.value.__cause__.problems] == ["a.0.rng", "rng"]


@pytest.mark.parametrize("make", [StatePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("key", ["\ud800", "a\udfff"])
def test_a_key_that_is_no_text_is_refused_by_its_name(make, key):
    planner = make()
    state = {"deep": {key: torch.ones(1)}, key: 1, "good": 2}
    planner.set_up_planner(state, None, True)
    with pytest.raises(StateDictError) as caught:
        require_storable(planner, planner.create_local_plan(), state)
    assert caught.value.problems == tuple(
        f"{name!r}: not text that can be stored; give it another key" for name in (f"deep.{key}", key)
    )
    str(caught.value).encode()


class Own(SavePlanner):
    """A planner of the user's own, that knows nothing of torch's."""

    def set_up_planner(self, *args, **kwargs): ...
    def create_local_plan(self): ...
    def create_global_plan(self, all_plans): ...
    def finish_plan(self, new_plan): ...
    def resolve_data(self, write_item): ...


def test_no_planner_at_all_is_given_a_per_rank_value_in_a_tuple():
    for state in ({"t": (1, PerRank(2))}, {"d": {"l": [({"deep": (PerRank(2),)},)]}}):
        with pytest.raises(
            StateDictError, match=r"(t|d\.l\.0\.0\.deep): a tuple is stored as one value; the PerRank in it"
        ):
            require_storable(Own(), SavePlan([]), state)


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


CLASHES = {
    "x.0: state_dict['x'][0] and state_dict['x']['0']": {"x": {0: 1, "0": torch.ones(1)}},
    "a.b: state_dict['a.b'] and state_dict['a']['b']": {"a.b": 1, "a": {"b": 2}},
    "l.0: state_dict['l'][0] and state_dict['l.0']": {"l": [torch.ones(1)], "l.0": 2},
    "x.True: state_dict['x'][True] and state_dict['x']['True']": {"x": {True: 5, "True": 1}},
    "x.__rank_0__: state_dict['x']['__rank_0__'] and state_dict['x.__rank_0__']": {
        "x": PerRank(1),
        "x.__rank_0__": 2,
    },
}


@pytest.mark.parametrize("make", [StatePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("problem", CLASHES)
def test_two_values_of_one_name_are_refused_and_both_places_told(tmp_path, problem, make):
    """Torch's names are paths joined by dots; to keep one of the two would lose the other."""
    state = CLASHES[problem] | {"y": {1: 1, "1": 2}}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, checkpoint_id=tmp_path / "c", planner=make(), no_dist=True)
    assert isinstance(caught.value.__cause__, StateDictError)
    assert caught.value.phase == "plan"
    assert caught.value.__cause__.problems == (problem, "y.1: state_dict['y'][1] and state_dict['y']['1']")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "key", [object(), torch.nn.Parameter(torch.ones(1)), Counter(1)], ids=lambda key: str(type(key))
)
def test_a_key_that_has_another_name_in_every_process_is_refused(key):
    """As in an optimizer's own ``.state``, which has parameters for keys."""
    kind = type(key).__name__
    assert problems({"opt": {"state": {key: {"step": 1}, "fine": 1}}}) == (f"opt.state: a {kind} as key",)
    assert problems({key: 1}) == (f"state_dict: a {kind} as key",)


@pytest.mark.parametrize("make", [StatePlanner, type("Theirs", (DefaultSavePlanner,), {})])
def test_parameters_without_a_shape_are_named_whoever_plans(tmp_path, make):
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d())
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"model": model, "n": 1}, checkpoint_id=tmp_path / "c", planner=make(), no_dist=True)
    names = [problem.split(": a Uninitialized")[0] for problem in caught.value.__cause__.problems]
    assert names == [
        f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    ]
    assert caught.value.phase == "plan"
    assert not (tmp_path / "c").exists()
