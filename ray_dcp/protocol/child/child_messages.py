"""What a process and the child that writes for it say to each other; a job has the same number in all of it."""

from __future__ import annotations

from dataclasses import dataclass

from ray_dcp.protocol.node_agent import DeputyJob


@dataclass(frozen=True, slots=True)
class Hello:
    """The child is up."""

    pid: int


@dataclass(frozen=True, slots=True)
class TakeJob:
    """Write this, and commit it should this process be gone by then."""

    number: int
    job: DeputyJob


@dataclass(frozen=True, slots=True)
class Taken:
    """The job is the child's; ``why_not`` says why it is not, empty where it is."""

    number: int
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """The job's file is written and durable. ``crcs`` are its checksums, as in a ``SealedPart``."""

    number: int
    crcs: bytes


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The job's file could not be written: a pickled error, and its traceback."""

    number: int
    error: bytes
    traced: str


@dataclass(frozen=True, slots=True)
class JobOver:
    """The save is committed or has failed: the child need not know of it any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Knock:
    """Is anybody there?"""


@dataclass(frozen=True, slots=True)
class KnockHeard:
    """Yes."""


ToChild = TakeJob | JobOver | Knock
FromChild = Hello | Taken | Written | WriteFailed | KnockHeard

__all__ = [
    "FromChild",
    "Hello",
    "JobOver",
    "Knock",
    "KnockHeard",
    "TakeJob",
    "Taken",
    "ToChild",
    "WriteFailed",
    "Written",
]
