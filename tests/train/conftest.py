"""TorchTrainer runs on the Ray that all tests share: a second one in this process is not possible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_SETTINGS = {
    # Ray Train hands these on from the process that starts a run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def ray_cluster(ray_session: None) -> Iterator[None]:
    """Runs of a module notice a failure soon."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in _SETTINGS.items():
            environment.setenv(name, value)
        yield
