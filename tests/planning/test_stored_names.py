"""``only``, ``skip``, ``rename``, and what is said where names do not meet."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

import ray_dcp as dcp
from ray_dcp import CheckpointException, PerRank
from ray_dcp.errors import ConfigError, StateDictError
from ray_dcp.planning.template.near_names import nearest, other_prefix
from tests.protocol.plugins import RenamingLoadPlanner
from tests.ranks import ThreadRanks, require_no_errors

NAN = float("nan")


def load(template, place, **options):
    return dcp.load(template, checkpoint_id=place, no_dist=True, **options)


def refused(template, place, **options) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        load(template, place, **options)
    return caught.value


@pytest.fixture
def saved(tmp_path):
    state = {"model": {"a.weight": torch.ones(2), "a.bias": torch.ones(1), "b.weight": torch.ones(3)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def template():
    model = {"a.weight": torch.zeros(2), "a.bias": torch.zeros(1), "b.weight": torch.zeros(3)}
    return {"model": model, "step": 0}


def filled(state) -> set[str]:
    names = {f"model.{name}" for name, value in state["model"].items() if value.sum()}
    return names | ({"step"} if state["step"] else set())


@pytest.mark.parametrize("rename", [{r"^modle\.": "net."}, lambda name: name])
def test_a_rename_that_fits_no_name_is_named_where_names_are_lacking(saved, caplog, rename):
    wanted = {"net": template()["model"], "step": 0}
    line = (
        "rename: changes no name of the checkpoint"
        if callable(rename)
        else "rename='^modle\\\\.': fits no name of the checkpoint"
    )
    assert line in refused(wanted, saved, rename=rename).__cause__.problems
    load(wanted, saved, rename=rename, strict=False)
    assert line in [one.getMessage() for one in caplog.records]
    assert wanted["step"] == 7


def test_a_rename_that_need_not_change_anything_is_as_good_as_none(saved, caplog):
    wanted = template()
    load(wanted, saved, rename={r"^module\.": ""})
    assert filled(wanted) == {"model.a.weight", "model.a.bias", "model.b.weight", "step"}
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"only": "model"}, {"model.a.weight", "model.a.bias", "model.b.weight"}),
        ({"only": "model.a"}, {"model.a.weight", "model.a.bias"}),
        ({"only": ["*.weight", "step"]}, {"model.a.weight", "model.b.weight", "step"}),
        ({"skip": "model.a.bias"}, {"model.a.weight", "model.b.weight", "step"}),
        ({"only": "model", "skip": ["*.bias", "model.b"]}, {"model.a.weight"}),
        ({"skip": "mod*"}, {"step"}),
    ],
)
def test_only_what_is_chosen_is_loaded_and_nothing_else_counts(saved, options, names):
    state = template()
    report = load(state, saved, strict="exact", **options)
    assert filled(state) == set(report.loaded) == names
    assert report.missing == report.unexpected == ()


def test_a_name_is_no_prefix_of_a_longer_word(saved):
    dcp.save({"ab": 1, "a": 2, "a.c": 3}, checkpoint_id=saved / "d", no_dist=True)
    assert load({"ab": 0, "a": 0, "a.c": 0}, saved / "d", only="a").loaded == ("a", "a.c")


def test_what_is_left_out_may_be_missing_or_of_another_shape(saved):
    state = template()
    state["model"] |= {"a.bias": torch.zeros(9), "new": torch.zeros(2)}
    load(state, saved, skip=["model.a.bias", "model.new"])
    assert filled(state) == {"model.a.weight", "model.b.weight", "step"}


def test_a_stateful_that_is_left_out_is_left_alone(saved):
    class Untouchable:
        def state_dict(self):
            return {"a.weight": torch.zeros(2)}

        def load_state_dict(self, state_dict):
            raise AssertionError("it was to be skipped")

    load({"model": Untouchable(), "step": 0}, saved, skip="model")


@pytest.mark.parametrize("setting", ["only", "skip"])
def test_a_pattern_that_fits_nothing_is_refused_by_name(saved, setting):
    error = refused(template(), saved, **{setting: ["model", "optm"]})
    assert error.__cause__.problems == (f"{setting}='optm': fits no name of the template or the checkpoint",)


@pytest.mark.parametrize(
    "options",
    [
        {"only": []},
        {"only": [""]},
        {"skip": [3]},
        {"only": 5},
        {"skip": b"w"},
        {"rename": {"(": ""}},
        {"rename": {"a": r"\1"}},
        {"rename": "model"},
    ],
    ids=str,
)
def test_bad_patterns_name_the_setting(saved, options):
    cause = refused(template(), saved, **options).__cause__
    assert isinstance(cause, ConfigError)
    assert cause.setting == next(iter(options))


def test_a_users_planner_chooses_by_itself(saved):
    assert refused(template(), saved, only="model", planner=RenamingLoadPlanner()).__cause__.setting == "only"


@pytest.mark.parametrize("reader", [None, FileSystemReader])
def test_a_users_planner_sees_the_new_names(tmp_path, reader):
    class UsersPlanner(DefaultLoadPlanner):
        pass

    dcp.save({"module.w": torch.ones(3), "module.n": 5}, checkpoint_id=tmp_path, no_dist=True)
    options = {"storage_reader": reader(tmp_path)} if reader else {}
    state = {"w": torch.zeros(3), "n": 0}
    load(state, tmp_path, planner=UsersPlanner(), rename={r"^module\.": ""}, **options)
    assert (state["w"].tolist(), state["n"]) == ([1, 1, 1], 5)


@pytest.mark.parametrize(
    ("prefix", "rename"),
    [
        ("module.", {r"^model\.module\.": "model."}),
        ("_orig_mod.", {"_orig_mod.": ""}),
        ("module._orig_mod.", lambda fqn: fqn.replace("module._orig_mod.", "")),
    ],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_names_that_a_wrapper_has_changed_are_loaded_by_rename(tmp_path, prefix, rename, world_size):
    values = {"w": torch.arange(3 << 18, dtype=torch.float32), "n": 5}
    dcp.save({"model": {prefix + name: value for name, value in values.items()}}, checkpoint_id=tmp_path, no_dist=True)
    templates = [{"model": {"w": torch.full((3 << 18,), NAN), "n": 0}} for _ in range(world_size)]
    reports = ThreadRanks(world_size).load(templates, tmp_path, rename=rename, strict="exact")
    for state, report in zip(templates, require_no_errors(reports), strict=True):
        assert torch.equal(state["model"]["w"], values["w"])
        assert (state["model"]["n"], report.loaded) == (5, ("model.n", "model.w"))


def test_a_renamed_value_goes_into_an_empty_place_under_its_new_name(tmp_path):
    dcp.save({"net": {"module.l.w": torch.ones(2), "module.l.b": [1]}}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": {}}
    load(state, tmp_path, rename={r"^net\.module\.": "model."})
    assert state["model"].keys() == {"l.w", "l.b"}
    assert (state["model"]["l.w"].tolist(), state["model"]["l.b"]) == ([1, 1], [1])


def test_two_names_that_become_one_are_refused_with_both(tmp_path):
    dcp.save({"a": {"w": 1}, "b": {"w": 2}}, checkpoint_id=tmp_path, no_dist=True)
    error = refused({"w": 0}, tmp_path, rename={r"^[ab]\.": ""})
    assert isinstance(error.__cause__, StateDictError)
    assert error.__cause__.problems == ("w: the name of 'a.w', 'b.w'",)


class TestAdvice:
    """What is said to somebody whose names are others than the checkpoint's."""

    @pytest.mark.parametrize(
        ("stored", "wanted", "rename"),
        [("model.module.", "model.", r'{r"^model\.module\.": "model."}'), ("", "model.", r'{r"^": "model."}')],
    )
    @pytest.mark.parametrize("strict", [True, False])
    def test_another_prefix_is_named_with_the_rename_that_helps(self, tmp_path, stored, wanted, rename, strict):
        names = [f"layers.{n}.weight" for n in range(3)]
        dcp.save({stored + name: torch.ones(1) for name in names}, checkpoint_id=tmp_path, no_dist=True)
        state = {wanted + name: torch.full((1,), NAN) for name in names}
        error = refused(state, tmp_path, strict=strict)
        assert (
            f"3 of 3 missing names are in the checkpoint with another beginning: did you mean rename={rename}?"
            in str(error)
        )
        assert "strict=False" not in str(error)
        assert f"'{stored}layers.0.weight'" in str(error)
        assert all(bool(value.isnan().all()) for value in state.values())
        load(state, tmp_path, rename=eval(rename))
        assert all(bool((value == 1).all()) for value in state.values())

    def test_a_misspelt_name_gets_the_nearest_one(self, saved):
        state = template()
        state["stepp"] = state.pop("step")
        (problem,) = refused(state, saved).__cause__.problems
        assert problem == "stepp: Missing key: not in the checkpoint; did you mean 'step'?"

    def test_a_load_that_fills_nothing_is_an_error_also_when_the_rest_may_be_missing(self, saved):
        state = {"zzz": torch.zeros(1), "loader": {}}
        error = refused(state, saved, strict=False)
        assert "No name of the template is in it" in str(error)
        assert "'loader', 'zzz'" in str(error)
        assert "'model.a.bias'" in str(error)

    def test_a_rank_may_find_nothing_where_another_does(self, saved):
        templates = [{"step": 0}, {"other": 1}, {}]
        require_no_errors(ThreadRanks(3).load(templates, saved, strict=False))
        assert templates == [{"step": 7}, {"other": 1}, {}]

    def test_tens_of_thousands_of_names_take_no_more_than_moments(self):
        names = {f"model.layers.{n}.{m}.weight" for n in range(6_000) for m in ("q", "k", "v", "up", "down")}
        started = time.process_time()
        found = other_prefix({f"module.{name}" for name in names}, names)
        near = nearest({"model.layers.7.q.wight", "nothing like it"}, names)
        assert time.process_time() - started < 10
        assert (found.stored, found.wanted, found.num_found) == ("", "module.", len(names))
        assert len(near) <= 1


class TestPerRank:
    """A ``PerRank`` goes by its own name in every message."""

    @pytest.fixture
    def ranks(self, tmp_path):
        ranks = ThreadRanks(2)
        require_no_errors(ranks.save(lambda rank: {"x": PerRank(rank), "y": 1}, tmp_path / "c"))
        return ranks

    def test_exact_refuses_one_that_no_template_has(self, ranks, tmp_path):
        outcomes = ranks.load([{"y": 0}, {"y": 0}], tmp_path / "c", strict="exact")
        assert outcomes[0].__cause__.problems == ('x: in the checkpoint, but not in the template (strict="exact")',)
        require_no_errors(ranks.load([{"y": 0, "x": PerRank(0)} for _ in range(2)], tmp_path / "c", strict="exact"))

    def test_a_plain_value_in_its_place_is_told_what_to_do(self, ranks, tmp_path):
        outcomes = ranks.load([{"x": 0, "y": 0}, {"x": 0, "y": 0}], tmp_path / "c")
        assert outcomes[0].__cause__.problems == (
            "x: the checkpoint holds a value of each of 2 ranks, the template one for all: pass a PerRank",
        )

    def test_one_in_place_of_a_plain_value_is_too(self, ranks, tmp_path):
        outcomes = ranks.load([{"y": PerRank(0)}, {"y": 0}], tmp_path / "c")
        assert outcomes[0].__cause__.problems == (
            "y: the checkpoint holds one value for all ranks, the template a PerRank: pass the value (rank 0)",
        )

    def test_one_that_the_checkpoint_lacks_is_missing_by_its_name(self, ranks, tmp_path):
        templates = [{"z": PerRank(0), "y": 0}, {"z": PerRank(0), "y": 0}]
        (problem,) = ranks.load(templates, tmp_path / "c")[0].__cause__.problems
        assert problem.startswith("z: Missing key: not in the checkpoint")
