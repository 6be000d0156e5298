"""The small sessions, and all sessions by the kind of their call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from ray_dcp.catalog.facts import CheckpointInfo
from ray_dcp.catalog.newest import newest_step
from ray_dcp.errors import StateDictError
from ray_dcp.format.manifest import Manifest, encode_manifest
from ray_dcp.planning.save_plan.plan_table import PlanTable
from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.protocol.coordinator.load_session import LoadSession
from ray_dcp.protocol.coordinator.save_session import SaveSession
from ray_dcp.protocol.coordinator.session import Session, one_checkpoint_id
from ray_dcp.protocol.memory_steps import Newest, newest_whole
from ray_dcp.protocol.messages import CHOOSE, PLAN_WARM_UP, FailedLoad, FinalTable, Message
from ray_dcp.settings import Phase
from ray_dcp.write.writer import ShardTarget


class NewestSession(Session):
    """The newest committed checkpoint under a root, looked up once for all ranks; None when there is none.

    A root that is itself a checkpoint is refused. After a failed load the answer is an older one, for all ranks or for
    none, although each may have seen another reason: it is worth going on where the bytes were bad for any of them.
    """

    first_phase: ClassVar[Phase] = Phase.CHOOSE

    def __init__(self) -> None:
        self.checkpoint_id = ""

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[Newest]:
        asked = CHOOSE.parts(parts)
        self.checkpoint_id = one_checkpoint_id([part.root for part in asked])
        stored = self._choose([part.failed for part in asked])
        step = stored.step if stored is not None else None
        in_memory = newest_whole([part.in_memory for part in asked], newer_than=step)
        return [Newest(stored, in_memory)] * len(asked)

    def _choose(self, failed: Sequence[FailedLoad | None]) -> CheckpointInfo | None:
        steps = {load.step if load is not None else None for load in failed}
        if len(steps) > 1:
            raise StateDictError(f"ranks look for different steps: {failed}")
        hopeless = failed[0] is not None and not any(load is not None and load.damaged for load in failed)
        if failed[0] is not None and failed[0].from_memory:  # whatever is in storage is older
            steps = {None}
        return None if hopeless else newest_step(self.checkpoint_id, before=steps.pop())

    def next_phase(self, phase: Phase) -> Phase | None:
        return None


class WarmUpSession(Session):
    """What a save would be planned to be, for ranks that make ready for it: no attempt, and nothing is looked at.

    The answer is None where a plan or writer is the user's: what is known then is too little.
    """

    first_phase: ClassVar[Phase] = Phase.PLAN
    checkpoint_id = ""

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[FinalTable | None]:
        # What the first one imports takes half a second, which the first commit would.
        encode_manifest(Manifest([], world_size=len(parts), attempt="", metadata_digest="", created=0.0))
        plans = [part.plan for part in PLAN_WARM_UP.parts(parts)]
        tables = [plan for plan in plans if isinstance(plan, PlanTable)]
        carried = PLAN_WARM_UP.parts(parts)[0].carried
        planner = carried.unpack()[0] if carried is not None and len(tables) == len(parts) else None
        if type(planner) is not StatePlanner:
            return [None] * len(parts)
        kept = planner.create_global_table(tables).kept
        return [FinalTable(of_rank, ShardTarget(rank, "")) for rank, of_rank in enumerate(kept)]

    def next_phase(self, phase: Phase) -> Phase | None:
        return None


class BarrierSession(Session):
    """A barrier: its only phase is complete when all ranks have arrived."""

    first_phase: ClassVar[Phase] = Phase.ARRIVE
    checkpoint_id = ""

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[Message]:
        return [None] * len(parts)

    def next_phase(self, phase: Phase) -> Phase | None:
        return None


SESSIONS: Mapping[str, Callable[[], Session]] = {
    "save": SaveSession,
    "load": LoadSession,
    "newest": NewestSession,
    "warm-up": WarmUpSession,
    "barrier": BarrierSession,
}
