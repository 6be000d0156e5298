"""A Ray of the benchmark's own, and the processes on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import ray

import ray_dcp
from ray_dcp.cluster.agent.agent_actor import agent_name
from side_by_side.rank import Rank

_OBJECT_STORE_NBYTES = 200 * 2**20
_READER = "reader"
"""A resource of its own, so that readers find room beside the ranks, which have all the CPUs."""


@contextlib.contextmanager
def cluster(num_ranks: int, num_readers: int, when_up: Callable[[], None]) -> Iterator[None]:
    """Room for as many; nothing is left of it."""
    with contextlib.ExitStack() as until_done:
        until_done.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=num_ranks,
            resources={_READER: num_readers},
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_NBYTES,
            log_to_driver=False,
            logging_level="WARNING",
        )
        when_up()
        yield


@contextlib.contextmanager
def ranks(num_ranks: int, folder: str) -> Iterator[ray_dcp.RankPool]:
    with ray_dcp.RankPool(Rank, folder, min_ranks=num_ranks, max_ranks=num_ranks) as pool:
        yield pool


@contextlib.contextmanager
def readers(num_readers: int, folder: str) -> Iterator[ray_dcp.RankPool]:
    """Ranks of a group of their own."""
    os.mkdir(folder)
    with ray_dcp.RankPool(
        Rank, folder, min_ranks=num_readers, max_ranks=num_readers, resources_per_rank={_READER: 1.0}
    ) as pool:
        yield pool


def helpers_of(pool: ray_dcp.RankPool) -> list[int]:
    """The processes that work for the pool's ranks: their coordinator, and their node's agent where it is up."""
    node_id = ray.get_runtime_context().get_node_id()
    helpers = []
    for name in (f"coordinator/{pool.name}", agent_name(pool.name, node_id)):
        with contextlib.suppress(ValueError):  # there is none of that name
            helper: Any = ray.get_actor(name, namespace="ray_dcp")
            helpers.append(ray.get(helper.__ray_call__.remote(lambda actor: os.getpid())))
    return helpers
