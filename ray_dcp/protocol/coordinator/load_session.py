"""The coordinator's half of a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from torch.distributed.checkpoint.planner import LoadPlan

from ray_dcp.errors import CorruptCheckpointError, StateDictError
from ray_dcp.planning.node_sharing import NodeShare, plan_shares
from ray_dcp.planning.template.comparison import ASKS_NOTHING
from ray_dcp.protocol.coordinator.session import Session, one_checkpoint_id
from ray_dcp.protocol.messages import (
    OPEN,
    PLAN_LOAD,
    PLAN_LOAD_HERE,
    READ,
    SEND_PLAN,
    LoadAnswer,
    LoadPart,
    Message,
    OpenPart,
    PlanLoadHere,
    SendPlan,
)
from ray_dcp.protocol.steps import GlobalLoadSteps, global_load_steps
from ray_dcp.reads.checkpoint import OpenedCheckpoint, open_for_ranks
from ray_dcp.settings import Phase
from ray_dcp.trace_points import Point, reached
from ray_dcp.wording import ranks_text


class LoadSession(Session):
    """The coordinator's half of a load, phase by phase.

    open: the checkpoint is opened, once for all ranks. plan: local plans become final plans, after all checks. read:
    every rank has all bytes. restore, only where some rank runs code for that: every rank has put them where they
    belong.
    """

    first_phase: ClassVar[Phase] = Phase.OPEN

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._steps: GlobalLoadSteps | None = None
        self._following: dict[Phase, Phase] = {Phase.OPEN: Phase.PLAN}
        self._unexpected: tuple[str, ...] = ()

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[Message]:
        match phase:
            case Phase.OPEN:
                return self._open(OPEN.parts(parts))
            case Phase.PLAN:
                return self._plan(PLAN_LOAD.parts(parts))
            case Phase.PLANS:
                return self._plan_globally(SEND_PLAN.parts(parts), Phase.PLANS)
            case Phase.GLOBAL_PLAN:
                return self._accept(PLAN_LOAD_HERE.parts(parts)[0] or ())
            case Phase.READ:
                return self._read(READ.parts(parts))
            case Phase.RESTORE:
                return [None] * len(parts)
        raise AssertionError(f"a load has no phase {phase!r}")

    def next_phase(self, phase: Phase) -> Phase | None:
        return self._following.get(phase)

    def _open(self, parts: Sequence[OpenPart]) -> Sequence[OpenedCheckpoint | None]:
        self.checkpoint_id = one_checkpoint_id([part.checkpoint_id for part in parts])
        if any(part.from_memory for part in parts):
            return [_brought(self.checkpoint_id, parts)] * len(parts)
        if parts[0].opens:
            return open_for_ranks(self.checkpoint_id, len(parts))
        return [None] * len(parts)

    def _plan(self, parts: Sequence[LoadPart]) -> Sequence[Message]:
        reached(Point.LOAD_PLAN)
        self._unexpected = _unexpected_everywhere(parts)
        _require_fitting_templates(parts, self._unexpected)
        self._steps = global_load_steps(parts)
        if not self._steps.needs_plans:
            self._following[Phase.PLAN] = Phase.READ
            return self._accept([part.plan for part in parts], plan_shares([part.offer for part in parts]))
        local_plans = [part.plan for part in parts if part.plan is not None]
        if len(local_plans) < len(parts):
            self._following[Phase.PLAN] = Phase.PLANS
            return [SendPlan()] * len(parts)
        return self._plan_globally(local_plans, Phase.PLAN)

    def _plan_globally(self, local_plans: Sequence[LoadPlan], phase: Phase) -> Sequence[Message]:
        assert self._steps is not None
        planned = self._steps.plan(local_plans)
        if self._steps.stays_on_rank_zero:
            self._following |= {phase: Phase.GLOBAL_PLAN, Phase.GLOBAL_PLAN: Phase.READ}
            return cast(Sequence[PlanLoadHere], planned)
        self._following[phase] = Phase.READ
        return self._accept(cast(Sequence[LoadPlan | None], planned))

    def _read(self, restores: Sequence[bool]) -> Sequence[bool]:
        """Tell every rank whether any of them runs code, which may fail, to restore."""
        if any(restores):
            self._following[Phase.READ] = Phase.RESTORE
        return [any(restores)] * len(restores)

    def _accept(self, plans: Sequence[LoadPlan | None], shares: Sequence[NodeShare | None] = ()) -> Sequence[Message]:
        """The answers: a rank's final plan (None: its own), the names that no rank's template has, and what it shares.

        Ranks that get equal answers get one and the same object.
        """
        answers: dict[tuple[int, int], LoadAnswer] = {}
        for plan, share in zip(plans, shares or [None] * len(plans), strict=True):
            answers.setdefault((id(plan), id(share)), (plan, self._unexpected, share))
        return [answers[id(plan), id(share)] for plan, share in zip(plans, shares or [None] * len(plans), strict=True)]


def _brought(checkpoint_id: str, parts: Sequence[OpenPart]) -> OpenedCheckpoint:
    """The checkpoint that is in memory alone, by the rank that brings what it is."""
    brought = [part.from_memory.opened for part in parts if part.from_memory is not None]
    opened = next((one for one in brought if one is not None), None)
    if opened is None:
        raise CorruptCheckpointError("is in memory alone, and no rank has it any more", file=checkpoint_id)
    return opened


def _unexpected_everywhere(parts: Sequence[LoadPart]) -> tuple[str, ...]:
    checks = [part.check for part in parts]
    if not checks or any(check is None for check in checks):
        return ()
    return tuple(sorted(set.intersection(*(set(check.unexpected) for check in checks if check is not None))))


def _require_fitting_templates(parts: Sequence[LoadPart], unexpected: tuple[str, ...]) -> None:
    found: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        for problem in [*_rank_problems(part, unexpected), *part.per_rank_problems]:
            found.setdefault(problem, []).append(rank)
    if found or not _any_finds(parts):
        everywhere = list(range(len(parts)))
        advice = dict.fromkeys(part.check.advice for part in parts if part.check is not None)
        if _any_finds(parts):
            advice = {line: None for line in advice if not line.startswith(ASKS_NOTHING)}
        raise StateDictError(
            ". ".join(["the template does not fit the checkpoint; nothing was loaded", *filter(None, advice)]),
            [p if ranks == everywhere else f"{p} ({ranks_text(ranks)})" for p, ranks in sorted(found.items())],
        )


def _any_finds(parts: Sequence[LoadPart]) -> bool:
    """Whether the load will fill anything that its templates ask for: one that fills nothing is an error, always."""
    return any(part.check is None or part.check.finds for part in parts)


def _rank_problems(part: LoadPart, unexpected: tuple[str, ...]) -> list[str]:
    if part.check is None:
        return []
    problems = list(part.check.problems)
    if part.strict:
        problems += part.check.lacking
    if part.strict == "exact":
        problems += [f'{fqn}: in the checkpoint, but not in the template (strict="exact")' for fqn in unexpected]
    return problems
