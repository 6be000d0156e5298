"""Saves of which every step is taken by hand, up to what a deputy is given: no rank is a thread here."""

from __future__ import annotations

import pickle
from array import array
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from ray_dcp.planning.values.collect import collect_state
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.protocol.deputy import Exchanged, HandedOver, SealedPart
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.protocol.messages import CallId, carry, decode, encode, told_to_deputy
from ray_dcp.settings import DEFAULT_REPLICA_CHECK
from tests.ranks import save_request


class OneRank:
    """Save number ``number`` of one rank, whose state is one tensor of its own with ``value`` everywhere."""

    def __init__(self, rank: int, call_id: CallId, *, value: float, num_values: int = 3) -> None:
        self.rank, self.call_id = rank, call_id
        self.state = {f"of{rank}": torch.full((num_values,), float(value))}
        request = save_request(self.state, call_id.checkpoint_id, OneCall(rank))
        self.steps = request.steps
        part = self.steps.plan(collect_state(self.state, rank), call_id.checkpoint_id, DEFAULT_REPLICA_CHECK)
        self.plan_message = encode(part)
        self.plan_answer = b""
        self.write_message = b""

    def plan(self, coordinator: Coordinator, *, again: bool = False) -> Future[bytes]:
        return coordinator.contribute(self.call_id, self.rank, "plan", self.plan_message, again=again)

    def finish_plan(self, answer: bytes) -> None:
        """Take the answer, and write the file; its results are the message that rank and deputy send."""
        self.plan_answer = answer
        self.steps.finish_plan(decode(answer))
        with torch.no_grad():
            columns = self.steps.write()
        crcs, blank = array("I"), pickle.loads(pickle.dumps(columns))
        if columns.payload_nbytes[0] > 1 << 20:
            crcs, blank._crcs = columns._crcs, array("I", bytes(4 * len(columns._crcs)))
        self.write_message = SealedPart(encode(blank), crcs.tobytes()).encoded()

    def write(self, coordinator: Coordinator, *, again: bool = False) -> Future[bytes]:
        return coordinator.contribute(self.call_id, self.rank, "write", self.write_message, again=again)

    @property
    def handed_over(self) -> HandedOver:
        exchanged = (Exchanged("plan", self.plan_message, self.plan_answer),)
        return HandedOver(pickle.dumps(self.call_id), self.rank, exchanged)


class OneCall:
    """What plan and writer ask of a call whose parts somebody else sends."""

    in_one_process, world_size = False, 2
    carry = staticmethod(carry)

    def __init__(self, rank: int) -> None:
        self.rank = rank


def planned(
    coordinator: Coordinator,
    place: Any,
    *,
    world_size: int = 2,
    number: int = 0,
    generation: int = 1,
    behind: tuple[int, ...] = (),
    **options: Any,
) -> list[OneRank]:
    """A save of all ranks that have the answer to their plan, and have written; others may go on ``behind`` it."""
    call_id = replace(CallId.named(generation, number, "save", str(place)), behind=behind)
    ranks = [OneRank(rank, call_id, value=10 * number + rank, **options) for rank in range(world_size)]
    answers = [one.plan(coordinator) for one in ranks]
    for one, answer in zip(ranks, answers, strict=True):
        one.finish_plan(answer.result(0))
    return ranks


class DirectLink:
    """A deputy's way to whatever coordinator ``coordinators`` ends with; each message is there at once.

    What a coordinator is to do before it answers, such as to be another one by then, is ``before``'s.
    """

    group = "g"

    def __init__(
        self,
        coordinators: list[Coordinator],
        deputy: str,
        before: Any = lambda what: None,
        *,
        patience_s: float = 0,
    ) -> None:
        """``patience_s``: how long a delivered part waits for those of others."""
        self._coordinators, self._deputy, self._before = coordinators, deputy, before
        self._patience_s = patience_s
        self.sent: list[tuple[Any, ...]] = []

    def _ask(self, what: str, call_id: bytes, rank: int, ask: Any) -> Any:
        self.sent.append((what, pickle.loads(call_id).number, rank))
        self._before(what)
        return told_to_deputy(lambda: ask(self._coordinators[-1], pickle.loads(call_id)))

    def hand_over(self, call_id: bytes, rank: int) -> Any:
        return self._ask("hand over", call_id, rank, lambda to, one: to.hand_over(one, rank, self._deputy))

    def hand_back(self, call_id: bytes, rank: int, why: str) -> Any:
        return self._ask("hand back", call_id, rank, lambda to, one: to.hand_back(one, rank, self._deputy, why))

    def deliver(self, call_id: bytes, rank: int, phase: str, message: bytes, again: bool) -> Any:
        def ask(to: Coordinator, one: CallId) -> bytes:
            return to.contribute(one, rank, phase, message, again=again).result(self._patience_s)

        return self._ask(phase, call_id, rank, ask)

    def fail(self, call_id: bytes, rank: int, error: bytes, traced: str) -> Any:
        failure = RankFailure.of_deputy(error, rank=rank, phase="write", traced=traced)
        return self._ask("fail", call_id, rank, lambda to, one: to.fail(one, rank, failure))

    def progress(self, call_id: bytes, rank: int, mark: int, nbytes: int) -> Any:
        def ask(to: Coordinator, one: CallId) -> Any:
            return to.deputy_progress(one, rank, self._deputy, mark, nbytes)

        return self._ask("progress", call_id, rank, ask)

    def reconnect(self) -> None:
        """The coordinator of the moment is always in reach."""
