"""What is measured: states, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from side_by_side.probes import Limit
from side_by_side.states import Scalars, State, Tensors

NUM_RANKS = 2
LIMIT_OF: Mapping[str, Limit] = {
    "save": Limit.WRITE,
    "load": Limit.READ,
    "reshard": Limit.READ,
    "stall": Limit.COPY,
    "staged": Limit.COPY,
    "durable": Limit.WRITE,
}
"""Each measure, and what it is divided by. An ``async_save`` stalls until it returns, is staged when the state may
change, and durable when the checkpoint is."""
_NUM_LARGE = 64
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


def all_workloads(large_nbytes: int, num_small: int, num_scalars: int) -> dict[str, Workload]:
    """By name. ``large_nbytes`` is rounded so that the tensors are of one size, and can be halved both ways."""
    columns = large_nbytes // (_NUM_LARGE * _LARGE_ROWS * _VALUE_NBYTES)
    large = Tensors(_NUM_LARGE, _LARGE_ROWS, max(NUM_RANKS, columns - columns % NUM_RANKS))
    small = Tensors(num_small, NUM_RANKS * _SMALL_ROWS, _SMALL_COLUMNS)
    workloads = (
        Workload("large", f"{_NUM_LARGE} large tensors", large, ("save", "load", "reshard")),
        Workload("small", f"{num_small:,} tensors of 16 KiB a rank", small, ("save", "load")),
        Workload("scalars", f"{num_scalars:,} scalars", Scalars(num_scalars), ("save", "load")),
        Workload("async", f"{_NUM_LARGE} large tensors, async_save", large, ("stall", "staged", "durable")),
    )
    return {workload.name: workload for workload in workloads}
