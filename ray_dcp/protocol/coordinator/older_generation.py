"""``OlderGeneration``: what goes on of a generation that another one has followed.

Those are saves of which every rank has handed over its part, or sent it. All else of an older generation is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ray_dcp.protocol.coordinator.calls import Calls
from ray_dcp.protocol.coordinator.membership import MembershipRecord
from ray_dcp.protocol.coordinator.open_call import OpenCall
from ray_dcp.protocol.messages import CallId


@dataclass(slots=True, eq=False)
class OlderGeneration:
    """A generation that is over, and its ranks, some of which may be at home in the next one. See the module."""

    number: int
    calls: Calls
    saves: list[OpenCall]
    """The saves that went on when it ended, in their order."""
    members: dict[str, int] = field(default_factory=dict)
    """The rank of each member."""
    lost: dict[int, str] = field(default_factory=dict)
    """The ranks that are gone, and why."""

    @classmethod
    def of(cls, membership: MembershipRecord, calls: Calls, saves: list[OpenCall]) -> OlderGeneration:
        members = {one.member: one.rank for one in membership.members}
        return cls(membership.generation, calls, saves, members, dict(membership.lost))

    @property
    def open_saves(self) -> list[OpenCall]:
        return [call for call in self.saves if not call.ended]

    def find(self, call_id: CallId, rank: int) -> OpenCall | None:
        """The save that this rank calls ``call_id``, if it went on when the generation ended."""
        call = self.calls.find(call_id, rank)
        return call if call in self.saves else None

    def knows(self, member: str) -> bool:
        """Whether it matters if this process lives."""
        return member in self.members and bool(self.open_saves)

    def lose(self, member: str, why: str) -> bool:
        """Note that a process is gone, and say whether it was a rank of this generation."""
        rank = self.members.get(member)
        if rank is not None:
            self.lost.setdefault(rank, why)
        return rank is not None
