"""``CheckpointCallback``: what ray_dcp does in the controller of a TorchTrainer run."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from ray_dcp.cluster.coordinator_actor import NAMESPACE, end_coordinator, ensure_coordinator
from ray_dcp.cluster.train_context import train_group_name
from ray_dcp.errors import ConfigError
from ray_dcp.train.lost_nodes import alive_node_ids, wait_for_lost_nodes

logger = logging.getLogger(__name__)

_LOOK_FOR_NODES_EVERY_S = 1.0
_RECOMPUTE_TIMEOUT_S = 10.0
_POLICY_CACHE_S = 1.1
"""Ray's elastic policy answers from its last look for a second (``GET_RESERVED_RESOURCES_INTERVAL_S``)."""

_P = ParamSpec("_P")


def _never_fails_the_run(hook: Callable[_P, None]) -> Callable[_P, None]:
    # To Ray, an exception in a callback is an error of the controller, which ends the run.
    @functools.wraps(hook)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            # A checkpoint service may slow a run down, never end it.
            hook(*args, **kwargs)
        except Exception as error:
            logger.warning("%s failed, training goes on without it: %r", hook.__name__, error, exc_info=True)

    return guarded


class CheckpointCallback(ControllerCallback, WorkerGroupCallback):
    """Start the run's coordinator ahead, and let an elastic run restart within seconds of a node's loss.

    For ``RunConfig(callbacks=[CheckpointCallback()])``, or, without touching the code of the run,
    ``RAY_TRAIN_CALLBACKS=ray_dcp.train.callback.CheckpointCallback``. Whatever goes wrong here is logged and leaves
    the run as it would be without a callback.
    """

    def __init__(self, *, node_loss_wait_s: float = 30.0) -> None:
        """``node_loss_wait_s``: how long an elastic restart may wait for Ray to notice that a node is lost.

        Without that wait Ray asks for the lost node's workers again, and gives up after a minute. It ends as soon
        as Ray has noticed, and there is none while all nodes answer. 0: never wait.
        """
        if isinstance(node_loss_wait_s, bool) or not isinstance(node_loss_wait_s, (int, float)):
            raise ConfigError("node_loss_wait_s", f"is a number of seconds, not {node_loss_wait_s!r}")
        if not math.isfinite(node_loss_wait_s) or node_loss_wait_s < 0:
            raise ConfigError("node_loss_wait_s", f"must be zero or more seconds, not {node_loss_wait_s!r}")
        self._node_loss_wait_s = float(node_loss_wait_s)
        self._requester_id = ""
        self._group = ""
        self._told_of_failure = False
        self._is_elastic = False
        self._group_nodes: frozenset[str] = frozenset()
        self._known_nodes: frozenset[str] | None = None
        self._looked_for_nodes_at = -math.inf

    @_never_fails_the_run
    def after_controller_start(self, train_run_context: Any) -> None:
        # The name under which Ray's elastic policy asks for the run's resources.
        self._requester_id = f"train-{train_run_context.run_id}"
        self._is_elastic = train_run_context.scaling_config.elasticity_enabled
        run_config = train_run_context.run_config
        self._group = train_group_name(run_config.name, run_config.storage_context.experiment_fs_path)
        # Beside the start of the workers, which takes longer. What fails here is done again by the workers.
        threading.Thread(target=_start_coordinator, args=(self._group,), daemon=True).start()

    @_never_fails_the_run
    def after_worker_group_start(self, worker_group: Any) -> None:
        self._told_of_failure = False
        self._group_nodes = frozenset(worker.metadata.node_id for worker in worker_group.get_workers())

    @_never_fails_the_run
    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        if not self._is_elastic:
            return
        started = time.monotonic()
        lost = wait_for_lost_nodes(self._group_nodes, timeout_s=self._node_loss_wait_s)
        self._known_nodes = alive_node_ids()
        self._recompute_reservation(wait=True)
        if lost:
            logger.info("lost %d nodes: %s", len(lost), ", ".join(sorted(lost)))
            time.sleep(max(0.0, started + _POLICY_CACHE_S - time.monotonic()))

    @_never_fails_the_run
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        # Called on every turn of the control loop, also while the run waits for enough nodes to start with.
        if not self._is_elastic or time.monotonic() < self._looked_for_nodes_at + _LOOK_FOR_NODES_EVERY_S:
            return
        self._looked_for_nodes_at = time.monotonic()
        before, self._known_nodes = self._known_nodes, alive_node_ids()
        if before is not None and before != self._known_nodes:
            self._recompute_reservation(wait=False)

    @_never_fails_the_run
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        failed = {rank: repr(error) for rank, error in worker_group_status.errors.items()}
        if failed and not self._told_of_failure:
            # Ranks that wait for the failed ones in a save or load need not wait until Ray stops them.
            self._told_of_failure = True
            ray.get_actor(f"coordinator/{self._group}", namespace=NAMESPACE).ranks_failed.remote(failed)

    @_never_fails_the_run
    def after_controller_finish(self, result: Any) -> None:
        end_coordinator(self._group)

    @_never_fails_the_run
    def before_controller_abort(self) -> None:
        end_coordinator(self._group)

    def _recompute_reservation(self, *, wait: bool) -> None:
        """Let Ray's autoscaling coordinator look at the nodes now: by itself it does so every 20 seconds."""
        # Private in Ray. Where it is gone, an elastic restart takes as long as Ray's own.
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )

        coordinator = get_or_create_autoscaling_coordinator()
        reserved = coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
        if wait:
            ray.get(reserved, timeout=_RECOMPUTE_TIMEOUT_S)


@_never_fails_the_run
def _start_coordinator(name: str) -> None:
    """Have the run's coordinator up before its workers are, for as long as the controller lives."""
    ensure_coordinator(name, keeper=ray.get_runtime_context().current_actor)
