"""Tensors that are one memory under several names: stored once, and each name has its value, whatever the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import LocalShards
from ray_dcp.catalog.facts import describe
from ray_dcp.maintenance.verify.verification import plan_verify, verify_checkpoint
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NBYTES = 1 << 20


def large(seed):
    return torch.arange(NBYTES // 4, dtype=torch.float32).reshape(-1, 64) + seed


def stored_nbytes(folder):
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(".distcp"))


def records(metadata):
    return {index.fqn: (info.relative_path, info.offset) for index, info in metadata.storage_data.items()}


def tied_state(rank=0):
    """One memory under four names, and others that only look like it."""
    w = large(1)
    return {
        "embedding.weight": w,
        "head": {"weight": torch.nn.Parameter(w), "detached": w.detach()},
        "again": [w.view_as(w)],
        "transposed": w.t(),
        "first row": w[0],
        "as numbers": w.view(torch.int32),
        "conjugate": w.view(torch.complex64),
        "conjugated": w.view(torch.complex64).conj(),
        "own": w.clone(),
        "small": torch.tensor(5.0),
    }


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return same_bits(one.detach().resolve_conj(), other.detach())


def blank(state):
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else torch.zeros(state.shape, dtype=state.dtype)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("way", [dcp, torch_dcp])
def test_one_rank_stores_one_memory_once_and_every_name_has_its_value(tmp_path, mode, way):
    state = tied_state()
    if mode == "sync":
        metadata = dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        metadata = dcp.async_save(state, checkpoint_id=tmp_path, no_dist=True).upload_completion.result()
    assert 6 * NBYTES < stored_nbytes(tmp_path) < 6.1 * NBYTES
    places = records(metadata)
    tied = {places[name] for name in ("embedding.weight", "head.weight", "head.detached", "again.0")}
    assert len(tied) == 1
    assert len(set(places.values())) == len(places) - 3
    template = blank(state)
    way.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert same(state, template)
    assert describe(tmp_path).nbytes == pytest.approx(stored_nbytes(tmp_path), rel=0.001)
    assert not verify_checkpoint(plan_verify(tmp_path)).faults


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (3, 2), (4, 4)])
def test_ranks_that_all_have_a_tie_store_it_once(tmp_path, saving, loading):
    require_no_errors(ThreadRanks(saving).save(tied_state, tmp_path))
    assert 6 * NBYTES < stored_nbytes(tmp_path) < 6.2 * NBYTES
    templates = [blank(tied_state()) for _ in range(loading)]
    require_no_errors(ThreadRanks(loading).load(templates, tmp_path))
    assert all(same(tied_state(), template) for template in templates)


def test_where_ranks_do_not_agree_on_ties_every_name_has_its_value(tmp_path):
    def state_of(rank):
        w, v = large(1), large(1)
        ties = {0: (w, w, w), 1: (v, w, w), 2: (w, w, v)}
        a, b, c = ties[rank]
        own = {"of one": a} if rank == 1 else {}
        return dict(sorted({"a": a, "b": b, "c": c, **own}.items(), reverse=rank == 2))

    require_no_errors(ThreadRanks(3).save(state_of, tmp_path))
    template = {"a": 0, "b": 0, "c": 0, "of one": 0}
    template = {name: torch.zeros_like(large(1)) for name in template}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert all(same_bits(value, large(1)) for value in template.values())


def test_values_that_differ_between_ranks_under_a_tie_are_the_lowest_ranks(tmp_path):
    def state_of(rank):
        w = large(rank)
        return {"a": w, "b": w if rank else large(5)}

    require_no_errors(ThreadRanks(2).save(state_of, tmp_path))
    template = {"a": torch.zeros_like(large(0)), "b": torch.zeros_like(large(0))}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert same_bits(template["a"], large(0))
    assert same_bits(template["b"], large(5))


@pytest.mark.parametrize("loading", [1, 3])
def test_tied_shards_are_stored_once_a_chunk(tmp_path, loading):
    whole = large(2)
    rows = whole.shape[0] // 2

    def state_of(rank):
        chunks = {(rank * rows, 0): whole[rank * rows : (rank + 1) * rows].clone()}
        return {name: LocalShards(whole.shape, chunks) for name in ("a", "b")}

    require_no_errors(ThreadRanks(2).save(state_of, tmp_path))
    assert NBYTES < stored_nbytes(tmp_path) < 1.1 * NBYTES
    templates = [{name: torch.zeros_like(whole) for name in ("a", "b")} for _ in range(loading)]
    require_no_errors(ThreadRanks(loading).load(templates, tmp_path))
    assert all(same_bits(value, whole) for template in templates for value in template.values())


def test_a_tied_model_is_tied_after_the_load_and_has_its_values(tmp_path):
    def tied():
        model = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(16, 8), "head": torch.nn.Linear(8, 16, bias=False)}
        )
        model["head"].weight = model["embedding"].weight
        return model

    model = tied()
    dcp.save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
    other = tied()
    torch.nn.init.constant_(other["head"].weight, float("nan"))
    dcp.load({"model": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other["head"].weight is other["embedding"].weight
    assert torch.equal(other["head"].weight, model["head"].weight)


class Doubling(dcp.DefaultSavePlanner):
    """A planner of a user's that makes what it writes."""

    def resolve_data(self, write_item):
        value = super().resolve_data(write_item)
        return value * (2 if write_item.index.fqn == "a" else 3) if isinstance(value, torch.Tensor) else value


def test_a_planner_that_makes_what_it_writes_has_all_of_it_written(tmp_path):
    w = torch.ones(4)
    dcp.save({"a": w, "b": w}, checkpoint_id=tmp_path, planner=Doubling(), no_dist=True)
    template = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert [value.tolist() for value in template.values()] == [[2] * 4, [3] * 4]
