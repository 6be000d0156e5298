"""What ranks have written, on its way to the commit; in columns, since there may be a million items."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from ray_dcp.format.manifest import EntryTable
from ray_dcp.format.metadata_file import dtype_named
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.torch_private import StorageInfo
from ray_dcp.write.tensor_record import Payload


@dataclasses.dataclass(frozen=True)
class StoredItem(WriteResult):
    """A ``WriteResult`` that also has what the manifest records."""

    payload: Payload
    dtype: str | None
    """Name of the tensor's dtype; None for a Python object."""
    sizes: tuple[int, ...] | None
    """Shape of the tensor; None for a Python object."""
    rank: int


class WrittenColumns:
    """What one rank wrote into one file: item ``i`` of its final plan is in row ``i``.

    The columns are arrays, so that a million items leave no object behind for the garbage collector to walk.
    """

    def __init__(self, file: str, rank: int, num_items: int) -> None:
        self.file = file
        self.rank = rank
        zeros = array("q", bytes(8 * num_items))
        self.record_offsets, self.record_nbytes = array("q", zeros), array("q", zeros)
        self.payload_offsets, self.payload_nbytes = array("q", zeros), array("q", zeros)
        self._crcs = array("I")
        """The block checksums of all items, in the order in which they were written."""
        self._crcs_at, self._num_crcs = array("q", zeros), array("q", zeros)
        self.kind_of = array("I", bytes(4 * num_items))
        """The position of each item's kind in ``kinds``."""
        self.kinds: list[tuple[str | None, tuple[int, ...] | None]] = []
        """The kinds of items: (dtype, sizes) of tensors, (None, None) of Python objects."""
        self._number_of_kind: dict[tuple[torch.dtype | None, torch.Size | None], int] = {}

    def __len__(self) -> int:
        return len(self.record_nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_number_of_kind": {}}

    def put(self, number: int, payload: Payload, dtype: torch.dtype | None, sizes: torch.Size | None) -> None:
        """Note that item ``number`` has been written."""
        self.record_offsets[number] = payload.record_offset
        self.record_nbytes[number] = payload.record_nbytes
        self.payload_offsets[number] = payload.payload_offset
        self.payload_nbytes[number] = payload.payload_nbytes
        self._crcs_at[number], self._num_crcs[number] = len(self._crcs), len(payload.block_crcs)
        self._crcs.extend(payload.block_crcs)
        kind = self._number_of_kind.get((dtype, sizes))
        if kind is None:
            kind = self._number_of_kind[dtype, sizes] = len(self.kinds)
            name = str(dtype).removeprefix("torch.") if dtype is not None else None
            self.kinds.append((name, tuple(sizes) if sizes is not None else None))
        self.kind_of[number] = kind

    def repeat(self, number: int, written: int) -> None:
        """Note that item ``number`` is in the record of item ``written``, which has been written."""
        for column in (
            *(self.record_offsets, self.record_nbytes, self.payload_offsets, self.payload_nbytes),
            *(self._crcs_at, self._num_crcs, self.kind_of),
        ):
            column[number] = column[written]

    def with_crcs(self, crcs: Sequence[int]) -> WrittenColumns:
        """The same columns with the checksums of all large tensors, in file order, which a staged file lacks.

        Raises ``ValueError`` where there are more or fewer of them than blocks.
        """
        is_tensor = [dtype is not None for dtype, _ in self.kinds]
        large = {
            (self._crcs_at[number], self._num_crcs[number])
            for number, nbytes in enumerate(self.payload_nbytes)
            if nbytes > BLOCK_NBYTES and is_tensor[self.kind_of[number]]
        }
        if sum(num_crcs for _, num_crcs in large) != len(crcs):
            raise ValueError(f"{len(crcs)} checksums for {sum(num for _, num in large)} blocks of {self.file}")
        known = array("I", self._crcs)
        taken = 0
        for at, num_crcs in sorted(large):
            known[at : at + num_crcs] = array("I", crcs[taken : taken + num_crcs])
            taken += num_crcs
        filled = copy.copy(self)
        filled._crcs = known
        return filled

    @property
    def num_written(self) -> int:
        """Number of the items that have been written."""
        return len(self) - self.record_nbytes.count(0)  # no record is empty

    def crcs_of(self, number: int) -> tuple[int, ...]:
        """The checksums of an item's blocks."""
        at = self._crcs_at[number]
        return tuple(self._crcs[at : at + self._num_crcs[number]])

    def item(self, number: int, index: MetadataIndex) -> StoredItem:
        dtype, sizes = self.kinds[self.kind_of[number]]
        payload = Payload(
            self.record_offsets[number],
            self.record_nbytes[number],
            self.payload_offsets[number],
            self.payload_nbytes[number],
            self.crcs_of(number),
        )
        place = StorageInfo(self.file, payload.record_offset, payload.record_nbytes)
        return StoredItem(index, payload.record_nbytes, place, payload, dtype, sizes, self.rank)


class WrittenItems(Sequence[WriteResult]):
    """``WrittenColumns`` as the list of results that a ``StorageWriter`` returns."""

    def __init__(self, indexes: Sequence[MetadataIndex], columns: WrittenColumns) -> None:
        self.indexes = indexes
        self.columns = columns

    @overload
    def __getitem__(self, number: int) -> StoredItem: ...
    @overload
    def __getitem__(self, number: slice) -> list[StoredItem]: ...
    def __getitem__(self, number: int | slice) -> StoredItem | list[StoredItem]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return self.columns.item(range(len(self))[number], self.indexes[number])

    def __len__(self) -> int:
        return len(self.indexes)

    def __iter__(self) -> Iterator[StoredItem]:
        return map(self.columns.item, range(len(self)), self.indexes)


def as_written_items(results: Sequence[WriteResult]) -> list[WrittenItems]:
    """A rank's results in columns, one ``WrittenItems`` for each file; only ``StoredItem``s are taken in."""
    if isinstance(results, WrittenItems):
        return [results]
    by_file: dict[tuple[str, int], list[StoredItem]] = {}
    for item in results:
        if isinstance(item, StoredItem):
            by_file.setdefault((item.storage_data.relative_path, item.rank), []).append(item)
    written = []
    for (file, rank), items in by_file.items():
        columns = WrittenColumns(file, rank, len(items))
        for number, item in enumerate(items):
            dtype = dtype_named(item.dtype)
            columns.put(number, item.payload, dtype, torch.Size(item.sizes) if item.sizes is not None else None)
        written.append(WrittenItems([item.index for item in items], columns))
    return written


def entry_table(written: Sequence[WrittenItems]) -> EntryTable:
    """The manifest's rows for what all ranks have written."""
    columns: list[list[Any]] = [[] for _ in range(11)]
    for items in written:
        of_file = items.columns
        kinds = [of_file.kinds[kind] for kind in of_file.kind_of]
        rows: list[Sequence[Any]] = [
            [index.fqn for index in items.indexes],
            [
                tuple(index.offset) if sizes is not None and index.offset is not None else None
                for index, (_, sizes) in zip(items.indexes, kinds, strict=True)
            ],
            [sizes for _, sizes in kinds],
            [dtype for dtype, _ in kinds],
            [of_file.file] * len(items),
            of_file.record_offsets,
            of_file.record_nbytes,
            of_file.payload_offsets,
            of_file.payload_nbytes,
            [of_file.crcs_of(number) for number in range(len(items))],
            [of_file.rank] * len(items),
        ]
        for column, row in zip(columns, rows, strict=True):
            column.extend(row)
    return EntryTable(columns)


def storage_data(written: Sequence[WrittenItems]) -> dict[MetadataIndex, StorageInfo]:
    """The place of each item in the files, as ``.metadata`` has it."""
    places: dict[MetadataIndex, StorageInfo] = {}
    for items in written:
        of_file = items.columns
        for index, offset, nbytes in zip(items.indexes, of_file.record_offsets, of_file.record_nbytes, strict=True):
            places[index] = StorageInfo(of_file.file, offset, nbytes)
    return places
