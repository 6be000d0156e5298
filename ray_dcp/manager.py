"""``CheckpointManager``: the checkpoints of a run, one folder a step under one root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ray_dcp.api import AsyncSaveResponse, absolute, async_save, load, newest, preparing, save
from ray_dcp.catalog import CheckpointInfo, describe, latest_checkpoint, list_checkpoints
from ray_dcp.cluster.group import RankGroup
from ray_dcp.cluster.train_context import experiment_root
from ray_dcp.dcp_io.store_writer import StoreWriter
from ray_dcp.errors import ConfigError
from ray_dcp.layout import step_folder
from ray_dcp.storage.urls import join_url


class CheckpointManager:
    """Saves and loads steps under ``root``; every rank makes one and calls it alike.

    ``root`` is a path or URL; None, in a TorchTrainer worker, is the run's experiment folder. ``group`` defaults to
    ``current_group()`` at each call.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, group: RankGroup | None = None) -> None:
        found = root if root is not None else experiment_root()
        if found is None:
            raise ConfigError("root", "pass a path or URL; only a TorchTrainer worker has a default")
        self.root = absolute(found)
        self._group = group
        self._latest_async: Future[Any] | None = None

    def save(
        self, step: int, state_dict: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> CheckpointInfo:
        """Save a step; returns when it is committed and durable. ``metrics`` are JSON values, kept with it."""
        writer = self._writer(step, metrics)
        save(state_dict, storage_writer=writer, group=self._group)
        return describe(writer.checkpoint_id)

    def async_save(
        self, step: int, state_dict: Mapping[str, Any], metrics: Mapping[str, Any] | None = None
    ) -> AsyncSaveResponse:
        """Save a step in the background; returns when the state dict may change."""
        response = async_save(state_dict, storage_writer=self._writer(step, metrics), group=self._group)
        self._latest_async = response.upload_completion
        return response

    def load(self, state_dict: dict[str, Any], step: int | None = None) -> int | None:
        """Load ``step``, or the newest committed one; the step loaded, or None when there is none.

        Which one is newest is looked up once for all ranks.
        """
        if step is None:
            newest_step = newest(self.root, group=self._group)
            if newest_step is None or newest_step.step is None:
                return None
            step = newest_step.step
        with preparing("load", self._group):
            checkpoint_id = self.checkpoint_id(step)
        load(state_dict, checkpoint_id=checkpoint_id, group=self._group)
        return step

    def latest(self) -> CheckpointInfo | None:
        """The newest step that is committed and whole."""
        return latest_checkpoint(self.root)

    def list(self) -> list[CheckpointInfo]:
        """All committed steps, oldest first."""
        return [info for info in list_checkpoints(self.root) if info.step is not None]

    def checkpoint_id(self, step: int) -> str:
        """Where ``step`` is or would be."""
        return join_url(self.root, step_folder(step))

    def wait(self) -> None:
        """Return when the asynchronous save under way is committed. Raises ``CheckpointException`` if it failed."""
        if self._latest_async is not None:
            self._latest_async.result()

    def close(self) -> None:
        """Finish what is under way. The group stays open: it belongs to whoever joined it."""
        self.wait()
        self._latest_async = None

    def _writer(self, step: int, metrics: Mapping[str, Any] | None) -> StoreWriter:
        with preparing("save", self._group):
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ConfigError("step", f"{step!r} is no step number")
            return StoreWriter(self.checkpoint_id(step), step=step, metrics=metrics)
