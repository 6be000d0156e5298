"""A Ray cluster on this machine for one run, with Ray's own settings, and nothing left of it afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",  # a cluster of our own; else Ray leaves a token in the home folder
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray ends the workers when some other program takes the memory
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # only when all is over: the nodes need not be drained
}
"""The same for both sides. What matters to a recovery is as Ray has it: health checks, intervals, timeouts."""
NUM_NODES = 2
_OBJECT_STORE_NBYTES = 100 * 2**20


@contextmanager
def cluster_folder() -> Iterator[str]:
    """A folder for Ray; when the block is left no process of the cluster in it is, nor the folder."""
    import ray  # noqa: F401 - brings psutil, by which the processes are found
    from elastic.local_nodes import end_processes_of

    # A short name: Ray puts sockets there.
    folder = tempfile.mkdtemp(prefix="rr-", dir="/tmp")
    try:
        yield folder
    finally:
        end_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local_cluster(folder: str, num_nodes: int = NUM_NODES) -> Iterator[None]:
    """Connect to a cluster of a head, on which no worker fits, and nodes with room for one worker each."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_TMPDIR"] = folder
    on_sigterm = signal.getsignal(signal.SIGTERM)  # Ray puts a handler of its own there, which aborts
    cluster = Cluster()
    try:
        for num_cpus in (0, *[1] * num_nodes):
            cluster.add_node(num_cpus=num_cpus, object_store_memory=_OBJECT_STORE_NBYTES, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        signal.signal(signal.SIGTERM, on_sigterm)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def one_node(folder: str, num_cpus: int) -> Iterator[None]:
    """Connect to a cluster of this one node."""
    import ray

    os.environ["RAY_TMPDIR"] = folder
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def kill_rank(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_node_of(pid: int) -> None:
    """Kill the raylet whose worker this is, with all its processes."""
    import psutil  # Ray brings it

    raylet: Any = psutil.Process(pid).parent()
    assert raylet.name() == "raylet", f"the parent of a worker is {raylet.name()}"
    # It is held first: it would report the deaths of its workers, as a node that loses power does not.
    raylet.suspend()
    os.kill(pid, signal.SIGKILL)
    for process in (raylet, *raylet.children(recursive=True)):
        with suppress(psutil.Error):
            process.kill()
