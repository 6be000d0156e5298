"""What is compared, behind one face: torch's DCP in its process group, ray_dcp in a group of Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ray_dcp
from side_by_side.unchecked import checksums_off

TORCH = "torch"
TORCH_BEST = "torch_best"
RAY_DCP = "ray_dcp"
UNCHECKED = "unchecked"
"""ray_dcp with its checksums turned off, to see what they cost."""
UNCOMPARED = "uncompared"
"""ray_dcp without a look at whether replicas are the same, to see what that costs."""
OVERLAPPED = "overlapped"
"""ray_dcp's asynchronous saves that copy while training goes on."""
OF_TORCH = (TORCH, TORCH_BEST)
_OF_TORCH = "fsync of each shard file and of .metadata; not of the folder that holds their names"
_OF_RAY_DCP = "fsync of each shard file, of manifest.parquet and .metadata, and of the folders"
DURABILITY: Mapping[str, str] = {
    TORCH: _OF_TORCH,
    TORCH_BEST: _OF_TORCH,
    RAY_DCP: _OF_RAY_DCP,
    UNCHECKED: _OF_RAY_DCP,
    UNCOMPARED: _OF_RAY_DCP,
    OVERLAPPED: _OF_RAY_DCP,
}
"""What is durable when a save returns, by default. ``save_unsynced`` is the one call without, on all sides."""


class Side(Protocol):
    """Called by every rank."""

    def save(self, state: dict[str, Any], folder: str) -> None: ...

    def save_unsynced(self, state: dict[str, Any], folder: str) -> None:
        """Save without any fsync: into the page cache."""
        ...

    def load(self, template: dict[str, Any], folder: str) -> int | None:
        """How many bytes this rank has read from storage, where the side says so."""
        ...

    def async_save(self, state: dict[str, Any], folder: str) -> tuple[Future[Any] | None, Future[Any]]:
        """Until when the state must not change (None: it may already), and until when the checkpoint is not durable."""
        ...

    def warm_up(self, state: dict[str, Any], folder: str) -> None:
        """Do before training whatever the side has for that, so that its first asynchronous save is quicker."""
        ...


class TorchSide:
    """``torch.distributed.checkpoint`` on the default process group, called as its tutorial does."""

    def save(self, state: dict[str, Any], folder: str) -> None:
        torch_dcp.save(state, checkpoint_id=folder)

    def save_unsynced(self, state: dict[str, Any], folder: str) -> None:
        torch_dcp.save(state, storage_writer=FileSystemWriter(folder, sync_files=False))

    def load(self, template: dict[str, Any], folder: str) -> int | None:
        torch_dcp.load(template, checkpoint_id=folder)
        return None

    def async_save(self, state: dict[str, Any], folder: str) -> tuple[Future[Any] | None, Future[Any]]:
        saving = torch_dcp.async_save(state, checkpoint_id=folder)
        if isinstance(saving, Future):
            return None, saving
        return saving.staging_completion, saving.upload_completion

    def warm_up(self, state: dict[str, Any], folder: str) -> None:
        pass  # it has nothing for that


class TorchBestSide:
    """Torch with what makes it quickest here; a load has nothing to set.

    Two threads a rank, cached plans; asynchronous saves by a process of its own out of shared memory that is kept,
    copied there behind the caller's back.
    """

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None

    def save(self, state: dict[str, Any], folder: str) -> None:
        torch_dcp.save(state, storage_writer=_best_writer(folder), planner=_best_planner())

    def save_unsynced(self, state: dict[str, Any], folder: str) -> None:
        torch_dcp.save(state, storage_writer=_best_writer(folder, sync_files=False), planner=_best_planner())

    def load(self, template: dict[str, Any], folder: str) -> int | None:
        torch_dcp.load(template, checkpoint_id=folder)
        return None

    def async_save(self, state: dict[str, Any], folder: str) -> tuple[Future[Any] | None, Future[Any]]:
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False))
        saving = torch_dcp.async_save(
            state,
            storage_writer=_best_writer(folder),
            planner=_best_planner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        assert not isinstance(saving, Future), "staging behind the caller's back has a future of its own"
        return saving.staging_completion, saving.upload_completion

    def warm_up(self, state: dict[str, Any], folder: str) -> None:
        pass  # it has nothing for that


class RayDcpSide:
    """``ray_dcp`` in the current group."""

    def save(self, state: dict[str, Any], folder: str) -> None:
        ray_dcp.save(state, checkpoint_id=folder)

    def save_unsynced(self, state: dict[str, Any], folder: str) -> None:
        ray_dcp.save(state, storage_writer=ray_dcp.StoreWriter(folder, sync_files=False))

    def load(self, template: dict[str, Any], folder: str) -> int | None:
        return ray_dcp.load(template, checkpoint_id=folder).nbytes_read

    def async_save(self, state: dict[str, Any], folder: str) -> tuple[Future[Any] | None, Future[Any]]:
        saving = ray_dcp.async_save(state, checkpoint_id=folder)
        return saving.staging_completion, saving.upload_completion

    def warm_up(self, state: dict[str, Any], folder: str) -> None:
        ray_dcp.warm_up(state, checkpoint_id=folder)


class UncheckedSide(RayDcpSide):
    """``ray_dcp`` as it would be if it computed no checksum; only for checkpoints that it has saved itself."""

    def save(self, state: dict[str, Any], folder: str) -> None:
        with checksums_off():
            super().save(state, folder)

    def load(self, template: dict[str, Any], folder: str) -> int | None:
        with checksums_off():
            return super().load(template, folder)


class UncomparedSide(RayDcpSide):
    """``ray_dcp`` with ``replica_check="off"``."""

    def save(self, state: dict[str, Any], folder: str) -> None:
        ray_dcp.save(state, checkpoint_id=folder, replica_check="off")


class OverlappedSide(RayDcpSide):
    """``ray_dcp`` with ``overlap=True``."""

    def async_save(self, state: dict[str, Any], folder: str) -> tuple[Future[Any] | None, Future[Any]]:
        saving = ray_dcp.async_save(state, checkpoint_id=folder, overlap=True)
        return saving.staging_completion, saving.upload_completion


SIDES: Mapping[str, Side] = {
    TORCH: TorchSide(),
    TORCH_BEST: TorchBestSide(),
    RAY_DCP: RayDcpSide(),
    UNCHECKED: UncheckedSide(),
    UNCOMPARED: UncomparedSide(),
    OVERLAPPED: OverlappedSide(),
}


def _best_writer(folder: str, *, sync_files: bool = True) -> FileSystemWriter:
    return FileSystemWriter(folder, thread_count=2, sync_files=sync_files)


def _best_planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True)
