"""One small Ray cluster for the tests of a module, and TorchTrainer runs on it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Connect this process to a cluster of its own, which is gone after the module."""
    with pytest.MonkeyPatch.context() as environment:
        # Short: Ray puts sockets there, whose names may have 107 bytes at most.
        folder = tempfile.mkdtemp(prefix="rt-")
        environment.setenv("RAY_TMPDIR", folder)
        environment.delenv("RAY_ADDRESS", raising=False)
        for name, value in _SETTINGS.items():
            environment.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False)
            ray.init(address=cluster.address, log_to_driver=bool(os.environ.get("SHOW_RAY_LOGS")))
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
