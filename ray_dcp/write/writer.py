"""``StoreWriter``: DCP's ``StorageWriter`` on a ``Store``.

Every save writes under names of its own (the attempt), so nothing that is committed is touched. What each rank writes
is in ``shard_file``, the commit in ``commit``.
"""

from __future__ import annotations

import dataclasses
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ray_dcp.errors import (
    StateDictError,
)
from ray_dcp.format.manifest import (
    DifferingReplicas,
    EntryTable,
    Manifest,
    encode_manifest,
    metadata_digest,
)
from ray_dcp.format.metadata_file import encode_metadata
from ray_dcp.format.metrics import json_values
from ray_dcp.format.names import (
    METADATA,
    ShardFile,
    new_attempt,
    parse_shard_file,
    require_step,
)
from ray_dcp.pace.interval import Figures, Interval
from ray_dcp.planning.values.containers import Containers
from ray_dcp.progress import advance
from ray_dcp.staging.sealing import write_sealed
from ray_dcp.store.local import without_sync
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url
from ray_dcp.store.open import open_store, opens
from ray_dcp.store.store import Store, as_renaming
from ray_dcp.trace_points import Point, reached
from ray_dcp.version import __version__
from ray_dcp.write.commit import Commit, committed_by
from ray_dcp.write.lazy_metadata import CommittedMetadata
from ray_dcp.write.results import WrittenItems, as_written_items, entry_table, storage_data
from ray_dcp.write.shard_file import write_shard_file
from ray_dcp.write.staged_file import StagedFile


@dataclasses.dataclass(frozen=True, slots=True)
class ShardTarget:
    """What the global plan tells a rank about its files."""

    rank: int
    attempt: str


def shard_key(target: ShardTarget) -> str:
    """The key of the file that a rank writes."""
    return ShardFile(target.rank, 0, target.attempt).key


class StoreWriter(StorageWriter):
    """Writes a checkpoint to a path or URL, all or nothing.

    ``set_up_storage_writer``, ``prepare_local_plan`` and ``write_data`` run on every rank,
    ``prepare_global_plan`` and ``finish`` once, at the coordinator. ``step`` and ``metrics`` (JSON values) are
    recorded in the manifest. Also usable with ``torch.distributed.checkpoint.save``.

    ``sync_files=False`` leaves it to the operating system when local files reach the disk: a commit then no longer
    means that the checkpoint survives a power cut or a crash of the node. It is for scratch folders and tmpfs.
    """

    figures: Figures | None = None
    """What this rank has measured of steps and saves; set before the plan. The manifest keeps rank 0's."""
    in_memory = False
    """Whether the checkpoint is to be kept in memory alone, so that nothing is put; set before the plan."""
    kept: tuple[bytes, bytes] | None = None
    """Its ``.metadata`` and its manifest then, once they are made: that commits it."""
    interval: Interval | None = None
    """The interval to the next save that all ranks have agreed on; None until the plan is answered."""

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        sync_files: bool = True,
    ) -> None:
        super().__init__()
        self.checkpoint_id = absolute(checkpoint_id) if checkpoint_id is not None else ""
        self.step = None if step is None else require_step(step)
        self.metrics = json_values(metrics or {})
        self.sync_files = sync_files
        self.differing: Sequence[DifferingReplicas] = ()
        """Values that differ between the ranks of the save under way; the manifest records them."""
        self.containers: Containers | None = None
        """What the manifest says of the state dict's keys and kinds of dict; set before ``finish``."""
        self._commit = Commit()
        self._planned: dict[Any, int] = {}
        self._written_key: str | None = None

    @property
    def attempt(self) -> str:
        """The name of the save that is under way, which its shard files have too; empty while it has none."""
        return self._commit.attempt

    @property
    def may_have_committed(self) -> bool:
        """Whether ``finish`` has got as far as putting ``.metadata``, whether or not that worked."""
        return self._commit.may_have_happened

    @property
    def store(self) -> Store:
        """The store at the checkpoint's place."""
        store = open_store(self.checkpoint_id)
        return store if self.sync_files else without_sync(store)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = absolute(checkpoint_id)
        self._written_key = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Name the attempt, on the coordinator rank: a coordinator that starts over then goes on with the same name."""
        self._commit = Commit(new_attempt() if is_coordinator else "")
        self.differing = ()
        self.containers = None

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=shown_url(self.checkpoint_id), save_id=self.attempt or None)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt. Raises ``StoreError`` where the place itself is wrong (a file, no permission)."""
        targets = self.begin_attempt(len(plans))
        self._planned = {item.index: rank for rank, plan in enumerate(plans) for item in plan.items}
        return [dataclasses.replace(plan, storage_data=target) for plan, target in zip(plans, targets, strict=True)]

    def begin_attempt(self, world_size: int) -> list[ShardTarget]:
        """Begin an attempt; return what ``prepare_global_plan`` tells each rank, in rank order.

        Raises ``StoreError`` as that does.
        """
        if self.in_memory:
            self._commit.begin_in_memory(world_size)
        else:
            self._commit.begin(self.store, world_size)
        return [ShardTarget(rank, self.attempt) for rank in range(world_size)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one new shard file, which is durable when this returns.

        Without items there is no file.
        """
        target: ShardTarget = plan.storage_data
        written: Sequence[WriteResult] = []
        if plan.items:
            self._written_key = key = shard_key(target)
            columns = write_shard_file(self.store, key, target.rank, plan.items, planner)
            written = WrittenItems([item.index for item in plan.items], columns)
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)  # type: ignore[arg-type]  # to torch any sequence will do
        return future

    def write_staged(self, file: StagedFile, memory: memoryview, *, again: bool = False) -> array[int]:
        """Write a staged file, which is durable when this returns; return the checksums that it lacked.

        ``again``: another process may have written it before, or still be at it. The file is then put in its place
        whole, with the same bytes, so that whoever reads it meanwhile sees nothing of it.
        """
        self._written_key = file.key
        store = self.store
        renaming = as_renaming(store) if again else None
        if renaming is None:
            return write_sealed(store, file.key, memory, file.nbytes, file.open_ends, advance)
        beside = parse_shard_file(file.key)
        assert beside is not None, "a staged file has the name of a shard file"
        second = dataclasses.replace(beside, number=beside.number + 1).key
        crcs = write_sealed(store, second, memory, file.nbytes, file.open_ends, advance)
        renaming.rename(second, file.key)
        return crcs

    def abandon(self) -> None:
        """Remove the file that this rank wrote in an attempt that has failed: it was never part of a checkpoint."""
        if self._written_key is not None:
            self.store.delete(self._written_key)
            self._written_key = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, which is there when this returns.

        Raises ``StateDictError`` unless every planned item has exactly one result, and ``SupersededError`` where a
        newer attempt at this checkpoint has begun to write. Safe to call again with the same attempt and results: a
        checkpoint that is committed already is left alone.
        """
        reached(Point.BEFORE_MANIFEST)
        stored = [item for of_rank in results for item in of_rank]
        self._require_all_written(stored)
        metadata.storage_data = {item.index: item.storage_data for item in stored}
        entries = entry_table([written for of_rank in results for written in as_written_items(of_rank)])
        self._put(metadata, entries)

    def finish_columns(self, metadata: Metadata, written: Sequence[WrittenItems]) -> CommittedMetadata:
        """Commit like ``finish``, for complete results in columns; return the metadata as it is stored."""
        reached(Point.BEFORE_MANIFEST)
        metadata.storage_data = storage_data(written)
        return CommittedMetadata(self._put(metadata, entry_table(written)), METADATA)

    def _put(self, metadata: Metadata, entries: EntryTable) -> bytes:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        encoded = encode_metadata(metadata)
        if self.in_memory:
            self.kept = encoded, encode_manifest(self._manifest(entries, encoded))
            return encoded
        self._commit.put(self.store, encoded, lambda: encode_manifest(self._manifest(entries, encoded)), entries.files)
        return encoded

    def committed(self, attempt: str) -> CommittedMetadata | None:
        """The metadata that is committed now, as it is stored, if it is that of ``attempt``; else None."""
        encoded = committed_by(self.store, attempt)
        return None if encoded is None else CommittedMetadata(encoded, METADATA)

    def give_up(self) -> None:
        """Refuse to commit from now on, also in a ``finish`` that is under way in another thread."""
        self._commit.give_up()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return opens(checkpoint_id)

    def _require_all_written(self, stored: Sequence[WriteResult]) -> None:
        written = {item.index for item in stored}
        lacking = [f"{index.fqn} at {index.offset} of rank {rank}" for index, rank in self._planned.items()
                   if index not in written]  # fmt: skip
        if lacking or len(stored) != len(self._planned):
            unplanned = sorted(index.fqn for index in written - self._planned.keys())
            raise StateDictError(
                f"{len(self._planned)} items were planned and {len(stored)} written; nothing was committed",
                [f"not written: {name}" for name in lacking] + [f"not planned: {name}" for name in unplanned],
            )

    def _pace(self) -> Mapping[str, Any] | None:
        if self.figures is None or self.figures.step_s is None:
            return None
        return dataclasses.replace(self.figures, num_ranks=self._commit.world_size).as_json()

    def _manifest(self, entries: EntryTable, encoded_metadata: bytes) -> Manifest:
        return Manifest(
            entries=entries,
            world_size=self._commit.world_size,
            attempt=self.attempt,
            metadata_digest=metadata_digest(encoded_metadata),
            created=time.time(),
            step=self.step,
            metrics=self.metrics,
            versions={"torch": torch.__version__, "ray_dcp": __version__},
            differing=self.differing,
            containers=self.containers,
            pace=self._pace(),
        )
