"""A Ray cluster of several nodes on this machine, and nothing left of it afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_OBJECT_STORE_NBYTES = 100 * 2**20
_END_WAIT_S = 2.0
_EMPTY_LOOKS = 4
_LOOK_AGAIN_S = 0.25
_MAX_TEMPORARY_NAME = 24

_RAY_SETTINGS = {
    # A killed node is declared dead after some 2 s instead of 15; the timeout still forgives a busy machine.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    # Nobody announces here that a node will be taken away; the actor that listens for it costs a process a restart.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # When other programs fill the memory, killing these small workers would not help.
    "RAY_memory_monitor_refresh_ms": "0",
    # On SIGTERM Ray would wait for half a minute before it ends its own processes.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


class LocalNodes:
    """A head and further nodes; each is a raylet of its own, with room for one worker."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self) -> None:
        """Start one more node, the head first; from the main thread only: Ray sets a signal handler there."""
        self._cluster.add_node(num_cpus=1, object_store_memory=_OBJECT_STORE_NBYTES, include_dashboard=False)

    def forget_killed_nodes(self) -> None:
        """Reap what is left of nodes whose raylet was killed."""
        for node in list(self._cluster.worker_nodes):
            if node.dead_processes():
                self._cluster.remove_node(node, allow_graceful=False)

    def shut_down(self) -> None:
        self._cluster.shutdown()


def end_processes_of(folder: str) -> None:
    """Return when no process of the cluster in ``folder`` is left; those that do not end by themselves are killed."""
    import psutil  # Ray brings it

    # Again and again: a raylet that was being started when this program was stopped has started others since, and
    # for a moment those can not be told from strangers.
    num_empty_looks = 0
    while num_empty_looks < _EMPTY_LOOKS:
        started = _processes_of(folder)
        num_empty_looks = 0 if started else num_empty_looks + 1
        _, alive = psutil.wait_procs(started, timeout=_END_WAIT_S)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_LOOK_AGAIN_S)


def _processes_of(folder: str) -> list[Any]:
    # Not all are children of this process: those of a raylet that was killed have another parent.
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and _belongs_to(process, folder):
                found.append(process)
    return found


def _belongs_to(process: Any, folder: str) -> bool:
    """By its environment; or by its logs, since a process that gives itself a title writes over its environment."""
    if process.environ().get("RAY_TMPDIR") == folder:
        return True
    return any(opened.path.startswith(f"{folder}{os.sep}") for opened in process.open_files())


def _short_temporary_folder() -> str:
    """Make a folder for Ray, which puts sockets there: the whole name of a socket has at most 107 bytes."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rd-", dir=usual if len(usual) <= _MAX_TEMPORARY_NAME else "/tmp")


@contextmanager
def local_nodes(num_nodes: int) -> Iterator[LocalNodes]:
    """Run a cluster of ``num_nodes`` nodes; everything of it is gone afterwards, its folder included."""
    folder = _short_temporary_folder()
    # Ray reads these when it starts: the head for the whole cluster.
    before = {name: os.environ.get(name) for name in (*_RAY_SETTINGS, "RAY_TMPDIR")}
    os.environ.update(_RAY_SETTINGS, RAY_TMPDIR=folder)
    nodes = LocalNodes()
    try:
        for _ in range(num_nodes):
            nodes.add_node()
        yield nodes
    finally:
        nodes.shut_down()
        end_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
