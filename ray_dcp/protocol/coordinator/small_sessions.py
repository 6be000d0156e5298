"""The small sessions, and all sessions by the kind of their call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from ray_dcp.catalog.facts import CheckpointInfo
from ray_dcp.catalog.newest import newest_step
from ray_dcp.errors import StateDictError
from ray_dcp.protocol.coordinator.load_session import LoadSession
from ray_dcp.protocol.coordinator.save_session import SaveSession
from ray_dcp.protocol.coordinator.session import Session, one_checkpoint_id
from ray_dcp.protocol.messages import CHOOSE, FailedLoad, Message
from ray_dcp.settings import Phase


class NewestSession(Session):
    """The newest committed checkpoint under a root, looked up once for all ranks; None when there is none.

    A root that is itself a checkpoint is refused. After a failed load the answer is an older one, for all ranks or for
    none, although each may have seen another reason: it is worth going on where the bytes were bad for any of them.
    """

    first_phase: ClassVar[Phase] = Phase.CHOOSE

    def __init__(self) -> None:
        self.checkpoint_id = ""

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[CheckpointInfo | None]:
        asked = CHOOSE.parts(parts)
        self.checkpoint_id = one_checkpoint_id([part.root for part in asked])
        return [self._choose([part.failed for part in asked])] * len(asked)

    def _choose(self, failed: Sequence[FailedLoad | None]) -> CheckpointInfo | None:
        steps = {load.step if load is not None else None for load in failed}
        if len(steps) > 1:
            raise StateDictError(f"ranks look for different steps: {failed}")
        hopeless = failed[0] is not None and not any(load is not None and load.damaged for load in failed)
        return None if hopeless else newest_step(self.checkpoint_id, before=steps.pop())

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
    "barrier": BarrierSession,
}
