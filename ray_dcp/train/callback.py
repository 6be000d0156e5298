"""``CheckpointCallback``: what ray_dcp does in the controller of a TorchTrainer run, and at the end of its workers."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, ParamSpec

import ray

from ray_dcp.cluster.coordinator_actor import end_coordinator, ensure_coordinator
from ray_dcp.cluster.current import joined_groups
from ray_dcp.cluster.link import NAMESPACE
from ray_dcp.cluster.ray_private import private
from ray_dcp.cluster.train_context import train_group_name
from ray_dcp.errors import ConfigError
from ray_dcp.settings import require_seconds
from ray_dcp.train.controller import ControllerAccess
from ray_dcp.train.early_look import ActorWatch, tell_of_own_failure
from ray_dcp.train.lost_nodes import LeftOutNodes, alive_node_ids, silent_nodes, wait_for_lost_nodes
from ray_dcp.train.spares import Spares

logger = logging.getLogger(__name__)

DEFAULT_SPARE_PACKAGES = ("torch", "ray", "ray_dcp", "numpy", "pandas", "pyarrow")
_HAND_OVER_S = 4.0
"""How long a worker may finish its saves: Ray kills the workers of a group that ends after five seconds."""
_LOOK_FOR_NODES_EVERY_S = 1.0
_RECOMPUTE_TIMEOUT_S = 10.0
_POLICY_CACHE_S = 1.1
"""Ray's elastic policy answers from its last look for a second (``GET_RESERVED_RESOURCES_INTERVAL_S``)."""

_P = ParamSpec("_P")
_ControllerCallback: Any = private("ControllerCallback")
_WorkerGroupCallback: Any = private("WorkerGroupCallback")
_WorkerCallback: Any = private("WorkerCallback")


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


class CheckpointCallback(_ControllerCallback, _WorkerGroupCallback, _WorkerCallback):
    """Let a run go on within seconds of the loss of a rank or a node.

    For ``RunConfig(callbacks=[CheckpointCallback()])``, or, without touching the code of the run,
    ``RAY_TRAIN_CALLBACKS=ray_dcp.train.callback.CheckpointCallback``. Whatever goes wrong here is logged and leaves
    the run as it would be without a callback.

    It starts the run's coordinator ahead; has the controller look at its workers when one fails; restarts an elastic
    run without nodes that no longer answer; finishes asynchronous saves that are under way when workers are stopped;
    and keeps a spare process for each worker, in which the next one starts within a moment.
    """

    def __init__(
        self, *, node_loss_wait_s: float = 30.0, spare_packages: Collection[str] = DEFAULT_SPARE_PACKAGES
    ) -> None:
        """``spare_packages``: whose modules the spare processes import, of those that the training has loaded.

        A spare process takes what memory these modules take (some 300 MB with torch), and once the CPU time of
        importing them, at low priority. It has no GPU: name no package that uses one when it is imported. Empty: no
        spare processes; none are kept either where workers have a ``worker_process_setup_hook``.

        ``node_loss_wait_s``: how long an elastic restart may wait for Ray to notice that a node is lost, where it
        can't be left out. Without that wait Ray asks for the lost node's workers again, and gives up after a minute.
        While all nodes answer it does not wait. 0: never wait.

        Raises ``ConfigError``.
        """
        require_seconds("node_loss_wait_s", node_loss_wait_s, may_be_0=True)
        if isinstance(spare_packages, str) or not all(isinstance(name, str) for name in spare_packages):
            raise ConfigError("spare_packages", f"are names of packages, not {spare_packages!r}")
        self._node_loss_wait_s = float(node_loss_wait_s)
        self._spare_packages = tuple(spare_packages)
        self._forget_run()

    def _forget_run(self) -> None:
        self._requester_id = ""
        self._group = ""
        self._told_of_failure = False
        self._is_elastic = False
        self._workers: list[Any] = []
        self._known_nodes: frozenset[str] | None = None
        self._looked_for_nodes_at = -math.inf
        self._controller: ControllerAccess | None = None
        self._left_out = LeftOutNodes()
        self._watch: ActorWatch | None = None
        self._spares: Spares | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The copies in the workers know nothing of the run: what the controller's copy has cannot travel.
        return {"_node_loss_wait_s": self._node_loss_wait_s, "_spare_packages": self._spare_packages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()

    # In the controller.

    @_never_fails_the_run
    def after_controller_start(self, train_run_context: Any) -> None:
        # The name under which Ray's elastic policy asks for the run's resources.
        self._requester_id = f"train-{train_run_context.run_id}"
        self._is_elastic = train_run_context.scaling_config.elasticity_enabled
        run_config = train_run_context.run_config
        self._group = train_group_name(run_config.name, run_config.storage_context.experiment_fs_path)
        # Beside the start of the workers, which takes longer. What fails here is done again by the workers.
        threading.Thread(target=_start_coordinator, args=(self._group,), daemon=True).start()
        self._reach_into_controller()
        if self._spare_packages:
            self._put_spares_into(run_config, train_run_context.run_id)

    @_never_fails_the_run
    def _reach_into_controller(self) -> None:
        controller = ControllerAccess()
        controller.listen()
        if self._is_elastic:
            controller.leave_out(self._left_out.now)
        self._controller = controller

    @_never_fails_the_run
    def _put_spares_into(self, run_config: Any, run_id: str) -> None:
        spares = Spares(run_id, self._spare_packages)
        spares.put_hook_into(run_config)
        self._spares = spares

    @_never_fails_the_run
    def after_worker_group_start(self, worker_group: Any) -> None:
        self._told_of_failure = False
        workers = worker_group.get_workers()
        self._workers = list(workers)
        if self._controller is not None:
            self._watch = ActorWatch([worker.actor for worker in workers], self._controller.look_now)

    @_never_fails_the_run
    def after_worker_group_training_start(self, worker_group: Any) -> None:
        if self._spares is not None:
            self._spares.group_started(worker_group.get_workers())

    @_never_fails_the_run
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._spares is not None:
            self._spares.group_ended()

    @_never_fails_the_run
    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        if not self._is_elastic:
            return
        silent = silent_nodes(self._group_nodes())
        if not silent or self._controller is None or not self._controller.leaves_out:
            self._wait_for_lost_nodes()
            return
        logger.info("going on without nodes that do not answer: %s", ", ".join(sorted(silent)))
        self._left_out.leave_out(silent)
        for worker in self._workers:
            if worker.metadata.node_id in silent:
                # Ray asks all workers to end themselves, and waits seconds for those that it does not know to be dead.
                ray.kill(worker.actor)

    def _group_nodes(self) -> frozenset[str]:
        return frozenset(worker.metadata.node_id for worker in self._workers)

    def _wait_for_lost_nodes(self) -> None:
        started = time.monotonic()
        lost = wait_for_lost_nodes(self._group_nodes(), timeout_s=self._node_loss_wait_s)
        self._known_nodes = alive_node_ids()
        self._recompute_reservation(wait=True)
        if lost:
            logger.info("lost %d nodes: %s", len(lost), ", ".join(sorted(lost)))
            time.sleep(max(0.0, started + _POLICY_CACHE_S - time.monotonic()))

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Keep workers off nodes that are left out; Ray's scheduler still counts on them."""
        try:
            of_user = scaling_config.label_selector
            # One for each worker is the user's whole say: Ray takes only one for all from here.
            return self._left_out.selector(of_user) if of_user is None or isinstance(of_user, dict) else None
        except Exception as error:  # noqa: BLE001 - as for the other hooks; this one returns something
            logger.warning("on_controller_start_worker_group failed, workers may be placed on a lost node: %r", error)
            return None

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
            self._told_of_failure = True
            workers = [self._workers[rank] for rank in failed]
            threading.Thread(target=_tell_coordinator, args=(self._group, failed, workers), daemon=True).start()

    @_never_fails_the_run
    def after_controller_finish(self, result: Any) -> None:
        self._end_run(failed=result.error is not None)

    @_never_fails_the_run
    def before_controller_abort(self) -> None:
        self._end_run()

    def _end_run(self, *, failed: bool = False) -> None:
        end_coordinator(self._group, forms_anew=failed)  # whoever starts a run again that has failed does so soon
        if self._spares is not None:
            self._spares.release()

    def _recompute_reservation(self, *, wait: bool) -> None:
        """Let Ray's autoscaling coordinator look at the nodes now: by itself it does so every 20 seconds."""
        coordinator = private("get_or_create_autoscaling_coordinator")()
        reserved = coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
        if wait:
            ray.get(reserved, timeout=_RECOMPUTE_TIMEOUT_S)

    # In each worker.

    @_never_fails_the_run
    def after_init_train_context(self) -> None:
        tell_of_own_failure()

    @_never_fails_the_run
    def before_worker_shutdown(self) -> None:
        finish_saves(_HAND_OVER_S)


def finish_saves(timeout_s: float) -> int:
    """Wait until this process's asynchronous saves are committed or have failed.

    Return how many of its groups still save after ``timeout_s`` seconds. A worker does this when Ray Train stops it.
    Nothing is raised: a save that has failed is for whoever asked for it.
    """
    deadline = time.monotonic() + timeout_s
    return sum(not group.background.wait_for_latest(max(0.0, deadline - time.monotonic())) for group in joined_groups())


@_never_fails_the_run
def _start_coordinator(name: str) -> None:
    """Have the run's coordinator up before its workers are, for as long as the controller lives."""
    ensure_coordinator(name, keeper=ray.get_runtime_context().current_actor)


@_never_fails_the_run
def _tell_coordinator(group: str, failed: dict[int, str], workers: list[Any]) -> None:
    """Keep ranks that wait for failed ones in a save or load from waiting until Ray stops them."""
    # A rank whose training has failed may be alive, and write in the background what it saved before.
    finished = [worker.execute_async(finish_saves, _HAND_OVER_S) for worker in workers]
    ray.wait(finished, num_returns=len(finished), timeout=_HAND_OVER_S + 1)
    ray.get_actor(f"coordinator/{group}", namespace=NAMESPACE).ranks_failed.remote(failed)
