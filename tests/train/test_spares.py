"""Spare processes: what they import, and that a raylet gives them to the next workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle

from ray_dcp.train import spare_process, spares
from ray_dcp.train.spare_process import Surroundings, import_all, own_surroundings
from tests.slack import within

_RARE = "sunau"
"""A module that no worker loads by itself."""


def surroundings(*modules: str, **environment: str) -> Surroundings:
    return Surroundings("01", "{}", environment, tuple(sys.path), modules)


def test_surroundings_arrive_as_they_were_sent() -> None:
    sent = surroundings("torch", "ray", OMP_NUM_THREADS="3")
    assert Surroundings.decoded(sent.encoded()) == sent


def test_what_can_not_be_imported_keeps_nothing_else_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.delenv("RAY_DCP_TEST", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(spare_process, "gc", SimpleNamespace(collect=int, freeze=int))
    import_all(surroundings("no_such_module", "this", RAY_DCP_TEST="1", OMP_NUM_THREADS="3"))
    assert "this" in sys.modules
    assert os.environ.pop("RAY_DCP_TEST") == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_the_hook_needs_nothing_of_ray_dcp_and_never_raises() -> None:
    # Ray is not connected there, so there is nobody to ask either.
    program = "import sys; sys.modules['ray_dcp'] = None; from ray import cloudpickle as c; c.load(sys.stdin.buffer)()"
    pickled = cloudpickle.dumps(spares._hook("spares/run"))
    subprocess.run([sys.executable, "-c", program], input=pickled, check=True, timeout=within(60))


class Worker:
    """As Ray Train's: an actor that executes functions, and what is known of it."""

    def __init__(self, runtime_env: dict[str, Any]) -> None:
        self.actor = ray.remote(num_cpus=1, runtime_env=runtime_env)(_Actor).remote()
        node_id, self.pid = ray.get(self.actor.who.remote())
        self.metadata = SimpleNamespace(node_id=node_id)

    def execute_async(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.actor.execute.remote(function, *arguments)


class _Actor:
    def who(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def execute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def has_loaded(module: str) -> bool:
    return module in sys.modules


def wait_for(look: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + within(timeout_s)
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.ray
def test_the_next_worker_starts_in_a_spare_process(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_SETTLE_S", 0.0)
    run_config = SimpleNamespace(worker_runtime_env={"env_vars": {"MINE": "1"}})
    kept = spares.Spares("test-run", [_RARE])
    kept.put_hook_into(run_config)
    assert run_config.worker_runtime_env["env_vars"]["MINE"] == "1"
    first = Worker(run_config.worker_runtime_env)
    assert not ray.get(first.execute_async(has_loaded, _RARE))
    ray.get(first.execute_async(import_rare))
    imported = ray.get(first.execute_async(own_surroundings, [_RARE]))
    assert imported.modules == (_RARE,)

    kept.group_started([first])
    wait_for(lambda: kept._surroundings is not None and not left_in_store() and sum(kept._waiting.values()) == 1)
    ray.kill(first.actor)
    second = Worker(run_config.worker_runtime_env)
    assert ray.get(second.execute_async(has_loaded, _RARE))
    assert second.pid != first.pid

    kept.group_started([second])
    wait_for(lambda: sum(kept._waiting.values()) == 1 and not left_in_store())
    kept.release()
    third = Worker(run_config.worker_runtime_env)
    assert not ray.get(third.execute_async(has_loaded, _RARE))
    for worker in (second, third):
        ray.kill(worker.actor)


def import_rare() -> None:
    import sunau  # noqa: F401


def left_in_store() -> list[bytes]:
    from ray.experimental import internal_kv

    return list(internal_kv._internal_kv_list("spares/test-run", namespace="ray_dcp"))


@pytest.mark.ray
def test_a_hook_of_the_user_is_not_replaced(ray_session: None) -> None:
    run_config = SimpleNamespace(worker_runtime_env={"worker_process_setup_hook": "mine.hook"})
    with pytest.raises(ValueError, match="worker_process_setup_hook"):
        spares.Spares("run", ["torch"]).put_hook_into(run_config)
    assert run_config.worker_runtime_env == {"worker_process_setup_hook": "mine.hook"}


def test_a_run_that_fails_again_and_again_gets_spares_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(spares.Spares, "_keep_up", lambda self, workers, ended: waits.append(self._settle_s))
    kept = spares.Spares("run", ["torch"])
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(spares, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for seconds in (0, 10, 10, 10, 10, 10, 500):
        clock.now += seconds
        before = len(waits)
        kept.group_started([])
        wait_for_length(waits, before + 1)
    assert waits == [3, 6, 12, 24, 48, 60, 3]


def wait_for_length(items: list[float], length: int) -> None:
    for _ in range(1000):
        if len(items) >= length:
            return
        time.sleep(0.01)
