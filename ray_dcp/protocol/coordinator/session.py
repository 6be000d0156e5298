"""The coordinator's half of one save, load or barrier: what it does when all ranks have sent their part.

A session is a plain object. Each of its phases takes what every rank sent, in rank order, and returns what every rank
gets, in rank order. It raises to fail the call for all ranks. Phases run once each, in order, one at a time.

A user's writer stays on rank 0, and so does a planner or reader that cannot be pickled. Their global steps then run
there, in a phase of their own: rank 0 gets an ``OnRankZero`` with what all ranks sent, and sends back the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.errors import StateDictError, without_keys
from ray_dcp.wording import ranks_text


class Session(Protocol):
    """See the module."""

    first_phase: ClassVar[str]
    checkpoint_id: str
    attempt: str | None = None
    """Names a save that writes, as its shard files do; None where there is none."""

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        """Carry out the coordinator's part of a phase."""
        ...

    def next_phase(self, phase: str) -> str | None:
        """What follows ``phase`` once its step is done; None when that ends the call."""
        ...

    @property
    def may_have_committed(self) -> bool:
        return False

    def give_up(self) -> None:
        """The call has failed; a step that still runs must not commit any more. Called from another thread."""


@dataclass(frozen=True, slots=True)
class OnRankZero:
    """The answer to all ranks where the next step is rank 0's. Only rank 0's has the parts."""

    parts: Sequence[Any] | None
    metadata: Metadata | None = None


def for_rank_zero(parts: Sequence[Any], metadata: Metadata | None = None) -> Sequence[OnRankZero]:
    return [OnRankZero(parts, metadata), *[OnRankZero(None)] * (len(parts) - 1)]


def one_checkpoint_id(checkpoint_ids: Sequence[str]) -> str:
    by_id: dict[str, list[int]] = {}
    for rank, checkpoint_id in enumerate(checkpoint_ids):
        by_id.setdefault(checkpoint_id, []).append(rank)
    if len(by_id) > 1:
        # What is behind the "?" of a bucket's URL is not shown, and may be all that differs.
        shown = len({without_keys(name) for name in by_id}) == len(by_id)
        raise StateDictError(
            "ranks passed different checkpoint_ids" + ("" if shown else ", whose keys or URL parameters differ"),
            [f"{ranks_text(ranks)}: {without_keys(name)}" for name, ranks in by_id.items()],
        )
    return checkpoint_ids[0]
