"""Empty dicts and lists, and an empty state dict: saved, loaded by ray_dcp and by torch, and converted."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp.maintenance.verify.verification import plan_verify, verify_checkpoint
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Nothing:
    """A ``Stateful`` that has no state."""

    loaded = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.loaded = state


def state(none):
    return {
        "opt": {"state": {}, "param_groups": [{"lr": 0.1, "params": [], "more": {}}]},
        "list": [],
        "lists": [[], [[], None], 1],
        "deep": {"er": [{}, {"w": torch.ones(2)}, []]},
        "ordered": OrderedDict(),
        "default": defaultdict(list),
        "metrics": {},
        "schedule": {"last": 3},
        "none": none,
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_template_with_empty_dicts_and_lists_has_them_afterwards(tmp_path, mode):
    if mode == "sync":
        dcp.save(state(Nothing()), checkpoint_id=tmp_path, no_dist=True)
    else:
        dcp.async_save(state(Nothing()), checkpoint_id=tmp_path, no_dist=True).upload_completion.result()
    template = state(Nothing())
    template["schedule"]["last"] = template["list"] = None
    template["deep"]["er"][1]["w"].zero_()
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True, strict="exact")
    assert template["none"].loaded == {}
    template["none"] = None
    assert repr(template) == repr(state(None))


def test_stock_torch_loads_them_as_its_own(tmp_path):
    """A stored value under the name of an empty dict would be taken for one of torch's format before 2.4."""

    def without_empty_entries():
        of_torch = state({})
        of_torch["deep"]["er"][0] = 5  # torch cannot load an empty dict in a list, whoever saved it
        return of_torch

    dcp.save(without_empty_entries(), checkpoint_id=tmp_path, no_dist=True)
    template = without_empty_entries()
    template["schedule"]["last"] = None
    template["deep"]["er"][1]["w"].zero_()
    torch_dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert repr(template) == repr(without_empty_entries())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["nothing", "statefuls"])
def test_an_empty_state_dict_is_saved_with_a_warning_and_loads(tmp_path, caplog, kind, world_size):
    def state_of(rank):
        return {} if kind == "nothing" else {"a": Nothing(), "b": {"c": Nothing()}}

    require_no_errors(ThreadRanks(world_size).save(state_of, tmp_path / "c"))
    (warning,) = caplog.records
    assert warning.getMessage() == f"{tmp_path / 'c'}: the state dict is empty on every rank"
    templates = [state_of(rank) for rank in range(2)]
    require_no_errors(ThreadRanks(2).load(templates, tmp_path / "c", strict="exact"))
    if kind == "statefuls":
        assert templates[1]["b"]["c"].loaded == {}
    torch_dcp.load({}, checkpoint_id=tmp_path / "c", no_dist=True)
    report = verify_checkpoint(plan_verify(tmp_path / "c"))
    assert (report.num_items, report.faults) == (0, [])


def test_a_rank_without_values_among_others_is_nothing_to_warn_of(tmp_path, caplog):
    require_no_errors(ThreadRanks(2).save(lambda rank: {"w": torch.ones(1)} if rank else {}, tmp_path / "c"))
    assert not caplog.records


@pytest.mark.parametrize("strict", [True, False, "exact"])
def test_an_empty_template_of_every_rank_is_refused_with_what_to_pass(tmp_path, strict):
    dcp.save({"model": {"w": torch.ones(1)}, "step": 1}, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    says = r"The state dict that was passed is empty.*pass a template, such as \{'model': \{\}, 'step': \{\}\}"
    with pytest.raises(dcp.CheckpointException, match=says):
        dcp.load({}, checkpoint_id=tmp_path / "step-00000001", no_dist=True, strict=strict)
    with pytest.raises(dcp.CheckpointException, match=says):
        dcp.CheckpointManager(tmp_path).load({}, strict=strict)
    filled: dict = {"model": {}}
    dcp.load(filled, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert filled["model"]["w"].tolist() == [1]


def test_ranks_may_pass_an_empty_template_while_another_loads(tmp_path):
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    templates: list[dict] = [{}, {"w": torch.zeros(1)}, {}]
    ranks = ThreadRanks(3)
    require_no_errors(
        ranks.run(lambda rank: dcp.load(templates[rank], checkpoint_id=tmp_path, group=ThreadGroup(ranks, rank)))
    )
    assert templates[1]["w"].tolist() == [1]
    assert templates[0] == {}
    outcomes = ranks.run(
        lambda rank: dcp.load({"v": 0} if rank == 1 else {}, checkpoint_id=tmp_path, group=ThreadGroup(ranks, rank))
    )
    assert all("v: Missing key: not in the checkpoint" in str(outcome) for outcome in outcomes), outcomes
