"""What a TorchTrainer worker knows about its run: the group it belongs to, and where the run stores things.

Everything here answers None outside of a worker, and costs a dictionary look-up when Ray Train is not loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from ray_dcp.cluster.ray_private import train_context
from ray_dcp.errors import ConfigError
from ray_dcp.store.location.urls import BUCKETS, BucketUrl, join_url, url_scheme


@dataclass(frozen=True, slots=True)
class TrainGroupSpec:
    """A TorchTrainer worker's place in its worker group."""

    group: str
    """The group's name: the same for every worker group of one run, and for the run when it is started again."""
    rank: int
    world_size: int
    incarnation: str
    """A name for the worker group: the same on all its ranks, and different from that of any other."""


def train_group_spec() -> TrainGroupSpec | None:
    """Return this worker's place in its TorchTrainer run, or None outside of one."""
    context = train_context()
    if context is None:
        return None
    return TrainGroupSpec(
        group=train_group_name(context.get_experiment_name(), context.get_storage().experiment_fs_path),
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        incarnation=_incarnation(context),
    )


def train_group_name(experiment_name: str, experiment_path: str) -> str:
    """Name the group of a run: readable, and different for two runs of one name in different folders."""
    digest = hashlib.sha256(experiment_path.encode()).hexdigest()[:8]
    return f"train-{experiment_name}-{digest}"


def experiment_root() -> str | None:
    """Return the run's experiment folder as a path or a URL, or None outside of a TorchTrainer worker.

    Raises ``ConfigError`` where no URL describes it: the run has a ``storage_filesystem`` of its own.
    """
    context = train_context()
    if context is None:
        return None
    storage = context.get_storage()
    if storage.storage_filesystem.type_name == "local":
        return str(storage.experiment_fs_path)
    if storage.custom_fs_provided:
        raise ConfigError(
            "root",
            "this run has a storage_filesystem of its own, which no URL describes. "
            "Give CheckpointManager a root, or RunConfig a storage_path that is a URL.",
        )
    storage_path = context.train_run_context.run_config.storage_path
    if url_scheme(storage_path) in BUCKETS:
        # Ray's URLs are Arrow's, which have escapes such as %20 in their keys; ours have none.
        bucket, _, prefix = str(storage.experiment_fs_path).partition("/")
        return str(dataclasses.replace(BucketUrl.parse(storage_path), bucket=bucket, prefix=prefix))
    return join_url(storage_path, storage.experiment_dir_name)


def ray_num_to_keep() -> int | None:
    """Return how many checkpoints Ray Train itself keeps in this run; None: all of them, or no run."""
    context = train_context()
    if context is None:
        return None
    num_to_keep: int | None = context.train_run_context.run_config.checkpoint_config.num_to_keep
    return num_to_keep


def _incarnation(context: Any) -> str:
    # Ray starts one synchronization actor for each worker group, and an actor id is never used again.
    try:
        return str(context.get_synchronization_actor()._actor_id.hex())
    except AttributeError as missing:
        import ray

        raise ConfigError(
            "group",
            f"Ray {ray.__version__} does not say which worker group this worker belongs to ({missing}). "
            "Join one explicitly: ray_dcp.RankGroup.join(name, rank=..., world_size=...).",
        ) from missing
