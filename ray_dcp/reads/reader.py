"""``StoreReader``: DCP's ``StorageReader`` on a ``Store``.

From the plan to byte ranges::

    read items -> by record, in file order -> large chunks: their blocks, straight into the tensors
                                           -> small ones, Python objects: joined to runs, cut up after the read

Large chunks that other ranks of this node want as well are read once by all of them together (``shared_reads``).

Every block is checked before its tensor counts as loaded. No tensor goes through ``torch.load``, except one that
torch wrote in a form of its own (a transposed one, say).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import DifferingReplicas, EntryTable, as_table, decode_manifest
from ray_dcp.format.metadata_file import decode_metadata
from ray_dcp.format.names import MANIFEST, METADATA
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer, Want
from ray_dcp.planning.values.containers import Containers
from ray_dcp.reads.checkpoint import OpenedCheckpoint, open_checkpoint, open_of_rank
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.engine import ReadShape, finished, read_shape
from ray_dcp.reads.record_reads import RecordReads, WantedRecord
from ray_dcp.reads.sharing.node_reads import Passing, SharedReads, offer_of, share_rules, want_of
from ray_dcp.reads.sharing.segment import NodeMemory
from ray_dcp.reads.wanted import Loaded, RecordTasks, count_as_changed, large_of
from ray_dcp.store.location.place import absolute
from ray_dcp.store.open import open_store, opens
from ray_dcp.torch_private import StorageInfo


class StoreReader(StorageReader):
    """Reads any checkpoint of ray_dcp, of torch's file system writers, or of safetensors files, from a path or URL.

    Each value is checked before it counts: by the manifest's block checksums, or by the records' own zip CRCs
    where torch wrote them. Also usable with ``torch.distributed.checkpoint.load``. ``sharing`` None: this rank reads
    all it wants by itself.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        trusted: bool = False,
        sharing: NodeMemory | None = NodeMemory(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__()
        self.checkpoint_id = absolute(checkpoint_id) if checkpoint_id is not None else ""
        self.trusted = trusted
        self.sharing = sharing
        self.nbytes_read = 0
        self.nbytes_loaded = 0
        self.differing: Sequence[DifferingReplicas] = ()
        """Values that differed between ranks when the checkpoint was saved, as its manifest says."""
        self.containers: Containers | None = None
        """Of the state dict that was saved; None where the checkpoint does not say."""
        self._opened: OpenedCheckpoint | None = None
        self._metadata: Metadata | None = None
        self._entries: EntryTable | None = None
        self._numbers: dict[tuple[str, tuple[int, ...] | None], int] = {}
        """Of the manifest's entries, by name and offsets of the chunk."""
        self._grouped: tuple[LoadPlan, dict[str, list[WantedRecord]]] | None = None
        """The records of the plan that was last looked at."""
        self._share: tuple[NodeShare, int] | None = None
        """Of the next ``read_data``, with this rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = absolute(checkpoint_id)
        self._opened = None

    def adopt(self, opened: OpenedCheckpoint) -> None:
        """Read what the coordinator has opened, instead of looking again."""
        self._opened = opened

    @property
    def of_other_libraries(self) -> bool:
        """Whether it reads safetensors files; known once they are opened."""
        return self._opened is not None and self._opened.unchecked

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if rank is not None:
            self._opened = open_of_rank(self.checkpoint_id, rank)
        if self._opened is None:
            self._opened = open_checkpoint(self.checkpoint_id)
        metadata = decode_metadata(
            self._opened.metadata,
            file=self._file(METADATA),
            trusted=self.trusted,
            digest_checked=self._opened.manifest is not None,
        )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        assert self._opened is not None, "read_metadata comes first"
        if metadata.storage_data is None:
            raise CorruptCheckpointError("does not say where its items lie", file=self._file(METADATA))
        self._metadata = metadata
        self._entries = None
        self.containers = None
        if self._opened.manifest is not None:
            manifest = decode_manifest(self._opened.manifest, file=self._file(MANIFEST))
            self.differing = manifest.differing
            self.containers = manifest.containers
            self._entries = as_table(manifest.entries)
            chunks = zip(self._entries.column("fqn"), self._entries.column("offsets"), strict=True)
            self._numbers = {chunk: number for number, chunk in enumerate(chunks)}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def offer_shared_reads(self, plan: LoadPlan, planner: LoadPlanner, world_size: int) -> ShareOffer | None:
        """What others of ``world_size`` ranks could read for this one; None where it can share with nobody.

        What is wrong with the plan is told when it is read.
        """
        if self.sharing is None or self._entries is None:
            return None
        assert self._opened is not None
        store = open_store(self._opened.checkpoint_id)
        if world_size < share_rules(store).min_repeats:
            return None
        files = CheckpointFiles(store, self._opened.checkpoint_id)
        reads = self._record_reads(files, read_shape(store))
        wants: list[Want | None] = []
        with suppress(CorruptCheckpointError):
            for record in large_of(self._wanted(plan, files)):
                passing = reads.passing(record, [planner.resolve_tensor(item).detach() for item in record.items])
                wants.append(want_of(record.number, *passing) if passing is not None else None)
        return offer_of([want for want in wants if want is not None], self.sharing, store, self._opened)

    def are_stored_alike(self, fqns: Sequence[str]) -> bool:
        """Whether these stored tensors have the same values for certain: at one place, or by all their checksums."""
        if self._entries is None or self._opened is None:
            return False
        numbers: dict[str, list[int]] = {fqn: [] for fqn in fqns}
        for number, fqn in enumerate(self._entries.column("fqn")):
            if fqn in numbers:
                numbers[fqn].append(number)
        chunks = [
            sorted([self._entries[number] for number in of], key=lambda one: one.offsets or ())
            for of in numbers.values()
        ]
        checked = not self._opened.unchecked
        alike = {
            tuple(
                (one.offsets, one.sizes, one.dtype, one.block_crcs if checked else (one.file, one.payload_offset))
                for one in entries
            )
            for entries in chunks
        }
        return len(alike) == 1

    def share_reads(self, share: NodeShare | None, rank: int) -> None:
        """Take part in ``share`` in the next ``read_data``, of the plan that was offered."""
        self._share = (share, rank) if share is not None else None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and hand it its Python objects; file after file, in file order."""
        assert self._opened is not None, "read_metadata comes first"
        store = open_store(self._opened.checkpoint_id)
        shape = read_shape(store)
        files = CheckpointFiles(store, self._opened.checkpoint_id)
        reads = self._record_reads(files, shape)
        wanted = self._wanted(plan, files)
        self._grouped = None
        tasks = RecordTasks(planner, reads, files, shape)
        try:
            shared = self._read_shared(wanted, tasks, reads, shape)
            left_to_read = tasks.of(wanted, lambda record: bool(shared) and record.number in shared)
            with closing(finished(left_to_read, shape.num_in_flight)) as ended:
                for loaded, nbytes in ended:
                    self.nbytes_read += nbytes
                    for count in loaded:
                        count()
        finally:
            self.nbytes_loaded += tasks.nbytes_loaded
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return opens(checkpoint_id)

    def _record_reads(self, files: CheckpointFiles, shape: ReadShape) -> RecordReads:
        assert self._metadata is not None, "set_up_storage_reader comes first"
        assert self._opened is not None
        tensors = self._metadata.state_dict_metadata
        return RecordReads(files, tensors, shape=shape, unchecked=self._opened.unchecked)

    def _read_shared(
        self, wanted: Mapping[str, Sequence[WantedRecord]], tasks: RecordTasks, reads: RecordReads, shape: ReadShape
    ) -> set[int]:
        """Read with the other ranks of this node what was agreed on; the entry numbers of what that has filled."""
        agreed, self._share = self._share, None
        if agreed is None or self.sharing is None or self._entries is None:
            return set()
        share, rank = agreed
        entries = {number: self._entries[number] for number in {run.number for run in share.runs}}
        targets: dict[int, Passing] = {}
        loaded: dict[int, Loaded] = {}
        for record in large_of(wanted):
            number = record.number
            if number in entries:
                filled = tasks.targets(record)
                passing = reads.passing(record, filled)
                if passing is not None:
                    count_as_changed(filled)
                    targets[number] = Passing.of(*passing)
                    loaded[number] = tasks.loaded(record, filled)
        shared = SharedReads(
            share, rank, self.sharing, lambda number, *place: reads.read_blocks(entries[number], *place), shape
        )
        try:
            numbers = shared.fill(targets)
        finally:
            self.nbytes_read += shared.nbytes_read
        for count in (count for number in numbers for count in loaded[number]):
            count()
        return set(numbers)

    def _wanted(self, plan: LoadPlan, files: CheckpointFiles) -> dict[str, list[WantedRecord]]:
        """By file, in the order of their places in it."""
        if self._grouped is not None and self._grouped[0] is plan:
            return self._grouped[1]
        records = self._wanted_by_place(plan) if self._entries is None else self._wanted_entries(plan, files)
        by_file: dict[str, list[WantedRecord]] = defaultdict(list)
        for record in records:
            by_file[record.key].append(record)
        for of_file in by_file.values():
            of_file.sort(key=lambda record: record.offset)
        self._grouped = plan, by_file
        return by_file

    def _wanted_entries(self, plan: LoadPlan, files: CheckpointFiles) -> list[WantedRecord]:
        """By the manifest, which belongs to this metadata: its digest says so."""
        assert self._entries is not None
        table, numbers = self._entries, self._numbers
        items_of: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            index = item.storage_index
            number = numbers.get((index.fqn, index.offset), -1)
            if number in items_of:
                items_of[number].append(item)
            else:
                items_of[number] = [item]
        files_of, offsets, sizes = table.files, table.column("payload_offset"), table.column("payload_nbytes")
        records = []
        for number, items in items_of.items():
            if number < 0 or (table.dtypes[number] is None) != (items[0].type == LoadItemType.BYTE_IO):
                info = self._info(items[0])
                raise CorruptCheckpointError(
                    "manifest and metadata disagree about this item",
                    file=files.shown(info.relative_path),
                    fqn=items[0].storage_index.fqn,
                )
            records.append(WantedRecord(files_of[number], offsets[number], sizes[number], items, None, table, number))
        return records

    def _wanted_by_place(self, plan: LoadPlan) -> list[WantedRecord]:
        by_place: dict[tuple[str, int, int, str], list[ReadItem]] = defaultdict(list)
        infos: dict[tuple[str, int, int, str], StorageInfo] = {}
        for item in plan.items:
            info = self._info(item)
            place = info.relative_path, info.offset, info.length, item.storage_index.fqn
            by_place[place].append(item)
            infos[place] = info
        return [
            WantedRecord(info.relative_path, info.offset, info.length, by_place[place], info, None, -1)
            for place, info in infos.items()
        ]

    def _info(self, item: ReadItem) -> StorageInfo:
        assert self._metadata is not None
        info = (self._metadata.storage_data or {}).get(item.storage_index)
        # Damage may leave one without all its parts; a user's own writer may have put something else.
        if not isinstance(info, StorageInfo) or not {"relative_path", "offset", "length"} <= vars(info).keys():
            raise CorruptCheckpointError(
                f"names no place for the chunk at {item.storage_index.offset}",
                file=self._file(METADATA),
                fqn=item.storage_index.fqn,
            )
        return info

    def _file(self, key: str) -> str:
        location = self._opened.checkpoint_id if self._opened is not None else self.checkpoint_id
        return f"{location.rstrip('/')}/{key}"
