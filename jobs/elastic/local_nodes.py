"""A Ray cluster of several nodes on this machine, and nothing left of it afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_OBJECT_STORE_NBYTES = 100 * 2**20
_END_WAIT_S = 10.0

_FASTER_HEALTH_CHECKS = {
    # A killed node is declared dead after some 2 s instead of 15; the timeout still forgives a busy machine.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


class LocalNodes:
    """A head and further nodes; each is a raylet of its own, with room for one worker."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._started: set[Any] = set()
        self._add(include_dashboard=False)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        """Start one more node; from the main thread only, since Ray installs a signal handler there."""
        self._add()

    def forget_killed_nodes(self) -> None:
        """Reap what is left of nodes whose raylet was killed."""
        for node in list(self._cluster.worker_nodes):
            if node.dead_processes():
                self._cluster.remove_node(node, allow_graceful=False)

    def _add(self, **options: Any) -> None:
        self._cluster.add_node(num_cpus=1, object_store_memory=_OBJECT_STORE_NBYTES, **options)
        self._note_processes()

    def _note_processes(self) -> None:
        import psutil  # Ray brings it

        for mine in psutil.Process().children(recursive=True):
            self._started.add(mine)

    def shut_down(self) -> None:
        """End every process of the cluster, and return when they are gone."""
        import psutil

        self._note_processes()
        self._cluster.shutdown()
        _, still_there = psutil.wait_procs(self._started, timeout=_END_WAIT_S)
        for process in still_there:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(still_there, timeout=_END_WAIT_S)


@contextmanager
def local_nodes(num_nodes: int) -> Iterator[LocalNodes]:
    """Run a cluster of ``num_nodes`` nodes; everything of it is gone afterwards, its folder included."""
    # Short: Ray puts sockets there, and the name of a socket has at most 107 bytes.
    folder = tempfile.mkdtemp(prefix="rd-", dir="/tmp" if os.path.isdir("/tmp") else None)
    # Ray reads these when it starts: the head for the whole cluster.
    before = {name: os.environ.get(name) for name in (*_FASTER_HEALTH_CHECKS, "RAY_TMPDIR")}
    os.environ.update(_FASTER_HEALTH_CHECKS, RAY_TMPDIR=folder)
    nodes: LocalNodes | None = None
    try:
        nodes = LocalNodes()
        for _ in range(num_nodes - 1):
            nodes.add_node()
        yield nodes
    finally:
        if nodes is not None:
            nodes.shut_down()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
