"""``StoreReader``: DCP's ``StorageReader`` on a ``Store``.

From the plan to byte ranges::

    read items -> WantedRecord, by file (wanted)
               -> large tensors: RecordRead (plan) -> ranges -> into the tensors, straight where possible (fill)
               -> small ones, Python objects: joined to runs, cut up after the read (tasks, engine)

Large tensors that other ranks of this node want as well are read once by all of them together (``sharing``).

Every block is checked before its tensor counts as loaded. No tensor goes through ``torch.load``, except one that
torch wrote in a form of its own (a transposed one, say).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import DifferingReplicas, EntryTable, as_table, decode_manifest
from ray_dcp.format.metadata_file import decode_metadata
from ray_dcp.format.names import MANIFEST, METADATA
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer
from ray_dcp.planning.values.containers import Containers
from ray_dcp.reads.checkpoint import FromMemory, OpenedCheckpoint, open_checkpoint, open_of_rank
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.engine import finished
from ray_dcp.reads.nearby import STORAGE, NearbyFiles, Neighbours, nearby_files
from ray_dcp.reads.plan.shape import ReadShape, read_shape
from ray_dcp.reads.record_reads import RecordReads
from ray_dcp.reads.sharing.door import NodeReads
from ray_dcp.reads.sharing.segment import NodeMemory
from ray_dcp.reads.tasks import RecordTasks
from ray_dcp.reads.wanted import WantedRecords
from ray_dcp.store.location.place import absolute
from ray_dcp.store.open import open_store, opens
from ray_dcp.store.store import traits_of


class StoreReader(StorageReader):
    """Reads any checkpoint of ray_dcp, of torch's file system writers, or of safetensors files, from a path or URL.

    Each value is checked before it counts: by the manifest's block checksums, or by the records' own zip CRCs where
    torch wrote them; safetensors files have no checksums. Also usable with ``torch.distributed.checkpoint.load``. With
    ``sharing=None`` this rank reads everything that it wants by itself. ``from_memory`` is ``CheckpointManager``'s.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        trusted: bool = False,
        sharing: NodeMemory | None = NodeMemory(),  # noqa: B008 - it is frozen
        from_memory: FromMemory | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = absolute(checkpoint_id) if checkpoint_id is not None else ""
        self.trusted = trusted
        self.from_memory = from_memory
        """Where the checkpoint is in memory alone, what this rank has of it."""
        # The one line that turns shared reads on.
        self._node_reads = NodeReads(sharing) if sharing is not None else None
        self._nbytes_read = 0
        self.nbytes_loaded = 0
        """Bytes that the planner has been given."""
        self.differing: Sequence[DifferingReplicas] = ()
        """Values that differed between ranks when the checkpoint was saved, as its manifest says."""
        self.containers: Containers | None = None
        """What names do not tell of the state dict that was saved; None where the checkpoint does not say."""
        self._opened: OpenedCheckpoint | None = None
        self._metadata: Metadata | None = None
        self._entries: EntryTable | None = None
        self._records: WantedRecords | None = None
        self._near: NearbyFiles | None = None

    @property
    def nbytes_read(self) -> int:
        """Bytes that this rank has read of the files, from storage."""
        if self._near is not None:
            return self._near.nbytes[STORAGE]
        return self._nbytes_read + (self._node_reads.nbytes_read if self._node_reads is not None else 0)

    @property
    def nbytes_by_place(self) -> Mapping[str, int]:
        """Bytes that this rank has read of the files, by where they came from: "storage", or a nearer place."""
        return {STORAGE: self.nbytes_read} if self._near is None else {STORAGE: 0, **self._near.nbytes}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = absolute(checkpoint_id)
        self._opened = None
        self.leave_nearby()
        self._near = None

    def adopt(self, opened: OpenedCheckpoint) -> None:
        """Read what the coordinator has opened, instead of looking again."""
        self._opened = opened

    @property
    def of_other_libraries(self) -> bool:
        """Whether it reads safetensors files; known once they are opened, and False before."""
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
        self._records = None
        self.containers = None
        if self._opened.manifest is not None:
            manifest = decode_manifest(self._opened.manifest, file=self._file(MANIFEST))
            self.differing = manifest.differing
            self.containers = manifest.containers
            self._entries = as_table(manifest.entries)

    def look_nearby(self, neighbours: Neighbours) -> None:
        """Read from memory, of this node and of others, what ``neighbours`` have of this checkpoint's place.

        Only what a manifest has checksums of is read there. Called once the reader is set up.
        """
        self.leave_nearby()
        if self._entries is not None and self._opened is not None and not self._opened.unchecked:
            self._near = nearby_files(self._opened.checkpoint_id, neighbours, self._entries)

    def leave_nearby(self) -> None:
        """Let go of what was opened to read from nearer places than the store."""
        if self._near is not None:
            self._near.close()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def offer_shared_reads(self, plan: LoadPlan, planner: LoadPlanner, world_size: int) -> ShareOffer | None:
        """What others of ``world_size`` ranks could read for this one; None where it can share with nobody.

        Faults of the plan are told when it is read.
        """
        if self._node_reads is None or self._entries is None:
            return None
        assert self._opened is not None
        store = open_store(self._opened.checkpoint_id)
        files = CheckpointFiles(store, self._opened.checkpoint_id, self._near)
        traits = traits_of(store)
        reads, records = self._record_reads(files, read_shape(traits)), self._records_of(files)
        return self._node_reads.offer(records, plan, reads, planner, self._opened, traits, world_size)

    def are_stored_alike(self, fqns: Sequence[str]) -> bool:
        """Whether these stored tensors have the same values for certain: by all their checksums, or at one place.

        The place counts for safetensors files, which have no checksums.
        """
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
        """Take part in ``share`` in the next ``read_data``, which must be for the plan that was offered."""
        if self._node_reads is not None:
            self._node_reads.agree(share, rank)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and hand it its Python objects: file after file.

        Raises ``CorruptCheckpointError`` for what is missing or fails its checksum.
        """
        assert self._opened is not None, "read_metadata comes first"
        store = open_store(self._opened.checkpoint_id)
        files = CheckpointFiles(store, self._opened.checkpoint_id, self._near)
        records = self._records_of(files)
        wanted = records.by_file(plan)
        records.forget()
        shape = read_shape(files.traits(wanted, traits_of(store)))
        reads = self._record_reads(files, shape)
        tasks = RecordTasks(planner, reads, files, shape)
        shared: set[int] = set()
        try:
            if self._node_reads is not None:
                shared = self._node_reads.fill(wanted, records, reads, tasks, shape)
            left_to_read = tasks.of(wanted, lambda record: bool(shared) and record.number in shared)
            with closing(finished(left_to_read, shape.num_in_flight)) as ended:
                for loaded, nbytes in ended:
                    self._nbytes_read += nbytes
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

    def _records_of(self, files: CheckpointFiles) -> WantedRecords:
        assert self._metadata is not None, "set_up_storage_reader comes first"
        if self._records is None:
            self._records = WantedRecords(self._metadata, self._entries, files)
        return self._records

    def _file(self, key: str) -> str:
        location = self._opened.checkpoint_id if self._opened is not None else self.checkpoint_id
        return f"{location.rstrip('/')}/{key}"
