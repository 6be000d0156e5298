"""``CheckpointCallback`` without a cluster: what it refuses, and that nothing it does can fail a run."""

from __future__ import annotations

import inspect
import math
import pickle
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks

from ray_dcp.errors import ConfigError
from ray_dcp.train import CheckpointCallback, lost_nodes
from ray_dcp.train import callback as callback_module


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


@pytest.mark.parametrize("packages", ["torch", [1], [None]])
def test_what_are_no_names_of_packages_is_refused(packages: Any) -> None:
    with pytest.raises(ConfigError, match="spare_packages"):
        CheckpointCallback(spare_packages=packages)


def test_copies_in_workers_know_nothing_of_what_the_controller_has() -> None:
    callback = CheckpointCallback(node_loss_wait_s=7, spare_packages=["torch"])
    callback._watch = threading.Thread()  # cannot be pickled
    copy = pickle.loads(pickle.dumps(callback))
    assert (copy._node_loss_wait_s, copy._spare_packages, copy._watch) == (7, ("torch",), None)


def test_no_hook_of_its_own_raises(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken on purpose")

    class Broken:
        __getattr__ = fail

    for name in ("get_actor", "nodes", "get", "kill"):
        monkeypatch.setattr(ray, name, fail)
    monkeypatch.setattr(callback_module, "finish_saves", fail)
    monkeypatch.setattr(callback_module, "tell_of_own_failure", fail)
    callback = CheckpointCallback()
    callback._is_elastic = True
    callback._workers = [Broken()]
    callback._watch = callback._spares = callback._left_out = Broken()  # type: ignore[assignment]
    hooks = [name for name in vars(CheckpointCallback) if not name.startswith("_")]
    assert len(hooks) == 12
    for name in hooks:
        hook = getattr(callback, name)
        # No argument is what it should be, and Ray does nothing that it is asked for.
        given = inspect.signature(hook).parameters.values()
        unnamed = [Broken() for parameter in given if parameter.kind is not parameter.KEYWORD_ONLY]
        named = {parameter.name: Broken() for parameter in given if parameter.kind is parameter.KEYWORD_ONLY}
        assert hook(*unnamed, **named) is None
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


def node(name: str, port: int, *, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def test_a_silent_node_is_left_out_until_it_answers_or_ray_knows_that_it_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_nodes, "_KNOCK_AGAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closed:
        open_port, closed_port = listening.getsockname()[1], closed.getsockname()[1]
        closed.close()
        nodes = [node("a", open_port), node("b", closed_port), node("c", closed_port)]
        monkeypatch.setattr(lost_nodes.ray, "nodes", lambda: nodes)
        left_out = lost_nodes.LeftOutNodes()
        assert left_out.selector(None) is None
        assert lost_nodes.silent_nodes({"a", "b", "c"}) == {"b", "c"}
        left_out.leave_out({"b", "c"})
        assert left_out.selector({"zone": "1"}) == {"zone": "1", "ray.io/node-id": "!in(b,c)"}
        nodes[1:] = [node("b", closed_port, alive=False), node("c", closed_port)]
        assert left_out.now() == {"c"}
        nodes[2] = node("c", open_port)
        assert left_out.now() == frozenset()
        assert left_out.selector({"zone": "1"}) is None


def test_one_selector_for_each_worker_stays_as_the_user_gave_it() -> None:
    callback = CheckpointCallback()
    callback._left_out.leave_out({"lost"})
    given = SimpleNamespace(label_selector=[{"zone": "1"}, {"zone": "2"}])
    assert callback.on_controller_start_worker_group(scaling_config=given, num_workers=2) is None
    given = SimpleNamespace(label_selector=None)
    chosen = callback.on_controller_start_worker_group(scaling_config=given, num_workers=2)
    assert chosen == {"ray.io/node-id": "!in(lost)"}
