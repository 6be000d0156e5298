"""A rank's part of a save in the hands of its deputy, a process that has neither torch nor the rank's objects.

What the rank has prepared is bytes that a deputy passes on without looking into them: what the rank had sent and heard
before (``HandedOver``), and the message with its results, in which the checksums are blank (``SealedPart``). As a rank
does, ``DeputyCall`` sends to a coordinator that starts over what that one's predecessor had.
"""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ray_dcp.errors import CoordinatorLostError

WRITE_PHASE = "write"
"""The word of the only phase whose part a deputy makes: every save ends with it."""
MAX_RESTARTS = 5
"""Restarts of the coordinator that one exchange waits for: one that dies again and again is not worth more."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A part that a rank has sent, and its answer."""

    phase: str
    message: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class HandedOver:
    """All that a deputy must know of a rank's call: its pickled ``CallId``, and what was exchanged in it before."""

    call_id: bytes
    rank: int
    exchanged: tuple[Exchanged, ...]


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A rank's encoded write part, in which checksums are blank, and the checksums, in the order of the blocks.

    Rank and deputy make the same bytes of it (``encoded``), so it does not matter whose come, or whether both do.
    """

    prepared: bytes
    crcs: bytes
    """One 32-bit number for each block, in the byte order of the machine."""

    def encoded(self) -> bytes:
        """The message that is sent."""
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Told:
    """What a coordinator says to a deputy, which needs no torch to be read."""

    answer: bytes = b""
    """An answer, encoded for the rank; meaningless where there is a ``text``."""
    failure: bytes = b""
    """What the call has failed with: a pickled exception, for the rank."""
    text: str = ""
    """What that says; empty where all is well."""
    coordinator_lost: bool = False
    """Whether it is the coordinator that is missing something: it has started over."""
    taken_back: bool = False
    """Whether the deputy has given the part back, or was refused it: a rank that lives sends it by itself."""
    started_over: bool = False
    """Whether the coordinator died during the call: nobody here knows how far it had come."""

    @property
    def failed(self) -> bool:
        return bool(self.text)


class DeputyLink(Protocol):
    """A deputy's way to the coordinator of one group. All may raise ``CoordinatorLostError``."""

    group: str

    def hand_over(self, call_id: bytes, rank: int) -> Told:
        """Announce that from now on the rank's part of this call is taken by this deputy."""
        ...

    def hand_back(self, call_id: bytes, rank: int, why: str) -> Told:
        """Announce that it is not any more: the rank does it by itself, where it lives."""
        ...

    def deliver(self, call_id: bytes, rank: int, phase: str, message: bytes, again: bool) -> Told:
        """The coordinator's answer to a part of the rank, once all parts are there."""
        ...

    def fail(self, call_id: bytes, rank: int, error: bytes, traced: str) -> Told:
        """Fail the call with a pickled error, which has come up while this rank's part was written."""
        ...

    def progress(self, call_id: bytes, rank: int, mark: int, nbytes: int) -> Told:
        """Tell how far the rank's part is; what is told back says whether the save has failed meanwhile."""
        ...

    def reconnect(self) -> None:
        """Return when there is a coordinator again; raises ``CoordinatorLostError`` when none comes in time."""
        ...


class DeputyCall:
    """A deputy in one call of one rank. ``after`` is what it has of that rank's saves before, where that goes on.

    A coordinator that starts over hears of the earlier saves of a rank first: it commits saves in their order.
    """

    def __init__(self, handed_over: HandedOver, link: DeputyLink, *, after: DeputyCall | None = None) -> None:
        self.started_over = False
        """Whether the coordinator died during this call: nobody here knows how far it had come."""
        self.told: Told | None = None
        """How the call has ended, once that is known."""
        self._handed = handed_over
        self._link = link
        self._after = after

    def hand_over(self) -> Told:
        """Announce the deputy to the coordinator. The rank has handed over when this returns without a failure."""
        for _ in range(MAX_RESTARTS):
            try:
                return self._announced(self._announce())
            except CoordinatorLostError:
                ended = self._catch_up()
                if ended is not None:
                    return self._end(ended)
        return self._announced(self._announce())

    def deliver(self, message: bytes) -> Told:
        """Send the rank's write part; returns how the call has ended, or that the part is the rank's own again."""
        try:
            return self._end(self._delivered(message))
        except CoordinatorLostError as error:
            return self._end(self._handed_back(error))

    def fail(self, error: Exception) -> Told:
        """Fail the call for all ranks, since the part cannot be written. Returns how the call has ended."""
        traced = "".join(traceback.format_exception(error))
        for _ in range(MAX_RESTARTS):
            try:
                told = self._link.fail(self._handed.call_id, self._handed.rank, _pickled(error), traced)
                return self._end(told if told.failed else _failed_with(error))
            except CoordinatorLostError:
                self.started_over = True
                with suppress(CoordinatorLostError):
                    self._link.reconnect()
        return self._end(_failed_with(error))

    def hand_back(self, error: Exception) -> Told:
        """Give the part back to the rank, since this deputy cannot go on: else nobody would look at how the rank is."""
        try:
            return self._end(self._handed_back(error))
        except Exception as undelivered:  # noqa: BLE001 - the rank must hear of it, whatever the way to others says
            told = _failed_with(undelivered)
            return self._end(replace(told, taken_back=True))

    def announce_again(self) -> None:
        """Announce to a coordinator that starts over this call's deputy, and before it those of earlier calls."""
        if self.told is None:
            self._announce()

    def _announce(self) -> Told:
        """Announce this call's deputy, and before it those of earlier calls that go on.

        The coordinator may have started over since: it has planned this save, and knows nothing of the earlier ones.
        """
        if self._after is not None and self._after.told is not None:
            self._after = None
        if self._after is not None:
            self._after.announce_again()
        return self._link.hand_over(self._handed.call_id, self._handed.rank)

    def _announced(self, told: Told) -> Told:
        return self._end(told) if told.failed else told

    def _end(self, told: Told) -> Told:
        self.told, self._after = replace(told, started_over=self.started_over), None
        return self.told

    def _sent(self, phase: str, message: bytes) -> Told:
        told = self._link.deliver(self._handed.call_id, self._handed.rank, phase, message, self.started_over)
        if told.coordinator_lost:
            raise CoordinatorLostError(told.text, group=self._link.group)
        return told

    def _delivered(self, message: bytes) -> Told:
        for _ in range(MAX_RESTARTS):
            try:
                return self._sent(WRITE_PHASE, message)
            except CoordinatorLostError:
                ended = self._catch_up()
                if ended is not None:
                    return ended
        return self._sent(WRITE_PHASE, message)

    def _catch_up(self) -> Told | None:
        """Send to a coordinator that starts over what its predecessor had; the answers must be those it gave.

        Returns how the call has ended by that, if it has.
        """
        self.started_over = True
        self._link.reconnect()
        try:
            self.announce_again()
            for earlier in self._handed.exchanged:
                told = self._sent(earlier.phase, earlier.message)
                if told.failed:
                    return told
                if told.answer != earlier.answer:
                    other = f"it has started over and came to another result in {earlier.phase!r}"
                    return self._handed_back(CoordinatorLostError(other, group=self._link.group))
        except CoordinatorLostError:
            return None  # it died once more; whoever sends next finds out
        return None

    def _handed_back(self, error: Exception) -> Told:
        """Give the part back to the rank, which may live, and can look closer; a dead rank fails the call by that."""
        told = _failed_with(error)
        with suppress(CoordinatorLostError):
            self._link.hand_back(self._handed.call_id, self._handed.rank, told.text)
        return Told(failure=told.failure, text=told.text, taken_back=True)


def _failed_with(error: Exception) -> Told:
    return Told(failure=_pickled(error), text=f"{type(error).__name__}: {error}")


def _pickled(error: Exception) -> bytes:
    """``error``, or where that cannot be pickled what it says."""
    try:
        return pickle.dumps(error)
    except Exception:  # noqa: BLE001 - anybody's class may raise anything here; the failure then travels as text
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
