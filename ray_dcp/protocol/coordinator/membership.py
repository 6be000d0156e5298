"""Who is in a group: ranks gather, and when all are there they are a new generation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.errors import GroupError, RankConflictError, StaleGenerationError
from ray_dcp.settings import Limits


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """One process that wants to be a rank."""

    rank: int
    world_size: int
    member: str
    """A name for the process, unlike any other ever: a process that restarts is another member."""
    incarnation: str | None = None
    """A name for all processes started together (a TorchTrainer worker group); None where nobody says."""
    limits: Limits = field(default_factory=Limits)
    """The limits of the whole group: all ranks must ask for the same."""
    beats: bool = False
    """Whether the process tells that it lives: it is not an actor, whose death Ray would tell."""


@dataclass(frozen=True, slots=True)
class MembershipRecord:
    """All that a coordinator which starts over must know to go on with a group."""

    generation: int = 0
    members: tuple[JoinRequest, ...] = ()
    """The members of the current generation, in rank order."""
    lost: Mapping[int, str] = field(default_factory=dict)
    incarnations: tuple[str, ...] = ()


def resolve(future: Future[Any], answer: Any) -> None:
    """Answer a rank; one that has stopped waiting (its call was cancelled) must not cost the others their answers."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(answer)


class Membership:
    """The current generation of a group, and the one that is forming. Not thread-safe: the coordinator locks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.generation = 0
        self.world_size = 0
        self.lost: dict[int, str] = {}
        """Ranks of the current generation that are gone, and why."""
        self._members: tuple[JoinRequest, ...] = ()
        self._forming: dict[int, tuple[JoinRequest, Future[int]]] = {}
        self._incarnations: list[str] = []
        """All incarnations, in the order in which they first came: an older one never comes back."""

    def join(self, request: JoinRequest) -> Future[int]:
        """A future of the new generation, which is there when the last rank has joined.

        Raises ``RankConflictError`` where the request contradicts those already waiting, and ``StaleGenerationError``
        where a newer incarnation has taken its place.
        """
        if request in self._members and request.rank not in self.lost:
            again: Future[int] = Future()  # it has not heard the first answer
            again.set_result(self.generation)
            return again
        self._supersede_older_incarnation(request)
        self._require_no_conflict(request)
        future: Future[int] = Future()
        self._forming[request.rank] = (request, future)
        if len(self._forming) == request.world_size:
            self._form()
        return future

    def withdraw(self, request: JoinRequest) -> list[int]:
        """Forget a waiting request; returns the ranks that had not joined."""
        missing = sorted(set(range(request.world_size)) - self._forming.keys())
        waiting = self._forming.get(request.rank)
        if waiting is not None and waiting[0].member == request.member:
            del self._forming[request.rank]
        return missing

    def lose(self, member: str, why: str) -> int | None:
        """Note that a process is gone; returns its rank if it was in the current generation."""
        for waiting, (request, future) in list(self._forming.items()):
            if request.member == member:
                del self._forming[waiting]
                future.cancel()
        rank = next((one.rank for one in self._members if one.member == member), None)
        if rank is None:
            return None
        self.lost.setdefault(rank, why)
        return rank

    def knows(self, member: str) -> bool:
        """Whether ``member`` is in the current generation or waits for the next."""
        waiting = (request for request, _ in self._forming.values())
        return any(one.member == member for one in (*self._members, *waiting))

    def member(self, rank: int) -> str:
        return self._members[rank].member

    @property
    def limits(self) -> Limits:
        """The limits of the current generation, or else of those who wait for the next; defaults without either."""
        waiting = [request for request, _ in self._forming.values()]
        return (*self._members, *waiting)[0].limits if self._members or waiting else Limits()

    @property
    def beating(self) -> list[str]:
        """The names of live members, and of those who wait, that are to tell that they live."""
        live = [one for one in self._members if one.rank not in self.lost]
        return [one.member for one in (*live, *(request for request, _ in self._forming.values())) if one.beats]

    @property
    def record(self) -> MembershipRecord:
        """The record that ``restore`` takes."""
        return MembershipRecord(self.generation, self._members, dict(self.lost), tuple(self._incarnations))

    def restore(self, record: MembershipRecord) -> None:
        """Go on where an earlier membership was. Ranks that were waiting to join come again by themselves."""
        self.generation = record.generation
        self.world_size = len(record.members)
        self._members = record.members
        self.lost = dict(record.lost)
        self._incarnations = list(record.incarnations)

    @property
    def num_live(self) -> int:
        return len(self._members) - len(self.lost) + len(self._forming)

    def _form(self) -> None:
        self.generation += 1
        self.world_size = len(self._forming)
        self.lost = {}
        self._members = tuple(self._forming[rank][0] for rank in range(self.world_size))
        formed, self._forming = self._forming, {}
        for _, future in formed.values():
            resolve(future, self.generation)

    def _supersede_older_incarnation(self, request: JoinRequest) -> None:
        """Let a newer incarnation take the place of one that still waits; refuse a process that was left behind."""
        if request.incarnation is None or request.incarnation in self._incarnations[-1:]:
            return
        stale = StaleGenerationError(group=self._name, generation=self.generation, current=self.generation + 1)
        if request.incarnation in self._incarnations:
            raise stale
        self._incarnations.append(request.incarnation)
        for _, future in self._forming.values():
            if not future.done():
                future.set_exception(stale)
        self._forming = {}

    def _require_no_conflict(self, request: JoinRequest) -> None:
        if not 0 <= request.rank < request.world_size:
            raise GroupError(f"rank {request.rank} is not below world_size {request.world_size}", group=self._name)
        waiting = self._forming.get(request.rank)
        if waiting is not None and waiting[0].member != request.member:
            raise RankConflictError(
                f"two processes join as rank {request.rank}: {waiting[0].member} is waiting already, "
                f"{request.member} was refused. Give each process a rank of its own",
                group=self._name,
                rank=request.rank,
            )
        for other, _ in self._forming.values():
            if other.world_size != request.world_size:
                raise RankConflictError(
                    f"rank {request.rank} joins with world_size {request.world_size}, "
                    f"rank {other.rank} ({other.member}) with {other.world_size}",
                    group=self._name,
                    rank=request.rank,
                )
            if other.limits != request.limits:
                raise RankConflictError(
                    f"rank {request.rank} joins with {request.limits}, rank {other.rank} ({other.member}) with "
                    f"{other.limits}: all ranks need the same",
                    group=self._name,
                    rank=request.rank,
                )
