"""``StoreWriter``: DCP's ``StorageWriter`` on a ``Store``, and the one place where a checkpoint is committed.

Shard files, then the manifest, then ``.metadata``. Every save writes under names of its own (the attempt), so
nothing that is committed is touched; putting ``.metadata`` is the only step that readers see.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ray_dcp.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    ObjectNotFoundError,
    StateDictError,
    StoreError,
    SupersededError,
)
from ray_dcp.format.manifest import (
    DifferingReplicas,
    EntryTable,
    Manifest,
    decode_facts,
    encode_manifest,
    metadata_digest,
)
from ray_dcp.format.metadata_file import encode_metadata
from ray_dcp.format.metrics import json_values
from ray_dcp.format.names import (
    MANIFEST,
    METADATA,
    ShardFile,
    attempt_order,
    is_newer,
    new_attempt,
    parse_shard_file,
    require_step,
)
from ray_dcp.format.zip_record import MAX_ROW_PAYLOAD_NBYTES
from ray_dcp.planning.save_plan.plan_table import Key
from ray_dcp.planning.save_plan.state_planner import tensor_problem
from ray_dcp.planning.values.containers import Containers
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.store.local import without_sync
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import shown_url
from ray_dcp.store.open import open_store, opens
from ray_dcp.store.store import Preallocates, Store, StoredObject
from ray_dcp.trace_points import Point, reached
from ray_dcp.version import __version__
from ray_dcp.write.lazy_metadata import CommittedMetadata
from ray_dcp.write.results import WrittenColumns, WrittenItems, as_written_items, entry_table, storage_data
from ray_dcp.write.tensor_record import JoinedWrites, Row, TensorRecord, write_python

_NUM_AHEAD = 64
"""Items that are made ready at once; see ``TensorRecord``."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardTarget:
    """What the global plan tells a rank of its files."""

    rank: int
    attempt: str


class StoreWriter(StorageWriter):
    """Writes a checkpoint to a path or URL, all or nothing.

    ``set_up_storage_writer``, ``prepare_local_plan`` and ``write_data`` run on every rank,
    ``prepare_global_plan`` and ``finish`` once, at the coordinator. ``step`` and ``metrics`` (JSON values) are
    recorded in the manifest. Also usable with ``torch.distributed.checkpoint.save``.

    ``sync_files=False`` leaves it to the operating system when local files reach the disk: a commit then no longer
    means that the checkpoint survives a power cut or a crash of the node. For scratch folders and tmpfs.
    """

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
        """Values of the save under way that ranks hold differently; kept with it."""
        self.containers: Containers | None = None
        """What the manifest says of the state dict's keys and kinds of dict; set before ``finish``."""
        self._attempt = ""
        self._world_size = 0
        self._planned: dict[Any, int] = {}
        self._written_files: set[str] = set()
        self._written_key: str | None = None
        self._given_up = False
        self.may_have_committed = False
        """Whether ``finish`` has come as far as putting ``.metadata``, whatever became of it."""

    @property
    def attempt(self) -> str:
        """Names the save that is under way, as its shard files do; empty before the first."""
        return self._attempt

    @property
    def store(self) -> Store:
        store = open_store(self.checkpoint_id)
        return store if self.sync_files else without_sync(store)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = absolute(checkpoint_id)
        self._written_key = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Name the attempt: on the coordinator rank, so that a coordinator that starts over goes on with the same."""
        self._attempt = new_attempt() if is_coordinator else ""
        self._given_up = self.may_have_committed = False
        self.differing = ()
        self.containers = None

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=shown_url(self.checkpoint_id), save_id=self._attempt or None)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt. Raises ``StoreError`` where the place itself is wrong (a file, no permission)."""
        targets = self.begin_attempt(len(plans))
        self._planned = {item.index: rank for rank, plan in enumerate(plans) for item in plan.items}
        return [dataclasses.replace(plan, storage_data=target) for plan, target in zip(plans, targets, strict=True)]

    def begin_attempt(self, world_size: int) -> list[ShardTarget]:
        """What ``prepare_global_plan`` tells each rank, in rank order."""
        store = self.store
        seen = _attempts_in(store, store.list())
        if not self._attempt or any(is_newer(other, self._attempt) for other in seen):
            self._attempt = new_attempt(seen)
        self._world_size = world_size
        return [ShardTarget(rank, self._attempt) for rank in range(world_size)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into one new shard file, durable when this returns; no items, no file."""
        target: ShardTarget = plan.storage_data
        written: Sequence[WriteResult] = []
        if plan.items:
            key = ShardFile(target.rank, 0, target.attempt).key
            self._written_key = key
            repeats = _repeats(plan.items, planner)
            columns = WrittenColumns(key, target.rank, len(plan.items))
            with self.store.put_new(key) as file:
                if isinstance(file, Preallocates):
                    items = [item for number, item in enumerate(plan.items) if number not in repeats]
                    file.preallocate(sum(map(_planned_nbytes, items)))
                _write_items(JoinedWrites(file), plan.items, planner, columns, repeats)
            written = WrittenItems([item.index for item in plan.items], columns)
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)  # type: ignore[arg-type]  # to torch any sequence will do
        return future

    def abandon(self) -> None:
        """Remove what this rank wrote in an attempt that has failed; it was never part of a checkpoint."""
        if self._written_key is not None:
            self.store.delete(self._written_key)
            self._written_key = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: raises unless every planned item has exactly one result; otherwise the checkpoint is there.

        Raises ``SupersededError`` where a newer attempt at this checkpoint has begun to write. Safe to call again
        with the same attempt and results: a checkpoint that is committed already is left alone.
        """
        reached(Point.BEFORE_MANIFEST)
        stored = [item for of_rank in results for item in of_rank]
        self._require_all_written(stored)
        metadata.storage_data = {item.index: item.storage_data for item in stored}
        entries = entry_table([written for of_rank in results for written in as_written_items(of_rank)])
        self._commit(metadata, entries)

    def finish_columns(self, metadata: Metadata, written: Sequence[WrittenItems]) -> CommittedMetadata:
        """``finish`` for results by columns, all of them there; returns the metadata as it is stored."""
        reached(Point.BEFORE_MANIFEST)
        metadata.storage_data = storage_data(written)
        return CommittedMetadata(self._commit(metadata, entry_table(written)), METADATA)

    def _commit(self, metadata: Metadata, entries: EntryTable) -> bytes:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        self._written_files = set(entries.files)
        encoded = encode_metadata(metadata)
        store = self.store
        self.may_have_committed = _holds(store, METADATA, encoded)
        if not self.may_have_committed:
            store.put(MANIFEST, encode_manifest(self._manifest(entries, encoded)), last_look=self._require_newest)
            reached(Point.BETWEEN_MANIFEST_AND_METADATA)
            self.may_have_committed = True
            store.put(METADATA, encoded, last_look=self._require_newest)
        reached(Point.AFTER_METADATA)
        return encoded

    def committed(self, attempt: str) -> CommittedMetadata | None:
        """The metadata as it is stored, where it is this attempt's that is committed now."""
        store = self.store
        with suppress(ObjectNotFoundError, CorruptCheckpointError, FormatVersionError):
            facts, encoded = decode_facts(store.get(MANIFEST), file=MANIFEST), store.get(METADATA)
            if (facts.attempt, facts.metadata_digest) == (attempt, metadata_digest(encoded)):
                return CommittedMetadata(encoded, METADATA)
        return None

    def give_up(self) -> None:
        """Refuse to commit from now on, also in a ``finish`` that is under way in another thread."""
        self._given_up = True

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

    def _require_newest(self) -> None:
        if self._given_up:
            raise StoreError("this save was given up before its commit", url=self.checkpoint_id)
        store = self.store
        listed = store.list()
        newest = max(_attempts_in(store, listed), key=attempt_order, default="")
        if newest and is_newer(newest, self._attempt):
            raise SupersededError(
                checkpoint_id=self.checkpoint_id, attempt=self._attempt, newer=newest, world_size=self._world_size
            )
        # Somebody may have deleted a file of this attempt since it was written.
        for key in sorted(self._written_files - {one.key for one in listed}):
            store.get(key, 0, 0)  # it may only not be listed yet

    def _manifest(self, entries: EntryTable, encoded_metadata: bytes) -> Manifest:
        return Manifest(
            entries=entries,
            world_size=self._world_size,
            attempt=self._attempt,
            metadata_digest=metadata_digest(encoded_metadata),
            created=time.time(),
            step=self.step,
            metrics=self.metrics,
            versions={"torch": torch.__version__, "ray_dcp": __version__},
            differing=self.differing,
            containers=self.containers,
        )


def _attempts_in(store: Store, listed: Sequence[StoredObject]) -> list[str]:
    """The attempts that have shard files or the manifest there: a bucket's listing may show new files late."""
    attempts = [shard.attempt for stored in listed if (shard := parse_shard_file(stored.key)) is not None]
    # What cannot be read is about to be replaced.
    with suppress(ObjectNotFoundError, CorruptCheckpointError, FormatVersionError):
        attempts.append(decode_facts(store.get(MANIFEST), file=MANIFEST).attempt)
    return attempts


def _holds(store: Store, key: str, content: bytes) -> bool:
    try:
        return store.get(key) == content
    except ObjectNotFoundError:
        return False


def _write_items(
    sink: JoinedWrites,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    columns: WrittenColumns,
    repeats: Mapping[int, int],
) -> None:
    """Write what is no repeat, in the order of ``_in_order``.

    The planner is asked for an item when it is the next, as torch does it: it may make what it gives. Only one that
    gives the state itself is asked for several, and out of its order.
    """
    in_place = getattr(planner, "resolves_in_place", False) is True
    order = [number for number in _in_order(items, tiny_first=in_place) if number not in repeats]
    written: dict[Hashable, int] = {}
    row = Row()
    num_ahead = _NUM_AHEAD if in_place else 1
    for first in range(0, len(order), num_ahead):
        numbers = order[first : first + num_ahead]
        for number, value in zip(numbers, [_resolved(items[n], planner) for n in numbers], strict=True):
            if isinstance(value, TensorRecord):
                identity = value.identity
                equal = number if identity is None else written.setdefault(identity, number)
                if equal != number:
                    columns.repeat(number, equal)
                    continue
                columns.put(number, value.write(sink, row, items[number].index.fqn), value.dtype, value.sizes)
            else:
                columns.put(number, write_python(sink, value.getbuffer()), None, None)
            if number == order[0]:
                reached(Point.MID_WRITE)
    sink.flush()
    for number, first_of_it in repeats.items():
        columns.repeat(number, first_of_it)


def _in_order(items: Sequence[WriteItem], *, tiny_first: bool) -> list[int]:
    """Python objects in front: a reader of a whole file then gets what it needs for a decision early.

    Then tiny tensors, those of one dtype and shape together: they share what their records begin with.
    """
    rows: dict[Hashable, int] = {}
    places: dict[int, int] = {}
    order = []
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            order.append(0)
            continue
        data = item.tensor_data  # one object for many items
        place = places.get(id(data))
        if place is None:
            is_tiny = tiny_first and data is not None and 0 < _planned_nbytes(item) <= MAX_ROW_PAYLOAD_NBYTES
            kind = (data.properties.dtype, data.chunk.sizes) if is_tiny and data is not None else None
            place = places[id(data)] = rows.setdefault(kind, len(rows) + 1) if is_tiny else len(items) + 1
        order.append(place)
    return sorted(range(len(items)), key=order.__getitem__)


def _repeats(items: Sequence[WriteItem], planner: SavePlanner) -> dict[int, int]:
    """Items whose memory an earlier one writes, and that one: a record is enough for both."""
    ties = ties_of(planner)
    first: dict[Key, int] = {}
    repeats: dict[int, int] = {}
    for number, item in enumerate(items) if ties else ():
        key = item.index.fqn, item.index.offset
        written = first.setdefault(ties.get(key, key), number)
        if written != number:
            repeats[number] = written
    return repeats


def _resolved(item: WriteItem, planner: SavePlanner) -> TensorRecord | io.BytesIO:
    value = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        return value
    _require_as_planned(item, value)
    return TensorRecord(value)


def _planned_nbytes(item: WriteItem) -> int:
    """Of its payload; 0 where the plan does not say."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _require_as_planned(item: WriteItem, value: torch.Tensor) -> None:
    problem = tensor_problem(value)
    if problem:
        raise StateDictError(f"{item.index.fqn}: {problem}")
    if item.tensor_data is not None and value.shape != item.tensor_data.chunk.sizes:
        raise StateDictError(
            f"{item.index.fqn}: the planner resolved a tensor of shape {tuple(value.shape)}, "
            f"the plan says {tuple(item.tensor_data.chunk.sizes)}"
        )
