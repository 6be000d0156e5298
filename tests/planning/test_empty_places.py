"""A template that is still empty gets what the checkpoint has there, whole and in the containers that were saved."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, PerRank
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BY_BOTH = pytest.mark.parametrize("saved_by", [dcp, torch_dcp], ids=lambda module: module.__name__)


def load(template, place, **options):
    return dcp.load(template, checkpoint_id=place, no_dist=True, **options)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@BY_BOTH
def test_an_optimizer_before_its_first_step_goes_on_as_if_it_had_made_it(tmp_path, saved_by):
    model, optimizer = trained()
    saved_by.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    other = torch.nn.Linear(3, 2)
    fresh = torch.optim.Adam(other.parameters(), lr=0.5)
    report = load({"model": other, "optim": fresh}, tmp_path)
    assert report.unexpected == report.missing == ()
    for one, its in ((model, optimizer), (other, fresh)):
        its.zero_grad()
        one(torch.full((1, 3), 2.0)).sum().backward()
        its.step()
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert fresh.state_dict()["state"].keys() == {0, 1}


@BY_BOTH
@pytest.mark.parametrize("empty", [{}, None])
def test_an_optimizer_below_an_empty_place_keeps_its_numbers(tmp_path, saved_by, empty):
    _, optimizer = trained()
    saved_by.save({"app": {"optim": optimizer.state_dict()}}, checkpoint_id=tmp_path, no_dist=True)
    template = {"app": copy.copy(empty)}
    load(template, tmp_path)
    assert template["app"]["optim"]["state"].keys() == {0, 1}
    torch.optim.Adam(torch.nn.Linear(3, 2).parameters()).load_state_dict(template["app"]["optim"])


NESTED = {"pos": 3, "name": "x", "deep": {"w": torch.arange(6.0).reshape(2, 3), "flags": [True, None]}, "t": (1, [2])}
LISTED = [{"a": 1, "w": torch.ones(2, dtype=torch.bfloat16)}, {"a": 2, "w": torch.zeros(0)}]


@BY_BOTH
@pytest.mark.parametrize(
    ("value", "empty"),
    [(NESTED, {}), (NESTED, None), (LISTED, []), (LISTED, None), (torch.arange(3), None)],
    ids=["dict", "dict for None", "list", "list for None", "tensor for None"],
)
def test_containers_come_back_as_they_were_saved(tmp_path, saved_by, value, empty):
    saved_by.save({"x": value, "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    template = {"x": (empty := copy.copy(empty)), "n": 0}
    report = load(template, tmp_path, strict="exact")
    assert equal(template["x"], value)
    assert empty is None or template["x"] is empty
    assert report.missing == report.unexpected == ()


def equal(a, b) -> bool:
    if isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(b, dict):
        return type(a) is dict and list(a) == list(b) and all(equal(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_an_empty_container_that_was_saved_stays_empty(tmp_path):
    dcp.save({"x": [], "w": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    template = {"x": [], "w": torch.zeros(1)}
    load(template, tmp_path, strict="exact")
    assert template == {"x": [], "w": torch.ones(1)}


@pytest.mark.parametrize("empty", [{}, None])
@pytest.mark.parametrize("rename", [None, {"^app": "other"}], ids=["same name", "renamed"])
def test_keys_and_kinds_of_dicts_come_back_from_the_manifest(tmp_path, empty, rename):
    saved = {
        "ints": {0: {"m": 1}, 10: {"m": 2}},
        "ordered": OrderedDict(b=1, a=2),
        "nothing": {},
        "deep": [{"x": {}}, {7: True}],
        "mixed": {1: "one", "two": 2},
    }
    dcp.save({"app": saved, "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    name = "other" if rename else "app"
    template = {name: copy.copy(empty), "n": 0}
    load(template, tmp_path, rename=rename)
    assert template == {name: saved, "n": 1}
    assert type(template[name]["ordered"]) is OrderedDict


def test_none_becomes_the_empty_dict_that_was_saved(tmp_path):
    dcp.save({"x": {}, "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    template = {"x": None, "n": 0}
    load(template, tmp_path)
    assert template == {"x": {}, "n": 1}


def test_what_does_not_go_into_an_empty_place_is_reported(tmp_path):
    dcp.save({"x": {"a": 1, "w": torch.ones(1)}, "n": 1}, checkpoint_id=tmp_path, no_dist=True)
    template = {"x": {"a": 0, "deeper": {}}, "n": 0}
    report = load(template, tmp_path, strict=False)
    assert (report.unexpected, report.missing) == (("x.w",), ("x.deeper",))
    assert template == {"x": {"a": 1, "deeper": {}}, "n": 1}


def test_an_empty_dict_that_was_never_saved_is_missing_as_far_as_the_checkpoint_tells(tmp_path):
    for saved_by, place in ((dcp, tmp_path / "ours"), (torch_dcp, tmp_path / "torchs")):
        saved_by.save({"loader": {}, "n": 1}, checkpoint_id=place, no_dist=True)
        load({"loader": {}, "n": 0}, place, strict="exact")
    load({"loder": {}, "n": 0}, tmp_path / "torchs")
    with pytest.raises(CheckpointException, match="loder: Missing key"):
        load({"loder": {}, "n": 0}, tmp_path / "ours")
    assert load({"loader": {}}, tmp_path / "ours").loaded == ()


def test_a_template_is_as_empty_as_before_when_the_load_is_refused(tmp_path):
    dcp.save({"x": NESTED, "l": LISTED, "w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    template = {"x": {}, "l": [], "none": None, "w": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(template, tmp_path, strict=False)
    assert (template["x"], template["l"], template["none"], template["w"].tolist()) == ({}, [], None, [0, 0, 0])


def test_each_rank_that_asks_gets_whole_tensors_and_its_own_values(tmp_path):
    def state(rank):
        rows = LocalShards((4, 2), {(2 * rank, 0): torch.full((2, 2), float(rank))})
        return {"loader": {"rows": rows, "cursor": PerRank(10 + rank)}, "n": 1}

    ranks = ThreadRanks(2)
    require_no_errors(ranks.save(state, tmp_path / "c"))
    templates = [{"loader": {}, "n": 0}, {"n": 0}]
    reports = require_no_errors(ranks.load(templates, tmp_path / "c"))
    loader = templates[0]["loader"]
    assert loader["rows"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert (type(loader["cursor"]), loader["cursor"].value) == (PerRank, 10)
    assert templates[1] == {"n": 1}
    assert reports[0].unexpected == ()


def test_per_rank_values_of_another_number_of_ranks_stay_out_and_are_named(tmp_path):
    require_no_errors(ThreadRanks(2).save(lambda rank: {"x": {"c": PerRank(rank), "n": 1}}, tmp_path / "c"))
    (template,) = ({"x": {}},)
    (report,) = require_no_errors(ThreadRanks(1).load([template], tmp_path / "c"))
    assert template == {"x": {"n": 1}}
    assert report.unexpected == ("x.c",)


def test_where_only_values_of_other_ranks_would_go_a_per_rank_is_asked_for(tmp_path):
    state = {"w": torch.ones(1)}
    require_no_errors(ThreadRanks(2).save(lambda rank: {"loader": {"at": PerRank(rank)}, **state}, tmp_path))
    template = {"loader": {}, "w": torch.zeros(1)}
    (error,) = ThreadRanks(1).load([template], tmp_path)
    (problem,) = error.__cause__.problems
    assert problem.startswith("loader: Missing key: loader.at has a value of each of 2 ranks, and none for this number")
    assert template == {"loader": {}, "w": torch.zeros(1)}
