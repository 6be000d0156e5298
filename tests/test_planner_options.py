"""torch's default planners, as such and subclassed: every option counts, and they have afterwards what torch leaves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import ray_dcp as dcp
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class OwnLoadPlanner(DefaultLoadPlanner):
    pass


class OwnSavePlanner(DefaultSavePlanner):
    pass


BOTH_LIBRARIES = pytest.mark.parametrize("library", [torch_dcp, dcp], ids=["torch", "ray_dcp"])
LOAD_PLANNERS = pytest.mark.parametrize("kind", [DefaultLoadPlanner, OwnLoadPlanner])
SAVE_PLANNERS = pytest.mark.parametrize("kind", [DefaultSavePlanner, OwnSavePlanner])


def state():
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "n": 5}, "top": torch.ones(2)}


def template():
    return {"model": {"w": torch.full((2, 3), float("nan")), "n": 0}, "top": torch.full((2,), float("nan"))}


@pytest.fixture
def saved(tmp_path):
    torch_dcp.save(state(), checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


@BOTH_LIBRARIES
@LOAD_PLANNERS
def test_a_load_planner_that_allows_it_leaves_out_what_the_checkpoint_lacks(saved, library, kind):
    more = template() | {"more": torch.full((2,), 7.0)}
    more["model"]["extra"] = "kept"
    library.load(more, checkpoint_id=saved, planner=kind(allow_partial_load=True), no_dist=True)
    assert same_bits(more["model"]["w"], state()["model"]["w"])
    assert (more["model"]["n"], more["model"]["extra"], more["more"].tolist()) == (5, "kept", [7, 7])


@BOTH_LIBRARIES
@LOAD_PLANNERS
def test_one_that_does_not_refuses(saved, library, kind):
    more = template() | {"more": torch.full((2,), 7.0)}
    with pytest.raises(library.CheckpointException, match="more"):
        library.load(more, checkpoint_id=saved, planner=kind(), no_dist=True)


def test_what_is_said_at_the_call_counts_above_the_planner(saved):
    more = template() | {"more": 1}
    report = dcp.load(more, checkpoint_id=saved, planner=DefaultLoadPlanner(), strict=False, no_dist=True)
    assert report.missing == ("more",)
    with pytest.raises(dcp.CheckpointException, match="more"):
        dcp.load(more, checkpoint_id=saved, planner=DefaultLoadPlanner(allow_partial_load=True), strict="exact")


@BOTH_LIBRARIES
@LOAD_PLANNERS
def test_a_flat_load_planner_takes_the_names_as_they_are(saved, library, kind):
    flat = {"model.w": torch.full((2, 3), float("nan")), "model.n": 0}
    planner = kind(flatten_state_dict=False, flatten_sharded_tensors=False)
    library.load(flat, checkpoint_id=saved, planner=planner, no_dist=True)
    assert same_bits(flat["model.w"], state()["model"]["w"])
    assert flat["model.n"] == 5


@BOTH_LIBRARIES
@LOAD_PLANNERS
def test_a_load_planner_has_afterwards_what_torch_leaves_on_it(saved, library, kind):
    planner, filled = kind(), template()
    library.load(filled, checkpoint_id=saved, planner=planner, no_dist=True)
    assert set(planner.metadata.state_dict_metadata) == {"model.w", "model.n", "top"}
    assert planner.state_dict.keys() == {"model.w", "model.n", "top"}
    assert planner.state_dict["model.w"] is filled["model"]["w"]
    assert planner.mappings == {"model.w": ("model", "w"), "model.n": ("model", "n"), "top": ("top",)}
    assert planner.original_state_dict.keys() == {"model", "top"}
    assert planner.is_coordinator


@BOTH_LIBRARIES
@SAVE_PLANNERS
def test_a_save_planner_has_afterwards_what_torch_leaves_on_it(tmp_path, library, kind):
    planner, given = kind(), state()
    metadata = library.save(given, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert planner.state_dict.keys() == {"model.w", "model.n", "top"}
    assert planner.state_dict["model.w"] is given["model"]["w"]
    assert planner.mappings == {"model.w": ("model", "w"), "model.n": ("model", "n"), "top": ("top",)}
    assert {item.index.fqn for item in planner.plan.items} == {"model.w", "model.n", "top"}
    assert [len(plan.items) for plan in planner.global_plan] == [3]
    assert planner.metadata.state_dict_metadata == metadata.state_dict_metadata
    assert planner.is_coordinator


@SAVE_PLANNERS
def test_so_it_is_on_several_ranks(tmp_path, kind):
    planners = [kind(), kind()]
    ranks = ThreadRanks(2)
    one_row = [{"t": dcp.LocalShards((2, 3), {(rank, 0): torch.ones(1, 3)}), "n": 5} for rank in range(2)]
    saved = require_no_errors(
        ranks.run(lambda rank: ranks.save_rank(rank, one_row[rank], tmp_path / "c", planner=planners[rank]))
    )
    assert [planner.is_coordinator for planner in planners] == [True, False]
    assert sorted(item.index.fqn for planner in planners for item in planner.plan.items) == ["n", "t", "t"]
    assert planners[0].metadata.state_dict_metadata == saved[0].state_dict_metadata
    assert not hasattr(planners[1], "metadata")


def planned_by(library, folder, planner):
    library.save(state(), checkpoint_id=folder, planner=planner, no_dist=True)
    return sorted(torch_dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


@BOTH_LIBRARIES
@SAVE_PLANNERS
@pytest.mark.parametrize(
    "options",
    [
        {"flatten_state_dict": False},
        {"flatten_sharded_tensors": False},
        {"dedup_save_to_lowest_rank": True},
        {"dedup_replicated_tensors": True},
        {"enable_plan_caching": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_option_of_a_save_planner_is_taken(tmp_path, library, kind, options):
    for attempt in range(2):  # the second one is what a plan that was kept would show in
        names = planned_by(library, tmp_path / str(attempt), kind(**options))
        assert names == (["model", "top"] if "flatten_state_dict" in options else ["model.n", "model.w", "top"])
    loaded = template()
    if "flatten_state_dict" not in options:
        library.load(loaded, checkpoint_id=tmp_path / "1", no_dist=True)
        assert same_bits(loaded["model"]["w"], state()["model"]["w"])


@pytest.fixture(autouse=True)
def no_plan_of_another_test():
    kept = ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan")
    for name in kept:
        getattr(SavePlanner, f"_cached_{name}").clear()
    yield
    for name in kept:
        getattr(SavePlanner, f"_cached_{name}").clear()


@SAVE_PLANNERS
@pytest.mark.parametrize("lowest", [False, True])
def test_the_lowest_rank_saves_what_all_have_where_that_is_asked_for(tmp_path, kind, lowest):
    everywhere = {f"t{n}": torch.full((1000,), float(n)) for n in range(4)}
    ranks = ThreadRanks(2)
    planners = [kind(dedup_save_to_lowest_rank=lowest) for _ in range(2)]
    require_no_errors(ranks.run(lambda rank: ranks.save_rank(rank, everywhere, tmp_path / "c", planner=planners[rank])))
    assert [len(planner.plan.items) for planner in planners] == ([4, 0] if lowest else [2, 2])
