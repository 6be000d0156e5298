"""One local Ray for the whole run, and rank actors that tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local test cluster; else Ray writes a token into the home folder


# When other programs fill the memory, killing these small actors would not help.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# Nobody looks at what Ray would tell of tasks and of itself: each of its processes would gather that all the time.
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
os.environ.setdefault("RAY_enable_metrics_collection", "0")
os.environ.setdefault("RAY_event_stats", "0")

# The width of a terminal, which pytest-xdist hands to its processes: output is to be as in a pipe.
os.environ.pop("COLUMNS", None)

# A run that was started in the background may have it ignored, and so would the programs whose Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


# CI's second Python is without pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``, as in `make test`: one more than there are CPUs, as those with a cluster mostly wait.

    Each more collects all tests once more, and holds the others up.
    """
    return min(8, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.in_parallel import ByGroup

    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.in_parallel import longest_first

        longest_first(items)


def interleavings(*, new: int = 0) -> settings:
    """How many random runs of the protocol, and which: by `RAY_DCP_INTERLEAVINGS`, else a hundred known ones.

    With ``new``, so many that nobody has seen before.
    """
    wanted = os.environ.get("RAY_DCP_INTERLEAVINGS")
    return settings(
        max_examples=new or int(wanted or 100),
        derandomize=not (new or wanted),
        stateful_step_count=30,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def mutations(*, at_most: int | None = None) -> settings:
    """How many damaged files, and which: by `RAY_DCP_MUTATIONS`, else a few hundred known ones.

    ``at_most`` so many where one takes long.
    """
    wanted = int(os.environ.get("RAY_DCP_MUTATIONS") or 0)
    return settings(
        max_examples=min(wanted or 300, at_most or 10**9),
        derandomize=not wanted,
        deadline=timedelta(seconds=20),  # none takes more than milliseconds; what really hangs is found
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def random_states(*, share: int = 1) -> settings:
    """How many random states are saved and loaded: ``RAY_DCP_STATES``, else 500; each time new ones.

    ``share``: one in so many of them.
    """
    return settings(
        max_examples=int(os.environ.get("RAY_DCP_STATES") or 500) // share,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def no_group_is_left_behind() -> Iterator[None]:
    """A group that a test has joined in this process is closed with it: later tests would save and load in it."""

    def known() -> Any:
        current = sys.modules.get("ray_dcp.cluster.current")
        return current.known_group() if current is not None else None

    before = known()
    yield
    after = known()
    if after is not None and after is not before:
        after.close()
        pytest.fail(f"the test has joined {after!r} and not closed it")


@pytest.fixture(autouse=True)
def no_sweep_is_left_behind(no_group_is_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A sweep behind a save is over before what the test has set is undone: it would look elsewhere, for minutes."""
    yield
    api = sys.modules.get("ray_dcp.api")
    if api is not None:
        api.alone.sweep.wait(30)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """This process is connected to a local Ray with room for every test's actors."""
    import ray

    for _ in range(3):
        try:
            ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=100 * 2**20)
            break
        except Exception as error:  # Ray waits half a minute for its own processes, however busy the machine is
            ray.shutdown()
            failed = error
    else:
        raise failed
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def ranks(ray_session):
    """Shared rank actors, see ``tests.actors.SharedRanks``."""
    from tests.actors import SharedRanks

    shared = SharedRanks()
    yield shared
    shared.forget()
