"""Which nodes of a worker group are gone: what Ray knows, and what a knock on the node's door tells sooner."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

_KNOCK_TIMEOUT_S = 1.0
_NODES_LOOK_S = 0.1
_MAX_KNOCKS_AT_ONCE = 32
_KNOCK_AGAIN_S = 1.0
_NODE_ID_LABEL = "ray.io/node-id"


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
        time.sleep(_NODES_LOOK_S)
    return frozenset(node_ids) - alive_node_ids()


def _without_answer(nodes: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    doors = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes}
    if not doors:
        return frozenset()
    with ThreadPoolExecutor(max_workers=_MAX_KNOCKS_AT_ONCE) as knocking:
        answered = dict(zip(doors, knocking.map(_answers, doors.values()), strict=True))
    return frozenset(node_id for node_id, answer in answered.items() if not answer)


def _answers(door: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(door, timeout=_KNOCK_TIMEOUT_S):
            return True
    except OSError:
        return False


class LeftOutNodes:
    """Nodes that no longer answer, as long as Ray still counts on them: a restart does without them.

    By default Ray takes a node for dead after 15 s only. Going on without one that does answer, but slowly, would do
    no harm: an elastic run takes it back when it next looks for nodes.
    """

    def __init__(self) -> None:
        self._node_ids: frozenset[str] = frozenset()
        self._looked_at = -math.inf

    def leave_out(self, node_ids: Collection[str]) -> None:
        self._node_ids |= frozenset(node_ids)
        self._looked_at = time.monotonic()

    def now(self) -> frozenset[str]:
        """Return the ids of the nodes left out, without those that answer again or that Ray knows to be dead by now."""
        if self._node_ids and time.monotonic() > self._looked_at + _KNOCK_AGAIN_S:
            self._node_ids = silent_nodes(self._node_ids)
            self._looked_at = time.monotonic()
        return self._node_ids

    def selector(self, of_user: Any) -> dict[str, str] | None:
        """Return a label selector that keeps workers off the nodes left out; None where no node is left out."""
        left_out = self.now()
        if not left_out:
            return None
        return {**(of_user or {}), _NODE_ID_LABEL: f"!in({','.join(sorted(left_out))})"}


def silent_nodes(node_ids: Collection[str]) -> frozenset[str]:
    """Return which of ``node_ids`` do not answer, though Ray takes them for alive."""
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in node_ids]
    suspects = _without_answer(alive)
    # Once more: a connection may get lost.
    return _without_answer(node for node in alive if node["NodeID"] in suspects)
