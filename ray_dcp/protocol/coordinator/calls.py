"""``Calls``: the calls of one generation at its coordinator, and which rank's call is which.

Every rank numbers its own calls, and a healthy rank's number is its *position* in the sequence of all. A rank that has
skipped a call, or made one too many, is out by one from then on: so calls are matched by what they are, their kind and
checkpoint id, and a rank's numbers are shifted to where it is found to be. ``docs/architecture.md`` ("A call") has the
rules and why they bring all ranks in step again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ray_dcp.errors import GroupError, OutOfStepError, without_keys
from ray_dcp.protocol.coordinator.open_call import OpenCall
from ray_dcp.protocol.exception import CheckpointException, RankFailure
from ray_dcp.protocol.messages import CallId
from ray_dcp.settings import Limits, Phase

PATIENCE_S = 30.0
"""How long a rank waits in a call that has failed without it before, in case that the others make it once more."""
_REMEMBERED_CALLS = 64
"""How many ended calls are remembered by how they ended, so that a late part of one is answered with that."""
_REMEMBERED_ANSWERS = 2
"""How many ended calls are remembered with all answers: a rank may ask again for one that got lost on its way."""
_RECORDED_FAILURES = 8
"""How many failed calls a coordinator that starts over knows of: a rank may not have heard of them yet."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """How a call of this generation has failed."""

    position: int
    call_id: CallId
    failure: CheckpointException


@dataclass(frozen=True, slots=True)
class CallsRecord:
    """What a coordinator that starts over must know of the calls before."""

    failed: tuple[FailedCall, ...] = ()
    shifts: tuple[tuple[int, int], ...] = ()
    """(rank, shift) of each rank whose numbers are not its positions: its position is its number plus the shift."""
    hands_over: bool = False
    """Whether any rank has handed over a save."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A call, its place in the sequence, and the ranks in it with their numbers for it."""

    call: OpenCall
    call_id: CallId
    position: int
    numbers: dict[int, int] = field(default_factory=dict)
    instead_of: _Entry | None = None
    """The failed call that this may stand for: the first rank here was not in that, and may be alone as others were."""
    settled: bool = False
    """Whether nobody can come to it any more: all were in a later call that worked, or it stood for another one."""
    restored: bool = False
    """Whether it failed at an earlier coordinator: which ranks were in it is not known."""
    ended_as: int = -1
    """Its place among the calls that have ended here, in the order in which they did."""

    def may_be(self, call_id: CallId) -> bool:
        """Whether a rank that makes the call ``call_id`` may mean this one. Its checkpoint id may be empty."""
        mine, other = self.call_id.checkpoint_id, call_id.checkpoint_id
        is_over = self.settled or (self.call.ended and self.call.failure is None)
        return not is_over and self.call_id.kind == call_id.kind and (mine == other or not mine or not other)


@dataclass(slots=True)
class _Way:
    """How far one rank has come, as what it sends says, and which of its saves before that go on behind it."""

    reached: int = -1
    """The position of the last call of which it has sent a part."""
    behind: set[int] = field(default_factory=set)

    def go_on(self, position: int, behind: Collection[int]) -> None:
        """Note a part of the call at ``position`` that was sent while the saves at ``behind`` went on.

        It may have come late, or once more. What the rank was once seen to have left it has left for good.
        """
        self.behind = {one for one in self.behind if one >= position or one in behind}
        if position > self.reached:
            self.behind |= {position, *(one for one in behind if one > self.reached)}
            self.reached = position

    def has_left(self, position: int) -> bool:
        """Whether the rank has no part in the call at ``position`` any more."""
        return position < self.reached and position not in self.behind


class Calls:
    """The calls of one generation: see the module. Not thread-safe: the coordinator locks.

    ``open_call`` makes a new call; ``on_change`` is called when ``record`` has changed by a shift.
    """

    def __init__(
        self, *, group: str, world_size: int, open_call: Callable[[CallId], OpenCall], on_change: Callable[[], None]
    ) -> None:
        self._group = group
        self._world_size = world_size
        self._open_call = open_call
        self._on_change = on_change
        self.hands_over = False
        """Whether any rank has handed over a save."""
        self._entries: list[_Entry] = []
        self._by_rank: dict[int, dict[int, _Entry]] = {rank: {} for rank in range(world_size)}
        self._forgotten: dict[int, int] = {}
        """By rank: its calls below this number have ended and are forgotten."""
        self._shifts: dict[int, int] = {}
        self._ways = {rank: _Way() for rank in range(world_size)}
        """How far each rank is."""
        self._ways_of_saves = {rank: _Way() for rank in range(world_size)}
        """The same for who looks at a save, which may go on in the background of barriers and other saves' plans."""
        self._count = itertools.count()

    def __iter__(self) -> Iterator[OpenCall]:
        return iter([entry.call for entry in self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, call_id: CallId, rank: int, own: RankFailure | None = None) -> OpenCall:
        """The call that this rank calls ``call_id``: found, joined or opened. It may have failed, or fail by this.

        ``own`` is what the rank has failed with: calls that fail because of this one fail with that first.
        Raises ``GroupError`` for a call that has ended long ago.
        """
        known = self._by_rank[rank].get(call_id.number)
        if known is not None:
            return known.call
        if call_id.number < self._forgotten.get(rank, 0):
            raise GroupError(f"{call_id.kind} #{call_id.number} has ended long ago", group=self._group)
        return self._place(call_id, rank, own).call

    def note_hand_over(self) -> None:
        """Note that a rank hands over a save: a coordinator that starts over then reckons with deputies."""
        if not self.hands_over:
            self.hands_over = True
            self._on_change()

    @property
    def open_saves(self) -> list[OpenCall]:
        """The saves that go on, in their order."""
        saves = [entry for entry in self._entries if entry.call.is_save and not entry.call.ended]
        return [entry.call for entry in sorted(saves, key=lambda entry: entry.position)]

    def may_be_announced(self, call: OpenCall, rank: int) -> bool:
        """Whether this rank may have a deputy of which only the coordinator before this one has heard."""
        return self.hands_over and call.may_be_announced(rank)

    def find(self, call_id: CallId, rank: int) -> OpenCall | None:
        """The call that this rank calls ``call_id``; None where it is not known."""
        known = self._by_rank.get(rank, {}).get(call_id.number)
        return None if known is None else known.call

    def part_sent(self, call_id: CallId, rank: int, phase: Phase) -> None:
        """Note that a rank is about to send a part: calls that it leaves by that fail, and so does this if others left.

        A call has ended on a rank that left it, and a coordinator that has died since took the news along.
        """
        entry = self._by_rank[rank][call_id.number]
        is_first = not entry.call.has_parts
        self._ways[rank].go_on(entry.position, ())
        if call_id.kind != "barrier":
            in_caller = phase in (Phase.PLAN, Phase.GLOBAL_PLAN)  # what comes after it has its turn
            behind = [self._position_of(number, rank) for number in call_id.behind] if in_caller else ()
            self._ways_of_saves[rank].go_on(entry.position, behind)
        for earlier in self._entries:
            if not earlier.call.ended and earlier.position < entry.position:
                self._fail_if_left(earlier, rank)
        for other in range(self._world_size) if is_first else ():
            self._fail_if_left(entry, other)

    def fail_left(self) -> None:
        """Fail the calls that wait for a rank which has gone on, and of which no deputy has been heard by now."""
        for entry in self._entries:
            if entry.call.is_save and entry.call.started_over and not entry.call.ended:
                for rank in range(self._world_size):
                    self._fail_if_left(entry, rank)

    def _position_of(self, number: int, rank: int) -> int:
        known = self._by_rank[rank].get(number)
        return number + self._shifts.get(rank, 0) if known is None else known.position

    def _fail_if_left(self, entry: _Entry, rank: int) -> None:
        way = (self._ways_of_saves if entry.call_id.kind == "save" else self._ways)[rank]
        is_deputys = entry.call.has_handed_over(rank) or self.may_be_announced(entry.call, rank)
        if way.has_left(entry.position) and entry.call.waits_for(rank) and not is_deputys:
            message = f"rank {rank} has left this {entry.call_id.kind} and gone on to a later call"
            entry.call.fail([RankFailure(rank, str(entry.call.phase_now), "GroupError", message, "")])

    def ended(self, call: OpenCall) -> None:
        """Note that a call has ended. If it worked, all ranks were in it: nobody comes to an earlier one any more."""
        entry = next((one for one in self._entries if one.call is call), None)
        if entry is not None:
            entry.ended_as = next(self._count)
        if entry is not None and call.failure is None:
            for earlier in self._entries:
                earlier.settled |= earlier.call.failure is not None and earlier.position <= entry.position

    @property
    def record(self) -> CallsRecord:
        """The record that ``restore`` takes."""
        failed = [
            FailedCall(entry.position, entry.call_id, entry.call.failure)
            for entry in self._entries
            if entry.call.failure is not None and not entry.settled
        ]
        return CallsRecord(tuple(failed[-_RECORDED_FAILURES:]), tuple(sorted(self._shifts.items())), self.hands_over)

    def restore(self, record: CallsRecord) -> None:
        """Go on where an earlier coordinator was. Calls that it has failed stay so: ranks may have been told."""
        self._shifts = dict(record.shifts)
        self.hands_over = record.hands_over
        for failed in record.failed:
            call = self._open_call(failed.call_id)
            self._entries.append(_Entry(call, failed.call_id, failed.position, restored=True))
            call.restore_failure(failed.failure)

    # Which call is which.

    def _place(self, call_id: CallId, rank: int, own: RankFailure | None) -> _Entry:
        position = call_id.number + self._shifts.get(rank, 0)
        same = [entry for entry in self._entries if rank not in entry.numbers and entry.may_be(call_id)]
        here = next((entry for entry in same if entry.position == position), None)
        if here is not None:
            return self._join(here, call_id, rank)
        missed = next((one for one in same if one.call.failure is not None and not one.restored), None)
        if missed is None and not any(entry.position == position for entry in self._entries):
            return self._open(call_id, rank, position)
        # The rank has slipped: its position is that of another call.
        going_on = next((entry for entry in same if not entry.call.ended), None)
        if going_on is not None:
            return self._join(going_on, call_id, rank)
        waiting = [
            one
            for one in self._entries
            if not one.call.ended and one.call.waits_for(rank) and rank not in one.numbers and one.position >= position
        ]
        if not waiting:
            stands_for = missed or self._out_of_step_at(position)
            return self._open(call_id, rank, max(position, self._next_position), instead_of=stands_for)
        if missed is not None:
            self._take_out_of_sequence(rank)
            return self._enter(missed, call_id, rank)
        return self._open_against(waiting, call_id, rank, own)

    def _out_of_step_at(self, position: int) -> _Entry | None:
        """A call in which other ranks were when they met there in two: this rank may be in a third, all by itself."""
        return next(
            (
                entry
                for entry in self._entries
                if entry.position == position
                and not entry.settled
                and entry.call.failure is not None
                and isinstance(entry.call.failure.__cause__, OutOfStepError)
            ),
            None,
        )

    @property
    def _next_position(self) -> int:
        return 1 + max((entry.position for entry in self._entries), default=-1)

    def _open_against(self, waiting: Sequence[_Entry], call_id: CallId, rank: int, own: RankFailure | None) -> _Entry:
        """Open a call while others wait for its rank in other calls: none of these can come to an end, so all fail.

        Those that stand for a failed call end as that did: their ranks meant it, and are behind.
        """
        out_of_step = [one for one in waiting if one.instead_of is None]
        entry = self._open(call_id, rank, waiting[0].position)
        for behind in waiting:
            self._fail_as_missed(behind)
        if out_of_step:
            failures = [self._out_of_step(out_of_step[0], entry, rank)]
            for one in (entry, *out_of_step):
                one.call.fail([own, *failures] if own is not None else failures)
        return entry

    def _fail_as_missed(self, entry: _Entry) -> None:
        """End a call that stands for a failed one as that one has ended; leave any other alone."""
        missed = entry.instead_of
        if missed is not None and missed.call.failure is not None and not entry.call.ended:
            entry.position, entry.settled = missed.position, True
            for member in entry.numbers:
                self._take_out_of_sequence(member)
            entry.call.fail(list(missed.call.failure.rank_failures))

    def give_up_waiting(self, limits: Limits) -> None:
        """End calls to which, it seems, nobody else comes: they stand for one that has failed for the others before."""
        for entry in self._entries:
            if entry.instead_of is not None and entry.call.open_s > min(PATIENCE_S, limits.arrival_timeout_s):
                self._fail_as_missed(entry)

    def _out_of_step(self, theirs: _Entry, mine: _Entry, rank: int) -> RankFailure:
        error = OutOfStepError(
            group=self._group,
            rank=rank,
            call=_named(mine.call_id),
            others=sorted(theirs.numbers),
            others_call=_named(theirs.call_id),
        )
        return RankFailure.from_exception(error, rank=rank, phase=Phase.COLLECT)

    def _take_out_of_sequence(self, rank: int) -> None:
        """Give the call that this rank makes, or waits in, no position of its own: its next call has that."""
        self._shift(rank, self._shifts.get(rank, 0) - 1)

    def _shift(self, rank: int, shift: int) -> None:
        if shift != self._shifts.get(rank, 0):
            self._shifts[rank] = shift
            self._on_change()

    def _join(self, entry: _Entry, call_id: CallId, rank: int) -> _Entry:
        self._shift(rank, entry.position - call_id.number)
        return self._enter(entry, call_id, rank)

    def _enter(self, entry: _Entry, call_id: CallId, rank: int) -> _Entry:
        entry.numbers[rank] = call_id.number
        self._by_rank[rank][call_id.number] = entry
        if len(entry.numbers) == self._world_size:
            entry.instead_of = None  # all mean this one
        return entry

    def _open(self, call_id: CallId, rank: int, position: int, *, instead_of: _Entry | None = None) -> _Entry:
        entry = _Entry(self._open_call(call_id), call_id, position, instead_of=instead_of)
        self._entries.append(entry)
        self._join(entry, call_id, rank)
        self._forget_old()
        return entry

    def _forget_old(self) -> None:
        ended = sorted((one for one in self._entries if one.call.ended), key=lambda one: one.ended_as)
        for old in ended[:-_REMEMBERED_ANSWERS]:
            old.call.forget_parts()
        for old in ended[:-_REMEMBERED_CALLS]:
            self._entries.remove(old)
            for rank, number in old.numbers.items():
                del self._by_rank[rank][number]
                self._forgotten[rank] = max(self._forgotten.get(rank, 0), number + 1)


def _named(call_id: CallId) -> str:
    about = without_keys(call_id.checkpoint_id)
    return f"{call_id.kind} of {about}" if about else call_id.kind
