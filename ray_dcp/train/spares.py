"""Spare processes: idle ones on the nodes of a run, which its next workers start in within a moment.

Starting a worker takes seconds, nearly all of them imports. Ray gives a new actor an idle process of the same job and
runtime environment, if one is there that has done no task yet, and its raylets start such processes on request. What
they are to do first they learn from a hook in the runtime environment of the workers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.runtime_env import RuntimeEnv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_dcp.cluster.link import NAMESPACE
from ray_dcp.cluster.ray_private import private
from ray_dcp.train.spare_process import Surroundings, own_surroundings

logger = logging.getLogger(__name__)

_SETTLE_S = 3.0
"""Training goes on for this long before spare processes are started: by then it has loaded its modules."""
_MAX_SETTLE_S = 60.0
"""The longest such time: a run that fails again and again gets spare processes ever later, since each round costs CPU
time, and may leave one over."""
_KEEP_ALIVE_S = 3600
"""How long a raylet keeps a process that nobody uses; then a new one is started."""
_IMPORT_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 20.0
_SPARES_END_S = 3.0
_IMPORTED_LOOK_S = 0.5


class Spares:
    """The spare processes of one run; for its controller. Methods may raise what Ray raises."""

    def __init__(self, run_id: str, packages: Iterable[str]) -> None:
        self._key = f"spares/{run_id}"
        self._packages = tuple(packages)
        self._waiting: Counter[str] = Counter()
        """How many spare processes each node should have; one may have been taken or have died meanwhile."""
        self._started_at = time.monotonic()
        self._group_started_at = -math.inf
        self._settle_s = _SETTLE_S
        self._surroundings: Surroundings | None = None
        self._needed = threading.Event()
        self._lock = threading.Lock()

    def put_hook_into(self, run_config: Any) -> None:
        """Let all workers of the run, and so their spares, begin with a look for what to import.

        Raises ``ValueError`` where they have such a hook already, of the user's.
        """
        hook_variable = private("WORKER_PROCESS_SETUP_HOOK_ENV_VAR")
        export = private("global_worker").function_actor_manager.export_setup_func
        own = dict(run_config.worker_runtime_env or {})
        variables = dict(own.get("env_vars") or {})
        inherited = ray.get_runtime_context().runtime_env
        for environment in (own, inherited):
            if "worker_process_setup_hook" in environment or hook_variable in (environment.get("env_vars") or {}):
                raise ValueError("the workers have a worker_process_setup_hook already")
        key = export(_hook(self._key), timeout=_ANSWER_TIMEOUT_S)
        variables[hook_variable] = private("decode_function_key")(key)
        run_config.worker_runtime_env = {**own, "env_vars": variables}

    def group_started(self, workers: Iterable[Any]) -> None:
        """New workers have started, in spare processes where there were some: start others in their place."""
        workers, now = list(workers), time.monotonic()
        with self._lock:
            failed_soon = now < self._group_started_at + _MAX_SETTLE_S
            self._settle_s = min(2 * self._settle_s, _MAX_SETTLE_S) if failed_soon else _SETTLE_S
            self._group_started_at = now
            self._needed.set()
            needed = self._needed = threading.Event()
            for node_id in (worker.metadata.node_id for worker in workers):
                self._waiting[node_id] = max(0, self._waiting[node_id] - 1)
        threading.Thread(target=self._keep_up, args=(workers, needed), name="ray_dcp-spares", daemon=True).start()

    def group_ended(self) -> None:
        """Start no more for the group that there was."""
        self._needed.set()

    def release(self) -> None:
        """The run is over: let its spare processes end."""
        self.group_ended()
        with self._lock:
            waiting, self._waiting = self._waiting, Counter()
            surroundings = self._surroundings
        if surroundings is None:
            return
        private("_internal_kv_del")(self._key, del_by_prefix=True, namespace=NAMESPACE)
        # Raylets end a process by themselves only when its time has come. One that becomes an actor can be told.
        taken = [
            ray.remote(num_cpus=0, runtime_env=RuntimeEnv.deserialize(surroundings.runtime_env))(_Taker)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
            .remote()
            for node_id in waiting.elements()
        ]
        ray.wait([actor.__ray_ready__.remote() for actor in taken], num_returns=len(taken), timeout=_SPARES_END_S)
        for actor in taken:
            ray.kill(actor)

    def _keep_up(self, workers: list[Any], ended: threading.Event) -> None:
        try:
            wait_s = self._settle_s
            while not ended.wait(wait_s):
                self._start_missing(workers, ended)
                # By then the ones that nobody has used are gone.
                wait_s = _KEEP_ALIVE_S
        except Exception as error:  # noqa: BLE001 - the next start takes as long as without
            logger.warning("no spare processes, so a restart takes longer: %r", error)

    def _start_missing(self, workers: list[Any], ended: threading.Event) -> None:
        surroundings = ray.get(workers[0].execute_async(own_surroundings, self._packages), timeout=_ANSWER_TIMEOUT_S)
        per_node = Counter(worker.metadata.node_id for worker in workers)
        with self._lock:
            if time.monotonic() > self._started_at + _KEEP_ALIVE_S:
                self._waiting.clear()
            missing = per_node - self._waiting
            self._surroundings = surroundings
            if ended.is_set() or not missing:
                return
            self._waiting += missing
            self._started_at = time.monotonic()
        private("_internal_kv_put")(f"{self._key}/begin", surroundings.encoded(), namespace=NAMESPACE)
        _ask_raylets_for(missing, surroundings)
        self._wait_until_imported(missing.total(), ended)

    def _wait_until_imported(self, num_processes: int, ended: threading.Event) -> None:
        deadline = time.monotonic() + _IMPORT_TIMEOUT_S
        while time.monotonic() < deadline and not ended.wait(_IMPORTED_LOOK_S):
            done = private("_internal_kv_list")(f"{self._key}/done/", namespace=NAMESPACE)
            if len(done) >= num_processes:
                break
        # From now on a process that is started with that runtime environment is not a spare one: say, a task's.
        private("_internal_kv_del")(self._key, del_by_prefix=True, namespace=NAMESPACE)


class _Taker:
    """An actor that takes a spare process, to be killed with it."""


def _hook(key: str) -> Callable[[], None]:
    get, put, namespace = private("_internal_kv_get"), private("_internal_kv_put"), NAMESPACE

    def look_for_what_to_import() -> None:
        # Ray ends a process whose hook raises. It gets this function by value, so nothing need be importable there.
        try:
            import os
            import threading

            encoded = get(f"{key}/begin", namespace=namespace)
            if encoded is None:
                return  # the usual case: this is not a spare process

            def import_behind_others() -> None:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
                from ray_dcp.train.spare_process import Surroundings, import_all

                import_all(Surroundings.decoded(encoded))

            # A thread that ends: the process is to be as fast as any other when it becomes a worker.
            importing = threading.Thread(target=import_behind_others)
            importing.start()
            importing.join()
            put(f"{key}/done/{os.urandom(8).hex()}", b"", namespace=namespace)
        except Exception:  # noqa: BLE001 - it is as good a process as any other
            return

    return look_for_what_to_import


def _ask_raylets_for(missing: Mapping[str, int], surroundings: Surroundings) -> None:
    connected = private("init_grpc_channel")
    environment = RuntimeEnv.deserialize(surroundings.runtime_env)
    request = private("node_manager_pb2").PrestartWorkersRequest(
        runtime_env_info=private("get_runtime_env_info")(environment),
        language=private("common_pb2").PYTHON,
        job_id=bytes.fromhex(surroundings.job_id),
        keep_alive_duration_secs=_KEEP_ALIVE_S,
    )
    # To the letter: Ray compares it as a text.
    request.runtime_env_info.serialized_runtime_env = surroundings.runtime_env
    for node in ray.nodes():
        if node["Alive"] and missing.get(node["NodeID"]):
            request.num_workers = missing[node["NodeID"]]
            with connected(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
                stub = private("node_manager_pb2_grpc").NodeManagerServiceStub(channel)
                stub.PrestartWorkers(request, timeout=_ANSWER_TIMEOUT_S)
