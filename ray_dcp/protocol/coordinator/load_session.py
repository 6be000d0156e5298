"""The coordinator's half of a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from ray_dcp.errors import StateDictError
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer, plan_shares
from ray_dcp.planning.template.comparison import ASKS_NOTHING, TemplateCheck
from ray_dcp.protocol.coordinator.session import Session, for_rank_zero, one_checkpoint_id
from ray_dcp.protocol.messages import Carried
from ray_dcp.reads.checkpoint import OpenedCheckpoint, open_for_ranks
from ray_dcp.trace_points import Point, reached
from ray_dcp.wording import ranks_text

Accepted = tuple[LoadPlan | None, tuple[str, ...], NodeShare | None]
"""The answer to a rank's plan: the final one, unexpected names, its node's share."""


@dataclass(frozen=True, slots=True)
class OpenContribution:
    """What a rank sends to open a checkpoint: ``opens`` is False where a user's reader reads the metadata."""

    checkpoint_id: str
    opens: bool


class NoGlobalStep:
    """In place of a planner and a reader whose global step is torch's default: each rank's plan stays as it is."""


NO_GLOBAL_STEP = NoGlobalStep()


class SendPlans:
    """The answer where plans were kept back and rank 0's planner or reader wants to see them."""


@dataclass(frozen=True, slots=True)
class LoadContribution:
    """What a rank sends to plan a load. ``check`` is None where a user's planner decides what fits.

    ``plan`` is None where this rank's planner and reader have no global step: it may be large. ``carried``, of rank 0
    alone: its (planner, reader), None where they stay.
    """

    plan: LoadPlan | None
    check: TemplateCheck | None
    strict: bool | str
    per_rank_problems: tuple[str, ...] = ()
    carried: Carried | tuple[LoadPlanner, StorageReader] | NoGlobalStep | None = None
    offer: ShareOffer | None = None
    """What ranks of its node could read for this one."""


class LoadSession(Session):
    """open: the checkpoint, once for all. plan: local plans to final plans, after all checks.

    read: every rank has all bytes. restore: every rank has put them where they belong; only where some rank runs code
    for that.
    """

    first_phase: ClassVar[str] = "open"

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._carried: Carried | tuple[LoadPlanner, StorageReader] | NoGlobalStep | None = None
        self._following: dict[str, str] = {"open": "plan"}
        self._unexpected: tuple[str, ...] = ()

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        steps: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
            "open": self._open,
            "plan": self._plan,
            "plans": self._plan_globally,
            "global plan": lambda parts: self._accept(parts[0]),
            "read": self._read,
            "restore": lambda parts: [None] * len(parts),
        }
        return steps[phase](contributions)

    def next_phase(self, phase: str) -> str | None:
        return self._following.get(phase)

    def _open(self, contributions: Sequence[OpenContribution]) -> Sequence[OpenedCheckpoint | None]:
        self.checkpoint_id = one_checkpoint_id([part.checkpoint_id for part in contributions])
        if contributions[0].opens:
            return open_for_ranks(self.checkpoint_id, len(contributions))
        return [None] * len(contributions)

    def _plan(self, contributions: Sequence[LoadContribution]) -> Sequence[Any]:
        reached(Point.LOAD_PLAN)
        self._unexpected = _unexpected_everywhere(contributions)
        _require_fitting_templates(contributions, self._unexpected)
        self._carried = contributions[0].carried
        if isinstance(self._carried, NoGlobalStep):
            self._following["plan"] = "read"
            shares = plan_shares([part.offer for part in contributions])
            return self._accept([part.plan for part in contributions], shares)
        local_plans = [part.plan for part in contributions if part.plan is not None]
        if len(local_plans) < len(contributions):
            self._following["plan"] = "plans"
            return [SendPlans()] * len(contributions)
        return self._plan_globally(local_plans, phase="plan")

    def _read(self, restores: Sequence[bool]) -> Sequence[bool]:
        """Whether any rank runs code, which may fail, to restore."""
        if any(restores):
            self._following["read"] = "restore"
        return [any(restores)] * len(restores)

    def _plan_globally(self, local_plans: Sequence[LoadPlan], phase: str = "plans") -> Sequence[Any]:
        assert not isinstance(self._carried, NoGlobalStep)
        if self._carried is None:
            self._following |= {phase: "global plan", "global plan": "read"}
            return for_rank_zero(local_plans)
        self._following[phase] = "read"
        planner, reader = self._carried.unpack() if isinstance(self._carried, Carried) else self._carried
        return self._accept(plan_load_globally(planner, reader, local_plans))

    def _accept(self, plans: Sequence[LoadPlan | None], shares: Sequence[NodeShare | None] = ()) -> Sequence[Accepted]:
        """Final plans (None: the rank's own), to every rank the names that no rank's template has, and what it shares.

        Ranks that get the same get one and the same object.
        """
        answers: dict[tuple[int, int], Accepted] = {}
        for plan, share in zip(plans, shares or [None] * len(plans), strict=True):
            answers.setdefault((id(plan), id(share)), (plan, self._unexpected, share))
        return [answers[id(plan), id(share)] for plan, share in zip(plans, shares or [None] * len(plans), strict=True)]


def plan_load_globally(
    planner: LoadPlanner, reader: StorageReader, local_plans: Sequence[LoadPlan]
) -> Sequence[LoadPlan]:
    """A load's global step, wherever planner and reader are."""
    return reader.prepare_global_plan(planner.create_global_plan(list(local_plans)))


def _unexpected_everywhere(contributions: Sequence[LoadContribution]) -> tuple[str, ...]:
    checks = [part.check for part in contributions]
    if not checks or any(check is None for check in checks):
        return ()
    return tuple(sorted(set.intersection(*(set(check.unexpected) for check in checks if check is not None))))


def _require_fitting_templates(contributions: Sequence[LoadContribution], unexpected: tuple[str, ...]) -> None:
    found: dict[str, list[int]] = {}
    for rank, part in enumerate(contributions):
        for problem in [*_rank_problems(part, unexpected), *part.per_rank_problems]:
            found.setdefault(problem, []).append(rank)
    if found or not _any_finds(contributions):
        everywhere = list(range(len(contributions)))
        advice = dict.fromkeys(part.check.advice for part in contributions if part.check is not None)
        if _any_finds(contributions):
            advice = {line: None for line in advice if not line.startswith(ASKS_NOTHING)}
        raise StateDictError(
            ". ".join(["the template does not fit the checkpoint; nothing was loaded", *filter(None, advice)]),
            [p if ranks == everywhere else f"{p} ({ranks_text(ranks)})" for p, ranks in sorted(found.items())],
        )


def _any_finds(contributions: Sequence[LoadContribution]) -> bool:
    """Whether the load will fill anything that its templates ask for: one that fills nothing is an error, always."""
    return any(part.check is None or part.check.finds for part in contributions)


def _rank_problems(part: LoadContribution, unexpected: tuple[str, ...]) -> list[str]:
    if part.check is None:
        return []
    problems = list(part.check.problems)
    if part.strict:
        problems += part.check.lacking
    if part.strict == "exact":
        problems += [f'{fqn}: in the checkpoint, but not in the template (strict="exact")' for fqn in unexpected]
    return problems
