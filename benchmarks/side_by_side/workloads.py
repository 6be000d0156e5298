"""What is measured: states, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from side_by_side.probes import Limit
from side_by_side.sides import OVERLAPPED, UNCHECKED, UNCOMPARED
from side_by_side.states import Replicated, Scalars, State, Tensors

NUM_RANKS = 2
NUM_READERS = 8
"""Of the spread workload."""
LIMIT_OF: Mapping[str, Limit] = {
    "save": Limit.WRITE,
    "unsynced": Limit.CACHE_WRITE,
    "load": Limit.READ,
    "reshard": Limit.READ,
    "stall": Limit.COPY,
    "staged": Limit.COPY,
    "durable": Limit.WRITE,
}
"""Each measure, and what it is divided by. ``unsynced`` is a save without fsync. An ``async_save`` stalls until it
returns, is staged when the state may change, and durable when the checkpoint is."""
_OF_ASYNC_SAVES = ("stall", "staged", "durable")
_NUM_LARGE = 64
_NUM_SPREAD = 8
"""As large as the large ones: what a load reads of each does not depend on how many there are."""
_LARGE_ROWS = 1024
_SMALL_ROWS, _SMALL_COLUMNS = 32, 128
"""Of a rank: 16 KiB."""
_VALUE_NBYTES = 4
"""All are float32."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    state: State
    measures: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    """Measures that ray_dcp also does with its checksums turned off."""
    uncompared: tuple[str, ...] = ()
    """Measures that ray_dcp also does without comparing replicas."""
    overlapped: tuple[str, ...] = ()
    """Measures that ray_dcp also does while it stages beside the training."""

    def measures_of(self, side: str) -> tuple[str, ...]:
        variants = {UNCHECKED: self.unchecked, UNCOMPARED: self.uncompared, OVERLAPPED: self.overlapped}
        return variants.get(side, self.measures)

    @property
    def variants(self) -> list[str]:
        """Of ray_dcp, each to be compared with it alone."""
        return [side for side in (UNCHECKED, UNCOMPARED, OVERLAPPED) if self.measures_of(side)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Saved by the ranks, loaded by more of them: what counts is how much these read."""

    name: str
    state: State
    num_readers: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Saved behind ranks that compute: what counts is how fast they do."""

    name: str
    state: State


@dataclass(frozen=True, slots=True)
class First:
    """Saved by ranks that are new: what counts is how long their first asynchronous save takes."""

    name: str
    state: State


@dataclass(frozen=True, slots=True)
class Steady:
    """Saved again and again: what counts is memory."""

    name: str
    state: State
    num_saves: int


def all_workloads(large_nbytes: int, num_small: int, num_scalars: int) -> dict[str, Workload]:
    """By name. ``large_nbytes`` is rounded so that the tensors are of one size, and can be halved both ways."""
    large = _large(large_nbytes)
    small = Tensors(num_small, NUM_RANKS * _SMALL_ROWS, _SMALL_COLUMNS)
    of_large = ("save", "load", "reshard", "unsynced")
    workloads = (
        Workload("large", f"{_NUM_LARGE} large tensors", large, of_large, unchecked=("save", "load")),
        Workload("small", f"{num_small:,} tensors of 16 KiB a rank", small, ("save", "load")),
        Workload("scalars", f"{num_scalars:,} scalars", Scalars(num_scalars), ("save", "load")),
        Workload(
            "replicas", "a model that every rank holds", _replicated(large_nbytes), ("save",), uncompared=("save",)
        ),
        Workload(
            "async",
            f"{_NUM_LARGE} large tensors, async_save",
            large,
            _OF_ASYNC_SAVES,
            overlapped=_OF_ASYNC_SAVES,
        ),
        Workload("async_replicas", "a replicated model, async_save", _replicated(large_nbytes // 2), _OF_ASYNC_SAVES),
    )
    return {workload.name: workload for workload in workloads}


def drain(large_nbytes: int) -> Drain:
    """Of the large tensors."""
    return Drain("drain", _large(large_nbytes))


def first(large_nbytes: int) -> First:
    """Of the large tensors."""
    return First("first", _large(large_nbytes))


def steady(large_nbytes: int, num_saves: int) -> Steady:
    """Of the large tensors."""
    return Steady("steady", _large(large_nbytes), num_saves)


def spread(large_nbytes: int, num_readers: int) -> Spread:
    """Of some tensors as the large ones are."""
    return Spread("spread", Tensors(_NUM_SPREAD, _LARGE_ROWS, _columns(large_nbytes, num_readers)), num_readers)


def _large(nbytes: int) -> Tensors:
    return Tensors(_NUM_LARGE, _LARGE_ROWS, _columns(nbytes, NUM_RANKS))


def _replicated(large_nbytes: int) -> Replicated:
    """Matrices of 8 MiB, so that those an eighth of it are compared whole; smaller where all is."""
    rows = min(2048, max(8, large_nbytes // (2**19)))
    return Replicated(max(1, large_nbytes // Replicated(1, rows).nbytes), rows)


def _columns(large_nbytes: int, num_parts: int) -> int:
    columns = large_nbytes // (_NUM_LARGE * _LARGE_ROWS * _VALUE_NBYTES)
    return max(num_parts, columns - columns % num_parts)
