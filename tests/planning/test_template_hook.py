"""A ``Stateful`` that asks for what the checkpoint has, instead of for what it has itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ray_dcp as dcp
from tests.ranks import ThreadRanks, require_no_errors


class Lazy:
    """Holds nothing until it is loaded, as an optimizer before its first step."""

    def __init__(self, **held: Any) -> None:
        self.held = held
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state

    def template_for(self, saved: Any) -> dict[str, Any]:
        self.seen = dict(saved)
        return {
            name: torch.full(kind.size, torch.nan) if isinstance(kind, TensorStorageMetadata) else None
            for name, kind in saved.items()
        }


def test_what_is_stored_is_asked_for_by_an_object_that_holds_nothing_yet(tmp_path):
    saved = {"lazy": Lazy(weight=torch.arange(3.0), step=7), "lazy_too": 1, "lazy2": Lazy(other=2)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    ranks = ThreadRanks(2)
    templates = [{"lazy": Lazy()} for _ in range(2)]
    reports = require_no_errors(ranks.load(templates, tmp_path))
    for template, report in zip(templates, reports, strict=True):
        lazy = template["lazy"]
        assert sorted(lazy.seen) == ["step", "weight"]
        assert torch.equal(lazy.held["weight"], torch.arange(3.0))
        assert lazy.held["step"] == 7
        assert report.unexpected == ("lazy2.other", "lazy_too")


def test_what_it_asks_for_and_is_not_stored_is_missing(tmp_path):
    class Wanting(Lazy):
        def template_for(self, saved: Any) -> dict[str, Any]:
            return {"weight": None, **super().template_for(saved)}

    dcp.save({"lazy": Lazy(step=7)}, checkpoint_id=tmp_path, no_dist=True)
    template = {"lazy": Wanting()}
    report = dcp.load(template, checkpoint_id=tmp_path, no_dist=True, strict=False)
    assert report.missing == ("lazy.weight",)
    assert template["lazy"].held == {"weight": None, "step": 7}
