"""Finds the records that hold a plan's read items, file by file.

Where a manifest belongs to the metadata, it says where each payload lies and by what it is checked; else
``.metadata`` says where each record lies, and the record itself the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import Entry, EntryTable
from ray_dcp.format.names import METADATA
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.plan.shape import is_small
from ray_dcp.torch_private import StorageInfo


class WantedRecord(NamedTuple):
    """A record and what a rank wants of it; a tuple, since a rank may want tens of thousands."""

    key: str
    """The file."""
    offset: int
    """Offset in the file of the bytes that hold the value.

    These are the payload where the manifest says where that is, else the whole record.
    """
    nbytes: int
    """Length of those bytes."""
    items: Sequence[ReadItem]
    info: StorageInfo | None
    """What ``.metadata`` says of the record's place; None where the manifest says it."""
    table: EntryTable | None
    """The manifest's entries; None for a checkpoint without a manifest."""
    number: int
    """The row of this record in ``table``; -1 without a table."""

    @property
    def entry(self) -> Entry | None:
        """The manifest's entry for the record, made anew each time; None without a manifest."""
        return None if self.table is None else self.table[self.number]

    @property
    def fqn(self) -> str:
        return self.items[0].storage_index.fqn

    @property
    def is_small(self) -> bool:
        """Whether the record is read whole, together with its neighbours."""
        return is_small(self.nbytes, is_tensor=self.items[0].type != LoadItemType.BYTE_IO)


def large_of(wanted: Mapping[str, Sequence[WantedRecord]]) -> Iterator[WantedRecord]:
    return (record for records in wanted.values() for record in records if not record.is_small)


class WantedRecords:
    """The records that plans want of one checkpoint. ``entries`` are those of its manifest, None where it has none."""

    def __init__(self, metadata: Metadata, entries: EntryTable | None, files: CheckpointFiles) -> None:
        self.entries = entries
        self._metadata = metadata
        self._files = files
        self._grouped: tuple[LoadPlan, dict[str, list[WantedRecord]]] | None = None
        """The plan that was last looked at, and what ``by_file`` returned for it."""
        self._numbers: dict[tuple[str, tuple[int, ...] | None], int] = {}
        if entries is not None:
            chunks = zip(entries.column("fqn"), entries.column("offsets"), strict=True)
            self._numbers = {chunk: number for number, chunk in enumerate(chunks)}

    def by_file(self, plan: LoadPlan) -> dict[str, list[WantedRecord]]:
        """The records that ``plan`` wants of each file, in the order of their places in it.

        Raises ``CorruptCheckpointError`` where the metadata has no place for an item, or the manifest disagrees.
        """
        if self._grouped is not None and self._grouped[0] is plan:
            return self._grouped[1]
        records = self._by_place(plan) if self.entries is None else self._by_entry(plan, self.entries)
        by_file: dict[str, list[WantedRecord]] = defaultdict(list)
        for record in records:
            by_file[record.key].append(record)
        for of_file in by_file.values():
            of_file.sort(key=lambda record: record.offset)
        self._grouped = plan, by_file
        return by_file

    def forget(self) -> None:
        """Forget the plan that was last looked at."""
        self._grouped = None

    def _by_entry(self, plan: LoadPlan, table: EntryTable) -> list[WantedRecord]:
        """The records by the manifest, which belongs to this metadata: its digest says so."""
        numbers = self._numbers
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
                    file=self._files.shown(info.relative_path),
                    fqn=items[0].storage_index.fqn,
                )
            records.append(WantedRecord(files_of[number], offsets[number], sizes[number], items, None, table, number))
        return records

    def _by_place(self, plan: LoadPlan) -> list[WantedRecord]:
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
        info = (self._metadata.storage_data or {}).get(item.storage_index)
        # Damage may leave out some of its parts; a user's own writer may have put something else.
        if not isinstance(info, StorageInfo) or not {"relative_path", "offset", "length"} <= vars(info).keys():
            raise CorruptCheckpointError(
                f"names no place for the chunk at {item.storage_index.offset}",
                file=self._files.shown(METADATA),
                fqn=item.storage_index.fqn,
            )
        return info
