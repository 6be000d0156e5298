"""How plug-ins are called: with the arguments that they know, and with planners that stand in front of the user's.

torch's interfaces have grown over time; users' classes have not.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from ray_dcp.planning.save_plan.plan_table import Key
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.progress import Progress
from ray_dcp.staging.host_pieces import copy_to_host


def accepted(method: Callable[..., Any], rank: int) -> dict[str, Any]:
    """The keyword arguments for a set-up method: torch passes them only to those that declare ``**kwargs``."""
    declared = "kwargs" in inspect.signature(method).parameters
    return {"rank": rank, "use_collectives": True} if declared else {}


class CountingPlanner:
    """Stands in for a planner, whichever it is: every use of it counts as progress, in whatever thread.

    A user's writer or reader shows in this way that it moves, by what it asks of its planner.
    """

    def __init__(self, planner: Any, progress: Progress) -> None:
        self._planner = planner
        self._progress = progress

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A user's writer may ask whether this is the user's planner: it is meant to find nothing new here.
        return type(self._planner)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._planner, name)
        if not inspect.ismethod(attribute):
            return attribute

        @functools.wraps(attribute)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._progress.advance()
            return attribute(*args, **kwargs)

        return counted

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._planner,)


def _itself(planner: Any) -> Any:
    return planner


class StagedPlanner(SavePlanner):
    """The planner of a staged save: resolves the copies, and is otherwise the user's."""

    def __init__(self, planner: SavePlanner, plan: SavePlan, staged: Mapping[int, torch.Tensor | io.BytesIO]) -> None:
        self._planner = planner
        self._plan = plan  # keeps the items alive, by whose identity the copies are found
        self._staged = staged

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a staged save is planned already")

    def create_local_plan(self) -> SavePlan:
        raise AssertionError("a staged save is planned already")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("a staged save is planned already")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        staged = self._staged.get(id(write_item))
        return staged if staged is not None else self._planner.resolve_data(write_item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def staged_copies(planner: SavePlanner, plan: SavePlan, progress: Progress) -> dict[int, torch.Tensor | io.BytesIO]:
    """Copies of what ``plan`` writes, by the ``id`` of the item; items of one memory share one."""
    ties = ties_of(planner)
    if not ties:
        return {id(item): _copy(planner.resolve_data(item), progress) for item in plan.items}
    copies: dict[Key, torch.Tensor | io.BytesIO] = {}
    staged = {}
    for item in plan.items:
        key = item.index.fqn, item.index.offset
        key = ties.get(key, key)
        if key not in copies:
            copies[key] = _copy(planner.resolve_data(item), progress)
        staged[id(item)] = copies[key]
    return staged


def _copy(value: torch.Tensor | io.BytesIO, progress: Progress) -> torch.Tensor | io.BytesIO:
    progress.advance()
    return copy_to_host(value) if isinstance(value, torch.Tensor) else value


__all__ = ["CountingPlanner", "StagedPlanner", "accepted", "staged_copies"]
