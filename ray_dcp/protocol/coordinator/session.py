"""The coordinator's half of one save, load or barrier: what it does when all ranks have sent their part.

A session is a plain object. Each of its phases takes what every rank sent, in rank order, and returns what every rank
gets, in rank order. It raises to fail the call for all ranks. Phases run once each, in order, one at a time.

A user's writer stays on rank 0, and so does a planner or reader that cannot be pickled. Their global steps then run
there, in a phase of their own: the answers are ``Asked``, rank 0's has what all ranks sent, and it sends the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from ray_dcp.errors import StateDictError, without_keys
from ray_dcp.protocol.messages import Message
from ray_dcp.settings import Phase
from ray_dcp.wording import ranks_text


class Session(Protocol):
    """The coordinator's half of one call: see the module."""

    first_phase: ClassVar[Phase]
    checkpoint_id: str

    def step(self, phase: Phase, parts: Sequence[Message]) -> Sequence[Message]:
        """Carry out the coordinator's half of a phase: the answers to what each rank has sent."""
        ...

    def next_phase(self, phase: Phase) -> Phase | None:
        """The phase that follows ``phase`` once its step is done; None when that ends the call."""
        ...

    @property
    def attempt(self) -> str | None:
        """The name of a save's attempt, which its shard files carry; None where there is no attempt."""
        return None

    @property
    def may_have_committed(self) -> bool:
        """Whether a checkpoint may have been committed, whatever became of the call."""
        return False

    def give_up(self) -> None:
        """Commit nothing any more, also in a step that still runs: the call has failed. Called from another thread."""


def one_checkpoint_id(checkpoint_ids: Sequence[str]) -> str:
    """The id that all ranks have passed. Raises ``StateDictError`` where they passed different ones."""
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
