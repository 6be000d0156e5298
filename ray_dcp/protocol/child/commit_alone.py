"""The commit of a save of one process by somebody else: that process is dead."""

from __future__ import annotations

from ray_dcp.gc_pause import collector_paused
from ray_dcp.protocol.coordinator.small_sessions import SESSIONS
from ray_dcp.protocol.deputy import HandedOver
from ray_dcp.protocol.messages import decode, encode
from ray_dcp.settings import Phase


class OtherResultError(Exception):
    """Planned again, the save came out otherwise than its process had planned it: its file does not fit."""


def commit_alone(handed: HandedOver, written: bytes) -> None:
    """Do again what the dead process had agreed on with itself, then commit what it had ``written``.

    As a coordinator that starts over does. A checkpoint that the process had committed already stays as it is. Raises
    ``OtherResultError``, and whatever a commit raises.
    """
    session = SESSIONS["save"]()
    with collector_paused():
        for earlier in handed.exchanged:
            (answer,) = session.step(Phase(earlier.phase), [decode(earlier.message)])
            if encode(answer) != earlier.answer and answer != decode(earlier.answer):
                raise OtherResultError(f"it came to another result in {earlier.phase!r}")
        session.step(Phase.WRITE, [decode(written)])


__all__ = ["OtherResultError", "commit_alone"]
