"""Writes a rank's shard file: its items' records, front to back, durable when it is written."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ray_dcp.store.store import Preallocates, Store
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.results import WrittenColumns
from ray_dcp.write.shard_layout import ShardLayout, write_records
from ray_dcp.write.tensor_record import JoinedWrites


def write_shard_file(
    store: Store, key: str, rank: int, items: Sequence[WriteItem], planner: SavePlanner
) -> WrittenColumns:
    """Write ``items``, as ``planner`` resolves them, into the new file ``key``; return where each lies in it.

    Raises ``StateDictError`` where a tensor is not what the plan says, ``StoreError`` where the store fails.
    """
    layout = ShardLayout(items, planner)
    columns = WrittenColumns(key, rank, len(items))
    with store.put_new(key) as file:
        if isinstance(file, Preallocates):
            file.preallocate(layout.planned_nbytes)
        sink = JoinedWrites(file)
        for number, records in enumerate(layout.batches()):
            if number == 0:
                write_records(records[:1], sink, columns)
                reached(Point.MID_WRITE)
                records = records[1:]
            write_records(records, sink, columns)
        sink.flush()
    layout.note_repeats(columns)
    return columns
