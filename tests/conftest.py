"""One local Ray for the whole run, and rank actors that tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local test cluster; else Ray writes a token into the home folder


# When other programs fill the memory, killing these small actors would not help.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# A run that was started in the background may have it ignored, and so would the programs whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """This process is connected to a local Ray with room for every test's actors."""
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def ranks(ray_session):
    """Shared rank actors, see ``tests.actors.SharedRanks``."""
    from tests.actors import SharedRanks

    shared = SharedRanks()
    yield shared
    shared.forget()
