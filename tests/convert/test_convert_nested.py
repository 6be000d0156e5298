"""A converted state dict is the one that was saved: its keys, its empty dicts, an optimizer that goes on with it."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.convert.conversion import convert
from ray_dcp.convert.conversion_plan import ConvertOptions, plan_convert
from ray_dcp.errors import StateDictError
from tests.planning.test_containers import same
from tests.ranks import ThreadRanks, require_no_errors

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def run(source, dest, **options):
    convert(plan_convert(source, dest, ConvertOptions(**options)))
    return dest


def state():
    return {
        "opt": {"state": {0: {"m": torch.ones(2)}, 1: {"m": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "x": {}}]},
        "sgd": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "ordered": OrderedDict([("z", 1), ("a", torch.ones(1))]),
        "mixed": {"a": 1, 1: 2, None: 3, (1, "x"): torch.ones(1), False: {}},
        "lists": [{}, {5: [{}, torch.ones(1)]}, []],
        "empty": {},
        "t": (1, {2: 3}),
    }


@pytest.mark.parametrize("source", ["dcp", "several ranks", "a user's planner", "torch", "dcp of dcp", "dcp of torch"])
def test_a_torch_file_has_the_state_dict_that_was_saved(tmp_path, source):
    place = tmp_path / "source"
    if source == "several ranks":
        require_no_errors(ThreadRanks(3).save(lambda rank: state(), place))
    elif source == "a user's planner":

        class Theirs(torch_dcp.DefaultSavePlanner):
            pass

        dcp.save(state(), checkpoint_id=place, planner=Theirs(), no_dist=True)
    elif source.endswith("torch"):
        torch.save(state(), place)
    else:
        dcp.save(state(), checkpoint_id=place, no_dist=True)
    if source.startswith("dcp of"):
        place = run(place, tmp_path / "between", to="dcp")
    found = torch.load(run(place, tmp_path / "out.pt"), weights_only=True)
    assert same(found, state())


def trained(make):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = make(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().sum().backward()
    optimizer.step()


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize(
    ("kind", "writer"),
    [("adam", "ours"), ("sgd", "ours"), ("momentum", "ours"), ("adam", "torch's"), ("momentum", "torch's")],
)
def test_an_optimizer_goes_on_with_a_converted_state_bit_for_bit(tmp_path, kind, writer):
    """Of a checkpoint without ray_dcp's manifest by the layout of torch's optimizers.

    There the empty state of plain SGD is lost: torch stores nothing of it.
    """
    model, optimizer = trained(OPTIMIZERS[kind])
    save = dcp.save if writer == "ours" else torch_dcp.save
    save({"m": model.state_dict(), "o": {"opt": optimizer.state_dict()}}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = torch.load(run(tmp_path / "c", tmp_path / "out.pt"), weights_only=True)
    other, its_optimizer = trained(OPTIMIZERS[kind])
    for parameter in other.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    its_optimizer = OPTIMIZERS[kind](other.parameters())
    other.load_state_dict(found["m"])
    its_optimizer.load_state_dict(found["o"]["opt"])
    for _ in range(2):
        step(model, optimizer)
        step(other, its_optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_numbers_whose_records_begin_at_one_place_are_not_one_memory(tmp_path):
    values = {f"p{n}": torch.tensor(float(n)) for n in range(5)} | {f"q{n}": torch.arange(4.0) + n for n in range(5)}
    dcp.save(values, checkpoint_id=tmp_path / "c", no_dist=True)
    found = torch.load(run(tmp_path / "c", tmp_path / "out.pt"), weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert len({value.data_ptr() for value in found.values()}) == len(values)


def test_names_that_change_are_the_keys_and_what_is_left_out_stays_out(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    found = torch.load(run(tmp_path / "c", tmp_path / "a.pt", add_prefix="x."), weights_only=True)
    assert found["x.opt.state.0.m"].tolist() == [1, 1]
    found = torch.load(run(tmp_path / "c", tmp_path / "b.pt", include=["opt.*"]), weights_only=True)
    assert same(found, {"opt": state()["opt"]})
    found = torch.load(run(tmp_path / "c", tmp_path / "d.pt", exclude=["opt.*", "sgd*", "mixed*"]), weights_only=True)
    assert found.keys() == {"ordered", "lists", "empty", "t"}


def test_a_torch_file_with_two_keys_of_one_name_is_refused_and_both_told(tmp_path):
    torch.save({"x": {0: 1, "0": 2}}, tmp_path / "a.pt")
    with pytest.raises(StateDictError, match=r"a\.pt: two values have one name") as caught:
        plan_convert(tmp_path / "a.pt", tmp_path / "c", ConvertOptions(to="dcp"))
    assert caught.value.problems == ("x.0: state_dict['x'][0] and state_dict['x']['0']",)


def test_tied_weights_of_a_checkpoint_are_tied_in_a_torch_file(tmp_path):
    w, shards = torch.arange(50_000.0), {(0,): torch.ones(5), (5,): torch.zeros(5)}
    state = {"a": w, "b": {"c": w, "d": w.clone()}, "s": dcp.LocalShards((10,), shards), "t": w[:10], "n": 1}
    state |= {"step": torch.tensor(3.0), "steps": [torch.tensor(3.0)]}  # equal, and each another's
    state["few"] = dcp.LocalShards((4,), {(0,): torch.ones(2), (2,): torch.ones(2)})
    state["fewer"] = dcp.LocalShards((4,), {(0,): torch.ones(2), (2,): torch.ones(2)})
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found = torch.load(run(tmp_path / "c", tmp_path / "out.pt"), weights_only=True)
    assert found["a"] is found["b"]["c"]
    assert torch.equal(found["a"], w)
    assert torch.equal(found["b"]["d"], w)
    assert found["s"].tolist() == [1] * 5 + [0] * 5
    assert found["step"].data_ptr() != found["steps"][0].data_ptr()
    assert found["few"].data_ptr() != found["fewer"].data_ptr()
    assert found["few"].tolist() == found["fewer"].tolist() == [1] * 4
    assert 2 * w.nbytes < (tmp_path / "out.pt").stat().st_size < 2.1 * w.nbytes


def test_an_ordered_dict_as_the_whole_state_is_one_again(tmp_path):
    model = torch.nn.Linear(2, 3)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "c", no_dist=True)
    assert type(torch.load(run(tmp_path / "c", tmp_path / "out.pt"), weights_only=True)) is OrderedDict


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_tensors_come_over_whatever_python_value_holds_them(tmp_path, to):
    weight = torch.arange(6.0)
    rotated, other = (torch.tensor([1 + 2j, 3 - 1j]).conj() for _ in range(2))
    saved = {
        "queue": deque([weight, weight[2:4]]),
        "names": SimpleNamespace(inner=SimpleNamespace(t=weight[1:2])),
        "array": np.array([weight[4:], None], dtype=object),
        "slice": slice(weight[:1], None),
        "parameter": (torch.nn.Parameter(weight[3:]),),
        "views": (rotated, other.imag),
        "rotated": rotated,
        "imaginary": other.imag,
    }
    torch.save(saved, tmp_path / "in.pt")
    out = run(tmp_path / "in.pt", tmp_path / "out", to=to)
    if to == "dcp":
        found = dict.fromkeys(saved)
        dcp.load(found, checkpoint_id=out, no_dist=True)
    else:
        found = torch.load(out, weights_only=False)
    assert repr(found) == repr(saved)
    assert torch.equal(found["rotated"], rotated)
    assert torch.equal(found["views"][1], other.imag)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.ones(2, device="meta"), "x: a meta tensor has no values"),
        (deque([torch.ones(2, device="meta")]), "x: in a deque, a meta tensor has no values"),
        ((torch.ones(2).to_sparse(),), "x: in a tuple, a tensor of layout torch.sparse_coo has no rectangular values"),
        ((torch.ones(2).untyped_storage(),), "x: in a tuple, a storage without its tensor"),
        ({"\ud800": 1}, "'x.\\ud800': not text that can be stored; give it another key"),
    ],
)
def test_what_a_torch_file_has_no_values_for_is_refused_by_name_and_leaves_nothing(tmp_path, value, problem):
    torch.save({"x": value, "ok": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(StateDictError) as caught:
        run(tmp_path / "in.pt", tmp_path / "out", to="dcp")
    assert caught.value.problems == (problem,)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: (1, {"g": one})], ids=["alone", "in a value"])
def test_a_generator_in_a_torch_save_file_is_refused_with_what_to_do(tmp_path, wrap):
    """Tensors are read one by one, so there is nothing to make it of yet. It is no question of trust."""
    torch.save({"w": torch.ones(2), "g": wrap(torch.Generator())}, tmp_path / "f.pt")
    with pytest.raises(StateDictError, match=r"f\.pt: it holds a torch\.Generator.*; save its get_state\(\)") as caught:
        run(tmp_path / "f.pt", tmp_path / "c", to="dcp")
    assert "trusted" not in str(caught.value)
    torch.save({"w": torch.ones(2), "g": wrap(torch.Generator().get_state())}, tmp_path / "f.pt")
    run(tmp_path / "f.pt", tmp_path / "c", to="dcp")
