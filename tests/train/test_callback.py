"""``CheckpointCallback`` without a cluster: what it refuses, and that nothing it does can fail a run."""

from __future__ import annotations

import inspect
import math
import pickle
import socket
from typing import Any

import pytest
import ray
from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks

from ray_dcp.errors import ConfigError
from ray_dcp.train import CheckpointCallback, lost_nodes


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "30", None, True])
def test_a_wait_that_is_no_number_of_seconds_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="node_loss_wait_s"):
        CheckpointCallback(node_loss_wait_s=seconds)


def test_it_can_be_made_without_arguments_and_sent_to_the_controller() -> None:
    assert isinstance(pickle.loads(pickle.dumps(CheckpointCallback())), CheckpointCallback)


def test_a_run_can_be_given_it_without_a_change_to_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_dcp.train.callback.CheckpointCallback")
    (made,) = _initialize_env_callbacks()
    assert isinstance(made, CheckpointCallback)


def test_no_hook_of_its_own_raises(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    for name in ("get_actor", "nodes", "get"):
        monkeypatch.setattr(ray, name, fail)
    callback = CheckpointCallback()
    callback._is_elastic = True
    hooks = [name for name in vars(CheckpointCallback) if not name.startswith("_")]
    assert len(hooks) == 7
    for name in hooks:
        hook = getattr(callback, name)
        # No argument is what it should be, and Ray does nothing that it is asked for.
        hook(*(object() for _ in inspect.signature(hook).parameters))
        assert f"{name} failed" in caplog.text


def test_a_node_that_does_not_answer_is_waited_for_until_ray_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closed:
        open_port, closed_port = listening.getsockname()[1], closed.getsockname()[1]
        closed.close()
        looks: list[int] = []

        def nodes() -> list[dict[str, Any]]:
            looks.append(1)
            return [
                {"NodeID": "there", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": open_port},
                {
                    "NodeID": "gone",
                    "Alive": len(looks) < 4,
                    "NodeManagerAddress": "127.0.0.1",
                    "NodeManagerPort": closed_port,
                },
            ]

        monkeypatch.setattr(lost_nodes.ray, "nodes", nodes)
        assert lost_nodes.wait_for_lost_nodes({"there", "gone"}, timeout_s=30) == {"gone"}
        assert len(looks) >= 4


def test_nothing_is_waited_for_while_all_nodes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        node = {"NodeID": "there", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr(lost_nodes.ray, "nodes", lambda: [node])
        monkeypatch.setattr(lost_nodes.time, "sleep", lambda _: pytest.fail("waited"))
        assert lost_nodes.wait_for_lost_nodes({"there"}, timeout_s=30) == frozenset()


def test_waiting_for_a_lost_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    node = {"NodeID": "gone", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    monkeypatch.setattr(lost_nodes.ray, "nodes", lambda: [node])
    assert lost_nodes.wait_for_lost_nodes({"gone"}, timeout_s=0.3) == frozenset()
