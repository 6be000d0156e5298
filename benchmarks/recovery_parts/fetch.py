"""How soon a group that lost a rank to SIGKILL has its state again: from its node's memory, and from storage.

Or a group that lost a node, whose agent had another one keep a copy.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util import list_named_actors

import ray_dcp
from ray_dcp.cluster.link import NAMESPACE
from ray_dcp.store.location.urls import url_scheme
from recovery_parts.cluster import kill_node_of
from recovery_parts.fetched import COLD, MEMORY, STORAGE, Fetch

NUM_RANKS = 2
_ROWS, _COLUMNS = 256, 8192
_TENSOR_NBYTES = 4 * _ROWS * _COLUMNS
_GROUP = "fetch"
_TIMEOUT_S = 600.0


class FetchRank:
    """A process that is a rank: of ``num_tensors`` float32 tensors it has some rows."""

    def __init__(self, num_tensors: int) -> None:
        torch.set_num_threads(1)
        self._num_tensors = num_tensors
        self._group: Any = None

    def join(self, rank: int, reads_memory: bool) -> int:
        """Be a rank of the next generation; returns this process's number."""
        os.environ["RAY_DCP_MEMORY_TIER"] = str(int(reads_memory))
        self._group = ray_dcp.RankGroup.join(_GROUP, rank=rank, world_size=NUM_RANKS)
        return os.getpid()

    def save(self, place: str, replicas: int) -> None:
        with self._group:
            ray_dcp.async_save(self._state(0.0), checkpoint_id=place, replicas=replicas).result(_TIMEOUT_S)

    def load(self, place: str) -> tuple[float, bool]:
        """How long it took, and whether nothing came from storage. Raises where a value is not the saved one."""
        state = self._state(float("nan"))
        with self._group:
            self._group.barrier()
            began = time.monotonic()
            report = ray_dcp.load(state, checkpoint_id=place)
            seconds = time.monotonic() - began
        for name, expected in self._state(0.0).items():
            if not torch.equal(self._rows(state[name]), self._rows(expected)):
                raise RuntimeError(f"{name} is not what was saved")
        return seconds, report.nbytes_by_place.get(STORAGE, 0) == 0

    def close(self) -> None:
        self._group.close()

    def _state(self, offset: float) -> dict[str, Any]:
        first = self._group.rank * _ROWS
        column = torch.arange(float(_COLUMNS)) + first + offset
        shape = (NUM_RANKS * _ROWS, _COLUMNS)
        return {
            f"w{number}": ray_dcp.LocalShards(shape, {(first, 0): (column + number).repeat(_ROWS, 1)})
            for number in range(self._num_tensors)
        }

    def _rows(self, value: Any) -> torch.Tensor:
        rows: torch.Tensor = value.chunks[(self._group.rank * _ROWS, 0)]
        return rows


@contextmanager
def saved_and_killed(place: str, nbytes: int, *, kills_node: bool) -> Iterator[list[Any]]:
    """Rank actors whose state lies at ``place`` and of which one is new: SIGKILL has ended that before it.

    With ``kills_node`` it has ended all that was on its node; each rank is on a node of its own then.
    """
    num_tensors = max(1, nbytes // (NUM_RANKS * _TENSOR_NBYTES))
    actor_class = ray.remote(num_cpus=1 if kills_node else 0.5, max_concurrency=2)(FetchRank)
    actors = [actor_class.remote(num_tensors) for _ in range(NUM_RANKS)]
    try:
        pids = _form(actors, reads_memory=True)
        for again in (f"{place}-before", place):  # the first one is without an agent, which it starts
            ray.get([actor.save.remote(again, int(kills_node)) for actor in actors], timeout=_TIMEOUT_S)
        if kills_node:
            _wait_for_copies(place)
            kill_node_of(pids[1])
        else:
            os.kill(pids[1], signal.SIGKILL)
        actors[1] = actor_class.remote(num_tensors)
        yield actors
        ray.get([actor.close.remote() for actor in actors], timeout=_TIMEOUT_S)
    finally:
        for actor in actors:
            ray.kill(actor)


def measure_fetches(place: str, nbytes: int, num_runs: int, *, kills_node: bool) -> list[Fetch]:
    """Load ``num_runs`` times from each source, in turns, after one of each that does not count.

    Raises ``RuntimeError`` where a load took bytes from elsewhere, or had a wrong value.
    """
    sources = [MEMORY, STORAGE] if url_scheme(place) else [MEMORY, STORAGE, COLD]
    found = []
    with saved_and_killed(place, nbytes, kills_node=kills_node) as actors:
        for number in range(num_runs + 1):
            for source in sources if number % 2 else reversed(sources):
                fetch = _fetch(actors, place, source)
                if number:
                    found.append(fetch)
    return found


def _fetch(actors: Sequence[Any], place: str, source: str) -> Fetch:
    _form(actors, reads_memory=source == MEMORY)
    if source == COLD:
        _forget_pages(place)
    loaded = ray.get([actor.load.remote(place) for actor in actors], timeout=_TIMEOUT_S)
    if any(from_memory != (source == MEMORY) for _, from_memory in loaded):
        raise RuntimeError(f"a load that was to read from {source} has read elsewhere")
    return Fetch(source, max(seconds for seconds, _ in loaded))


def _form(actors: Sequence[Any], *, reads_memory: bool) -> list[int]:
    pids: list[int] = ray.get(
        [actor.join.remote(rank, reads_memory) for rank, actor in enumerate(actors)], timeout=_TIMEOUT_S
    )
    return pids


def _wait_for_copies(place: str) -> None:
    """Return when the file of each rank is in the memory of two nodes."""
    names = [
        one["name"] for one in list_named_actors(all_namespaces=True) if one["name"].startswith(f"agent/{_GROUP}/")
    ]
    agents = [ray.get_actor(name, namespace=NAMESPACE) for name in names]
    deadline = time.monotonic() + _TIMEOUT_S
    while sum(map(len, ray.get([agent.held.remote(place) for agent in agents], timeout=_TIMEOUT_S))) < 2 * NUM_RANKS:
        if time.monotonic() > deadline:
            raise RuntimeError("no copies were made")
        time.sleep(0.05)


def _forget_pages(folder: str) -> None:
    """Have the kernel drop what it holds of these files."""
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
