"""What a shard file's records are and where each lies: the same for the file in a store and for a staged one.

Python objects come first; a record that several items share is there once (``results.WrittenColumns.repeat``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ray_dcp.errors import StateDictError
from ray_dcp.format.zip_record import MAX_ROW_PAYLOAD_NBYTES
from ray_dcp.planning.layouts import is_freed
from ray_dcp.planning.save_plan.plan_table import Key
from ray_dcp.planning.save_plan.state_planner import StatePlanner, tensor_problem
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.write.results import WrittenColumns
from ray_dcp.write.tensor_record import PythonRecord, RecordSink, Row, TensorRecord

_NUM_AHEAD = 64
"""Number of items that are made ready at once; see ``TensorRecord``."""

NumberedRecord = tuple[int, TensorRecord | PythonRecord]
"""The position of an item in the final plan, and its record."""


class ShardLayout:
    """Lays out the records of ``items``, as ``planner`` resolves them, front to back.

    The planner is asked for an item when it is next, as torch does it: it may make what it gives. Only a planner that
    gives the state itself is asked for several at once, and out of order.
    """

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self._items = items
        self._planner = planner
        self.resolves_in_place = getattr(planner, "resolves_in_place", False) is True
        """Whether the planner gives the state itself, so that all that it gives keeps its values."""
        self._has_looked = type(planner) is StatePlanner
        """Whether the planner has looked at each tensor, in this very save."""
        self.nbytes = 0
        """Length of the file up to the end of what is laid out, in bytes."""
        self.tensors: list[tuple[int, torch.Tensor]] | None = None
        """All tensors that were laid out, with the positions of their items, where this is set to a list before."""
        self._tied = _repeats(items, planner)
        self._equal: dict[int, int] = {}
        self._written: dict[Hashable, int] = {}
        self._row = Row()

    @property
    def planned_nbytes(self) -> int:
        """About how long the file will be, in bytes, as the plan says."""
        return sum(_planned_nbytes(item) for number, item in enumerate(self._items) if number not in self._tied)

    def batches(self) -> Iterator[list[NumberedRecord]]:
        """Yield the records, laid out, in the order in which they are written.

        Where the planner makes what it gives, a record must be written, or copied, before the next batch is asked for.
        """
        order = [number for number in self._in_order() if number not in self._tied]
        num_ahead = _NUM_AHEAD if self.resolves_in_place else 1
        for first in range(0, len(order), num_ahead):
            numbers = order[first : first + num_ahead]
            has_looked = self._has_looked
            records = [_resolved(self._items[number], self._planner, has_looked=has_looked) for number in numbers]
            if self.tensors is not None:
                found = zip(numbers, records, strict=True)
                self.tensors += [(number, one.tensor) for number, one in found if isinstance(one, TensorRecord)]
            yield [found for found in zip(numbers, records, strict=True) if self._is_placed(*found)]

    def note_repeats(self, columns: WrittenColumns) -> None:
        """Note in ``columns`` which items share the records of others, once those are written."""
        for number, first_of_it in (*self._equal.items(), *self._tied.items()):
            columns.repeat(number, first_of_it)

    def _is_placed(self, number: int, record: TensorRecord | PythonRecord) -> bool:
        """Give a record its place. False where one that is equal has a place already."""
        identity = record.identity
        if identity is not None:
            equal = self._written.setdefault(identity, number)
            if equal != number:
                self._equal[number] = equal
                return False
        self.nbytes = record.lay_out(self.nbytes, self._row, self._items[number].index.fqn)
        return True

    def _in_order(self) -> list[int]:
        """The positions of the items in the order in which they are written.

        Python objects come first: a reader of a whole file then gets early what it needs for a decision. Where the
        planner gives the state itself, tiny tensors come next, those of one dtype and shape together: they share the
        head of their records.
        """
        rows: dict[Hashable, int] = {}
        places: dict[int, int] = {}
        order = []
        for item in self._items:
            if item.type == WriteItemType.BYTE_IO:
                order.append(0)
                continue
            data = item.tensor_data  # one object for many items
            place = places.get(id(data))
            if place is None:
                is_tiny = self.resolves_in_place and data is not None
                is_tiny = is_tiny and 0 < _planned_nbytes(item) <= MAX_ROW_PAYLOAD_NBYTES
                kind = (data.properties.dtype, data.chunk.sizes) if is_tiny and data is not None else None
                place = rows.setdefault(kind, len(rows) + 1) if is_tiny else len(self._items) + 1
                places[id(data)] = place
            order.append(place)
        return sorted(range(len(self._items)), key=order.__getitem__)


def write_records(records: Sequence[NumberedRecord], sink: RecordSink, columns: WrittenColumns) -> None:
    """Append records that have been laid out to ``sink``; note in ``columns`` where they lie."""
    for number, record in records:
        columns.put(number, record.write(sink), record.dtype, record.sizes)


def _repeats(items: Sequence[WriteItem], planner: SavePlanner) -> dict[int, int]:
    """The items whose memory an earlier item writes, each mapped to that one: one record is enough for both."""
    ties = ties_of(planner)
    first: dict[Key, int] = {}
    repeats: dict[int, int] = {}
    for number, item in enumerate(items) if ties else ():
        key = item.index.fqn, item.index.offset
        written = first.setdefault(ties.get(key, key), number)
        if written != number:
            repeats[number] = written
    return repeats


def _resolved(item: WriteItem, planner: SavePlanner, *, has_looked: bool) -> TensorRecord | PythonRecord:
    value = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        return PythonRecord(value.getbuffer())
    _require_as_planned(item, value, has_looked=has_looked)
    return TensorRecord(value)


def _planned_nbytes(item: WriteItem) -> int:
    """Bytes of the item's payload; 0 where the plan does not say."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _require_as_planned(item: WriteItem, value: torch.Tensor, *, has_looked: bool) -> None:
    # That its memory is still there is looked at again: nothing else about it can change.
    problem = None if has_looked and not is_freed(value) else tensor_problem(value)
    if problem:
        raise StateDictError(f"{item.index.fqn}: {problem}")
    if item.tensor_data is not None and value.shape != item.tensor_data.chunk.sizes:
        raise StateDictError(
            f"{item.index.fqn}: the planner resolved a tensor of shape {tuple(value.shape)}, "
            f"the plan says {tuple(item.tensor_data.chunk.sizes)}"
        )
