"""Every private symbol of Ray that ray_dcp uses, and what is lost in a Ray that no longer has it.

Nothing else in ``ray_dcp`` may import a private symbol of Ray, and each private attribute of Ray's objects that is
used anywhere is listed here; tests see to both, and name the symbols that the installed Ray lacks. Private is what
begins with an underscore, and ``ray.experimental``, ``ray.core.generated`` and ``ray.train.v2``. Nothing is imported
before it is asked for: workers do without most of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

_STORE = "ray.experimental.internal_kv"
_CONTROLLER = "ray.train.v2._internal.execution.controller.controller.TrainController"
_CALLBACKS = "ray.train.v2._internal.execution.callback"
_NO_SPARES = "No spare processes: a restart takes seconds longer."
_LATE = "The controller notices a failed rank at its usual look, every two seconds."
_NO_CALLBACK = "There is no CheckpointCallback."

SYMBOLS: Mapping[str, str] = {
    f"{_STORE}._internal_kv_put": "A group ends with its coordinator, and its ranks join again; and as for _list.",
    f"{_STORE}._internal_kv_get": "As for _internal_kv_put.",
    f"{_STORE}._internal_kv_del": "As for _internal_kv_put.",
    f"{_STORE}._internal_kv_list": _NO_SPARES,
    "ray._private.worker.global_worker": "An actor that ends by itself does not tell of its saves under way, and "
    "CheckpointCallback does not reach its controller or keep spare processes.",
    "ray._private.state.available_resources_per_node": "RankPool cannot shrink to the ranks that have room.",
    "ray._private.ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR": _NO_SPARES,
    "ray._private.runtime_env.setup_hook.decode_function_key": _NO_SPARES,
    "ray._private.grpc_utils.init_grpc_channel": _NO_SPARES,
    "ray._private.utils.get_runtime_env_info": _NO_SPARES,
    "ray.core.generated.common_pb2": _NO_SPARES,
    "ray.core.generated.node_manager_pb2": _NO_SPARES,
    "ray.core.generated.node_manager_pb2_grpc": _NO_SPARES,
    "ray.actor.ActorHandle._get_local_state": _LATE,
    "ray.actor.ActorHandle._actor_id": "A TorchTrainer worker does not know its worker group, and must join one.",
    "ray.actor.__ray_call__": f"{_LATE[:-1]}, and no coordinator notices that an idle member has died.",
    "ray.actor.__ray_ready__": "RankPool does not tell which ranks are lost, and spare processes end an hour late.",
    "ray.actor.__ray_metadata__": "RankPool takes classes that are not decorated with ray.remote only.",
    "ray._raylet.__ray_shutdown__": "An actor that ends by itself does not tell of its saves under way.",
    f"{_CALLBACKS}.ControllerCallback": _NO_CALLBACK,
    f"{_CALLBACKS}.WorkerGroupCallback": _NO_CALLBACK,
    f"{_CALLBACKS}.WorkerCallback": _NO_CALLBACK,
    f"{_CONTROLLER}._poll_workers": _LATE,
    f"{_CONTROLLER}._health_check_interval_s": _LATE,
    f"{_CONTROLLER}._latest_poll_time": _LATE,
    f"{_CONTROLLER}._scaling_policy": "An elastic restart waits until Ray knows that a node is lost.",
    "ray.train.v2._internal.execution.scaling_policy.elastic.ElasticScalingPolicy._get_reserved_resources": "As for "
    "_scaling_policy.",
    "ray.train.v2._internal.execution.context._train_context": "TorchTrainer workers are not known as such: each "
    "must join a group and name a root.",
    "ray.train.v2._internal.execution.context.get_train_context": _LATE,
    "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator.get_or_create_autoscaling_coordinator": "An "
    "elastic restart takes as long as Ray's own: up to 20 seconds more.",
}
"""Every symbol, by its place in Ray, with all that is lost without it: what needs it says so, or does without and logs
that."""


def private(name: str) -> Any:
    """Return the symbol of Ray that ``SYMBOLS`` lists by this last name.

    Raises ``ImportError`` where Ray lacks it, for callers to say what they do without.
    """
    module, _, name = _PLACES[name].rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    return found if found is not None else importlib.import_module(f"{module}.{name}")


def train_context() -> Any:
    """Return what Ray Train knows of this worker; None outside of one.

    It is looked up, not imported: a process in which nobody loaded Ray Train is not one of its workers, and importing
    it takes a second.
    """
    module = sys.modules.get(TRAIN_CONTEXT_MODULE)
    return None if module is None else getattr(module, "_train_context", None)


TRAIN_CONTEXT_MODULE = "ray.train.v2._internal.execution.context"
_PLACES = {dotted.rpartition(".")[2]: dotted for dotted in SYMBOLS}
