"""Which nodes of a worker group are gone: what Ray knows, and what a knock on the node's door tells sooner."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

_KNOCK_TIMEOUT_S = 1.0
_LOOK_AGAIN_S = 0.1
_MAX_KNOCKS_AT_ONCE = 32


def alive_node_ids() -> frozenset[str]:
    """Return the ids of the nodes that Ray takes for alive now."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def wait_for_lost_nodes(node_ids: Collection[str], *, timeout_s: float) -> frozenset[str]:
    """Return which of ``node_ids`` Ray takes for dead, once it has noticed all that no longer answer.

    Ray notices a lost node after several missed health checks only; until then it goes on counting on it. A node
    that answers costs one connection, so a failure that took no node with it costs next to nothing.
    """
    deadline = time.monotonic() + timeout_s
    silent = _without_answer(node for node in ray.nodes() if node["Alive"] and node["NodeID"] in node_ids)
    while silent & alive_node_ids() and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
    return frozenset(node_ids) - alive_node_ids()


def _without_answer(nodes: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    doors = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
    with ThreadPoolExecutor(max_workers=_MAX_KNOCKS_AT_ONCE) as knocking:
        answered = dict(zip(doors, knocking.map(_answers, doors.values()), strict=True))
    return frozenset(node_id for node_id, answer in answered.items() if not answer)


def _answers(door: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(door, timeout=_KNOCK_TIMEOUT_S):
            return True
    except OSError:
        return False
