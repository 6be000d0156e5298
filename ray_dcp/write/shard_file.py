"""Writes a rank's shard file: its items' records, front to back, durable when it is written.

Python objects come first; a record that several items share is there once (``results.WrittenColumns.repeat``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ray_dcp.errors import (
    StateDictError,
)
from ray_dcp.format.zip_record import MAX_ROW_PAYLOAD_NBYTES
from ray_dcp.planning.save_plan.plan_table import Key
from ray_dcp.planning.save_plan.state_planner import tensor_problem
from ray_dcp.planning.values.ties import ties_of
from ray_dcp.store.store import Preallocates, Store
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.results import WrittenColumns
from ray_dcp.write.tensor_record import JoinedWrites, Row, TensorRecord, write_python

_NUM_AHEAD = 64
"""Number of items that are made ready at once; see ``TensorRecord``."""


def write_shard_file(
    store: Store, key: str, rank: int, items: Sequence[WriteItem], planner: SavePlanner
) -> WrittenColumns:
    """Write ``items``, as ``planner`` resolves them, into the new file ``key``; return where each lies in it.

    Raises ``StateDictError`` where a tensor is not what the plan says, ``StoreError`` where the store fails.
    """
    repeats = _repeats(items, planner)
    columns = WrittenColumns(key, rank, len(items))
    with store.put_new(key) as file:
        if isinstance(file, Preallocates):
            file.preallocate(sum(_planned_nbytes(item) for number, item in enumerate(items) if number not in repeats))
        _write_items(JoinedWrites(file), items, planner, columns, repeats)
    return columns


def _write_items(
    sink: JoinedWrites,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    columns: WrittenColumns,
    repeats: Mapping[int, int],
) -> None:
    """Write the items that are not repeats, in the order of ``_in_order``.

    The planner is asked for an item when it is next, as torch does it: it may make what it gives. Only a planner that
    gives the state itself is asked for several at once, and out of order.
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
    """The positions of ``items`` in the order in which they are written.

    Python objects come first: a reader of a whole file then gets early what it needs for a decision. If ``tiny_first``,
    tiny tensors come next, those of one dtype and shape together: they share the head of their records.
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


def _resolved(item: WriteItem, planner: SavePlanner) -> TensorRecord | io.BytesIO:
    value = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        return value
    _require_as_planned(item, value)
    return TensorRecord(value)


def _planned_nbytes(item: WriteItem) -> int:
    """Bytes of the item's payload; 0 where the plan does not say."""
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
