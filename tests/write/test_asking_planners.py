"""How many items a planner is asked for before the first of them is written or read."""

from __future__ import annotations

import pytest
import torch

import ray_dcp as dcp
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.trace_points import Point, observed_by
from ray_dcp.write import shard_layout

VALUES = {f"w{n}": torch.full((3 << 18,), float(n)) for n in range(6)}


class AskedToSave(dcp.DefaultSavePlanner):
    """A planner of the user's makes what it gives: what it gave before must have been written by then."""

    def __init__(self):
        super().__init__()
        self.given = None

    def resolve_data(self, write_item):
        if self.given is None:
            self.given = torch.empty(3 << 18)
        return self.given.copy_(super().resolve_data(write_item))


class OwnResolve(StatePlanner):
    given = None

    def resolve_data(self, write_item):
        if self.given is None:
            self.given = torch.empty(3 << 18)
        return self.given.copy_(super().resolve_data(write_item))


@pytest.mark.parametrize("planner", [AskedToSave, OwnResolve])
def test_a_save_planner_of_the_user_s_may_give_the_same_memory_again_and_again(tmp_path, planner):
    dcp.save(dict(VALUES), checkpoint_id=tmp_path, planner=planner(), no_dist=True)
    template = {fqn: torch.full_like(value, float("nan")) for fqn, value in VALUES.items()}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(template[fqn], value) for fqn, value in VALUES.items())


def test_our_own_planner_is_asked_for_several(tmp_path, monkeypatch):
    asked = []
    resolve = shard_layout._resolved
    monkeypatch.setattr(
        shard_layout, "_resolved", lambda item, *rest, **more: asked.append(item) or resolve(item, *rest, **more)
    )
    when = []

    def observe(point):
        if point == Point.MID_WRITE:
            when.append(len(asked))

    with observed_by(observe):
        dcp.save(dict(VALUES), checkpoint_id=tmp_path, no_dist=True)
    assert when == [6]


class Asked(dcp.DefaultLoadPlanner):
    """A planner of the user's, which may make what it gives: it is asked for one tensor when the last is there."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def resolve_tensor(self, read_item):
        self.calls.append(("resolve", read_item.dest_index.fqn))
        return super().resolve_tensor(read_item).clone()

    def commit_tensor(self, read_item, tensor):
        self.calls.append(("commit", read_item.dest_index.fqn))
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_planner_of_the_user_s_is_asked_for_one_large_tensor_at_a_time(tmp_path):
    values = {f"w{n}": torch.full((3 << 18,), float(n)) for n in range(6)}
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    planner = Asked()
    template = {fqn: torch.full_like(value, float("nan")) for fqn, value in values.items()}
    dcp.load(template, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert all(torch.equal(template[fqn], value) for fqn, value in values.items())
    assert [what for what, _ in planner.calls] == ["resolve", "commit"] * 6
    assert [fqn for _, fqn in planner.calls[::2]] == [fqn for _, fqn in planner.calls[1::2]]
