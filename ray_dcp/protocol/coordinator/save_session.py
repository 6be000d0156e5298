"""The coordinator's half of a save: what is the same whoever plans and writes.

It names the checkpoint, compares what several ranks hold, puts together what the manifest says of containers, and has
the rest done by the ``GlobalSaveSteps`` that the first parts decide on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ray_dcp.errors import StateDictError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.pace.interval import Interval, agreed_interval
from ray_dcp.planning.save_plan.check_save import require_agreeing_plans
from ray_dcp.planning.save_plan.replicas import Differing, describe_differing, find_differing, keys_to_show, refusals
from ray_dcp.planning.values.containers import Containers, merged_containers
from ray_dcp.protocol.coordinator.session import Session, one_checkpoint_id
from ray_dcp.protocol.engines.plugin_save import SaveOnRankZero
from ray_dcp.protocol.memory_steps import KeptInMemory
from ray_dcp.protocol.messages import (
    COMMIT,
    PLAN_SAVE,
    PLAN_SAVE_HERE,
    WRITE,
    Busy,
    CommittedWithReplicas,
    FinalTable,
    Message,
    Paced,
    Results,
    ResultsWithReplicas,
    SavePart,
    SaveSkipped,
    ShowReplicas,
    unsealed,
)
from ray_dcp.protocol.steps import GlobalSaveSteps, global_save_steps
from ray_dcp.settings import Phase
from ray_dcp.staging.buffer_errors import SavesInFlightError
from ray_dcp.wording import ranks_text


class SaveSession(Session):
    """The coordinator's half of a save, phase by phase.

    plan: local plans become final plans. write: write results become the committed ``Metadata``. Where planner and
    writer stay on rank 0, "global plan" follows plan, and "commit" follows write. Where a rank is busy, nothing does.
    """

    first_phase: ClassVar[Phase] = Phase.PLAN

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._steps: GlobalSaveSteps | None = None
        self._containers: Containers = ()
        self._differing: Sequence[Differing] = ()
        self._described: Sequence[DifferingReplicas] = ()
        self._interval: Interval | None = None
        self._skipped: SaveSkipped | None = None

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[Message]:
        match phase:
            case Phase.PLAN:
                return self._plan(PLAN_SAVE.parts(parts))
            case Phase.GLOBAL_PLAN:
                planned = PLAN_SAVE_HERE.parts(parts)[0]
                assert planned is not None, "it is rank 0 that was asked"
                return self._final(cast(SaveOnRankZero, self._steps).planned(planned))
            case Phase.WRITE:
                return self._commit([unsealed(part) for part in WRITE.parts(parts)])
            case Phase.COMMIT:
                return self._told([COMMIT.parts(parts)[0]] * len(parts))
        raise AssertionError(f"a save has no phase {phase!r}")

    def next_phase(self, phase: Phase) -> Phase | None:
        if self._skipped is not None:
            return None
        stays = self._stays_on_rank_zero
        following = {Phase.PLAN: Phase.GLOBAL_PLAN if stays else Phase.WRITE, Phase.GLOBAL_PLAN: Phase.WRITE}
        return following.get(phase, Phase.COMMIT if stays and phase == Phase.WRITE else None)

    @property
    def attempt(self) -> str | None:
        return self._steps.attempt if self._steps is not None else None

    @property
    def may_have_committed(self) -> bool:
        return self._steps is not None and self._steps.may_have_committed

    def give_up(self) -> None:
        if self._steps is not None:
            self._steps.give_up()

    @property
    def _stays_on_rank_zero(self) -> bool:
        return self._steps is not None and self._steps.stays_on_rank_zero

    def _plan(self, parts: Sequence[SavePart]) -> Sequence[Message]:
        self.checkpoint_id = one_checkpoint_id([part.checkpoint_id for part in parts])
        self._skipped = _unkept(parts) or _skipped([part.busy for part in parts])
        if self._skipped is not None:
            return [self._skipped] * len(parts)
        self._differing = find_differing([part.plan for part in parts], [part.replica_digests for part in parts])
        if self._differing and any(part.replica_check.mode == "error" for part in parts):
            require_agreeing_plans([part.dcp_plan() for part in parts])  # other shapes or kinds are another error
            raise StateDictError(
                'ranks hold different values under one name (replica_check="error"). Give values that belong to one '
                "rank as PerRank, and different tensors different names; nothing was written",
                refusals(self._differing),
            )
        self._steps = steps = global_save_steps(parts)
        answers = steps.plan(parts, {one.key for one in self._differing})
        self._interval = agreed_interval([part.figures for part in parts])
        self._containers = merged_containers(part.containers for part in parts)
        return answers if steps.stays_on_rank_zero else self._final(cast(Sequence[FinalTable | SavePlan], answers))

    def _final(self, answers: Sequence[FinalTable | SavePlan]) -> Sequence[Message]:
        """The final plans, with what each rank is to show, and the interval to the next save where that is known."""
        shown, interval = self._showing(answers), self._interval
        return shown if interval is None else [Paced(answer, interval) for answer in shown]

    def _showing(self, answers: Sequence[FinalTable | SavePlan]) -> Sequence[FinalTable | SavePlan | ShowReplicas]:
        """The final plans; where ranks hold different values, with what each is to show of them."""
        if not self._differing:
            return answers
        shown_by = keys_to_show(self._differing)
        return [ShowReplicas(answer, shown_by.get(rank, ())) for rank, answer in enumerate(answers)]

    def _commit(self, parts: Sequence[Results | ResultsWithReplicas]) -> Sequence[Message]:
        assert self._steps is not None
        results = cast(Sequence[Results], parts)
        if self._differing:
            with_shown = cast(Sequence[ResultsWithReplicas], parts)
            self._described = describe_differing(self._differing, [of_rank.shown for of_rank in with_shown])
            results = [of_rank.results for of_rank in with_shown]
        answers = self._steps.commit(results, self._containers, self._described)
        if self._steps.stays_on_rank_zero:
            return answers
        told, kept = self._told(cast(Sequence[Metadata], answers)), self._steps.kept
        return told if kept is None else [KeptInMemory(one, kept) for one in told]

    def _told(self, answers: Sequence[Metadata | None]) -> Sequence[Message]:
        """The last answers; rank 0's comes with what it is to warn of."""
        if not self._described or answers[0] is None:
            return answers
        return [CommittedWithReplicas(answers[0], self._described), *answers[1:]]


def _unkept(parts: Sequence[SavePart]) -> SaveSkipped | None:
    """What all ranks are told where a save in memory cannot be kept.

    Raises ``StateDictError`` where it is one for some ranks only.
    """
    in_memory = [rank for rank, part in enumerate(parts) if part.in_memory]
    if in_memory and len(in_memory) < len(parts):
        raise StateDictError(
            f"{ranks_text(in_memory)} of {len(parts)} keep this step in memory, the others save it to storage; pass "
            "all managers the same memory_every, ask due() on every rank, or pass the same tier= on all"
        )
    why = next((part.unkept for part in parts if part.unkept), "")
    return SaveSkipped(0, (), why) if why else None


def _skipped(said: Sequence[Busy | None]) -> SaveSkipped | None:
    """What all ranks are told where one is busy. Raises ``SavesInFlightError`` where any such rank wants that."""
    busy = {rank: one for rank, one in enumerate(said) if one is not None}
    if not busy:
        return None
    told = SaveSkipped(min(one.max_in_flight for one in busy.values()), tuple(busy))
    if any(one.raises for one in busy.values()):
        raise SavesInFlightError(max_in_flight=told.max_in_flight, busy_ranks=told.busy_ranks)
    return told
