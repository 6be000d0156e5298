"""The global plan of a save, made from plan tables: what torch's default planner makes, without an object per item.

Replicated items go to the rank with the least to write, as in torch's ``_dedup_save_plans``; that counts the whole
tensor for each of its chunks, while here a chunk counts only its own bytes. The chunks of all ranks are put together
and checked, as in ``create_default_global_save_plan``; where ``_validate_global_plan`` only counts, ``cover`` tells
which rows of which ranks are wrong. Values of one layout are checked once.
"""

from __future__ import annotations

from array import array
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ray_dcp.errors import StateDictError
from ray_dcp.planning.save_plan.check_save import (
    held_by_ranks,
    item_kind,
    not_whole,
    require_agreeing_plans,
    require_whole_tensors,
)
from ray_dcp.planning.save_plan.plan_table import ItemLayout, Key, PlanTable, Ties

_Extent = tuple[int, torch.Size | None]
"""(bytes, shape) of a chunk; the shape is None where the item is not a tensor."""


@dataclass(frozen=True, slots=True)
class GlobalTable:
    """The plan of all ranks: who writes what."""

    tables: Sequence[PlanTable]
    """What each rank has planned, in rank order."""
    kept: Sequence[array[int] | None]
    """For each rank the positions in its table that it writes, in order; None where it writes the whole table."""
    metadata: Metadata

    def items(self, rank: int) -> Iterator[tuple[str, ItemLayout]]:
        """Yield name and layout of each item that ``rank`` writes, in the order of its final plan."""
        table = self.tables[rank]
        positions = range(len(table.fqns)) if self.kept[rank] is None else self.kept[rank]
        assert positions is not None
        return ((table.fqns[position], table.layouts[table.layout_of[position]]) for position in positions)

    def plans(self) -> list[SavePlan]:
        """The final plans in torch's form, in rank order."""
        plans = []
        for rank, indexes in enumerate(self.indexes()):
            table = self.tables[rank]
            items = [
                WriteItem(index, layout.type, layout.bytes_io_data, layout.tensor_data)
                for index, (_, layout) in zip(indexes, self.items(rank), strict=True)
            ]
            plans.append(SavePlan(items, table.storage_data, table.planner_data, table.usable))
        return plans

    def indexes(self) -> list[list[MetadataIndex]]:
        """The indexes of the items that each rank writes, in rank order.

        An index's hint is the position of its chunk among those of its tensor.
        """
        num_seen: dict[str, int] = {}
        indexes: list[list[MetadataIndex]] = []
        for rank in range(len(self.tables)):
            of_rank = []
            for fqn, layout in self.items(rank):
                hint = None
                if layout.tensor_data is not None:
                    hint = num_seen.get(fqn, 0)
                    num_seen[fqn] = hint + 1
                of_rank.append(MetadataIndex(fqn, layout.offset, hint))
            indexes.append(of_rank)
        return indexes


def plan_tables(
    tables: Sequence[PlanTable],
    *,
    lowest_rank: bool,
    with_planner_data: bool,
    on_lowest_rank: Collection[Key] = (),
) -> GlobalTable:
    """Plan a save of all ranks.

    With ``lowest_rank`` every replicated item goes to the lowest rank that has it; the items ``on_lowest_rank`` do so
    in any case.

    Raises ``StateDictError`` naming every value that ranks disagree on, and every tensor that is not whole.
    """
    _require_agreeing(tables)
    kept = _deduplicated(tables, lowest_rank=lowest_rank, on_lowest_rank=on_lowest_rank)
    planned = GlobalTable(tables, kept, Metadata({}))
    described = _described(planned)
    metadata = Metadata(described, planner_data=_merged(tables) if with_planner_data else None)
    return GlobalTable(tables, kept, metadata)


def _require_agreeing(tables: Sequence[PlanTable]) -> None:
    """Check like ``require_agreeing_plans``, but quickly: that is called only to tell what is wrong."""
    kinds: dict[Any, int] = {}
    seen: dict[str, int] = {}
    agree = True
    for table in tables:
        kind_of = [kinds.setdefault(item_kind(layout.item("")), len(kinds)) for layout in table.layouts]
        for fqn, number in zip(table.fqns, table.layout_of, strict=True):
            kind = kind_of[number]
            agree &= seen.setdefault(fqn, kind) == kind
    if not agree:
        require_agreeing_plans([table.plan() for table in tables])


def _deduplicated(
    tables: Sequence[PlanTable], *, lowest_rank: bool, on_lowest_rank: Collection[Key]
) -> list[array[int] | None]:
    if len(tables) == 1:
        return [None]
    holders: dict[Key, list[int]] = {}
    extents: dict[Key, _Extent] = {}
    known: dict[_Extent, _Extent] = {}  # so that equal ones are one object
    differs = False
    for rank, table in enumerate(tables):
        offsets = [layout.offset for layout in table.layouts]
        extent_of = [known.setdefault(extent, extent) for extent in map(_extent, table.layouts)]
        for fqn, number in zip(table.fqns, table.layout_of, strict=True):
            key = fqn, offsets[number]
            held = holders.get(key)
            if held is None:
                holders[key] = [rank]
            else:
                held.append(rank)
            extent = extent_of[number]
            differs |= extents.setdefault(key, extent) is not extent
    trimmed = _leave_out_empty_chunks(tables, holders, extents) if differs else ()
    planned_nbytes = [0] * len(tables)
    writer: dict[Key, int] = {}
    ties = _ties(tables)
    for key, ranks in _ties_last(holders, ties):
        chosen = ranks[0]
        if len(ranks) > 1 or key in trimmed:
            lowest = lowest_rank or key in on_lowest_rank
            together = None if lowest or key not in ties else writer.get(ties[key], holders[ties[key]][0])
            if together in ranks:
                writer[key] = together
                continue
            chosen = writer[key] = min(ranks) if lowest else min(ranks, key=planned_nbytes.__getitem__)
        planned_nbytes[chosen] += extents[key][0]
    return [_kept(table, rank, writer) for rank, table in enumerate(tables)]


def _leave_out_empty_chunks(
    tables: Sequence[PlanTable], holders: dict[Key, list[int]], extents: dict[Key, _Extent]
) -> Collection[Key]:
    """Drop empty chunks where another rank has a real one at the same place; return the keys where one was dropped.

    The real one is to be written. Raises ``StateDictError`` for two real ones that begin at one place and end at
    different ones: they overlap.
    """
    sizes: dict[Key, dict[int, torch.Size]] = {}
    for rank, table in enumerate(tables):
        for fqn, number in zip(table.fqns, table.layout_of, strict=True):
            data = table.layouts[number].tensor_data
            if data is not None and 0 not in data.chunk.sizes:
                key = fqn, table.layouts[number].offset
                sizes.setdefault(key, {})[rank] = data.chunk.sizes
                extents[key] = _extent(table.layouts[number])
    overlapping = {key[0] for key, of_rank in sizes.items() if len(set(of_rank.values())) > 1}
    if overlapping:
        held = held_by_ranks([table.plan() for table in tables], overlapping)
        whole = {
            fqn: table.layouts[number].tensor_data.size  # type: ignore[union-attr]  # a tensor's
            for table in tables
            for fqn, number in zip(table.fqns, table.layout_of, strict=True)
            if fqn in overlapping
        }
        raise not_whole({fqn: (whole[fqn], held[fqn]) for fqn in overlapping}, len(tables))
    trimmed = {key: sorted(of_rank) for key, of_rank in sizes.items() if len(of_rank) < len(holders[key])}
    holders.update(trimmed)
    return trimmed.keys()


def _extent(layout: ItemLayout) -> _Extent:
    return layout.nbytes or 1, None if layout.tensor_data is None else layout.tensor_data.chunk.sizes


def _ties_last(holders: Mapping[Key, list[int]], ties: Ties) -> Iterable[tuple[Key, list[int]]]:
    """``holders`` with tied items at the end, so that each may go where the item that it is tied to has gone."""
    if not ties:
        return holders.items()
    tied = sorted(ties, key=lambda key: (key[0], tuple(key[1] or ())))
    return [(key, holders[key]) for key in (*(key for key in holders if key not in ties), *tied)]


def _ties(tables: Sequence[PlanTable]) -> Ties:
    """The ties of all ranks together.

    Ties on which ranks do not agree do no harm, since each rank stores once only what it has once.
    """
    ties: dict[Key, Key] = {}
    for table in tables:
        for key, first in table.ties.items():
            ties.setdefault(key, first)
    return ties


def _kept(table: PlanTable, rank: int, writer: dict[Key, int]) -> array[int] | None:
    if not writer:
        return None
    offsets = [layout.offset for layout in table.layouts]
    own = [
        position
        for position, (fqn, number) in enumerate(zip(table.fqns, table.layout_of, strict=True))
        if writer.get((fqn, offsets[number]), rank) == rank
    ]
    return None if len(own) == len(table.fqns) else array("I", own)


def _described(planned: GlobalTable) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """What ``.metadata`` says of each name; equal layouts share one object, which keeps the file small."""
    python_object = BytesStorageMetadata()
    layouts_of: dict[str, tuple[ItemLayout, ...]] = {}
    for rank in range(len(planned.tables)):
        for fqn, layout in planned.items(rank):
            before = layouts_of.get(fqn, ())
            assert not before or layout.type is WriteItemType.SHARD, f"{fqn} is planned twice"
            layouts_of[fqn] = (*before, layout)
    known: dict[tuple[int, ...], TensorStorageMetadata] = {}
    first_of: dict[int, str] = {}
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for fqn, layouts in layouts_of.items():
        if layouts[0].tensor_data is None:
            described[fqn] = python_object
            continue
        key = tuple([id(layout.tensor_data) for layout in layouts])
        saved = known.get(key)
        if saved is None:
            saved = known[key] = _tensor(layouts)
            first_of[id(saved)] = fqn
        described[fqn] = saved
    _require_whole(planned, described, [fqn for fqn in first_of.values()])
    return described


def _tensor(layouts: Sequence[ItemLayout]) -> TensorStorageMetadata:
    datas = [layout.tensor_data for layout in layouts if layout.tensor_data is not None]
    return TensorStorageMetadata(datas[0].properties, datas[0].size, [data.chunk for data in datas])


def _require_whole(planned: GlobalTable, described: dict[str, Any], representatives: Sequence[str]) -> None:
    """Check one name of each layout, and all names where one is wrong: the error then names them all, and the ranks."""
    try:
        require_whole_tensors(Metadata({fqn: described[fqn] for fqn in representatives}))
    except StateDictError:
        require_whole_tensors(Metadata(described), [table.plan() for table in planned.tables])


def _merged(tables: Sequence[PlanTable]) -> dict[str, Any]:
    """The planner data of all ranks; for a name that several have, that of the first one."""
    distinct = [table.planner_data for table in tables if table.planner_data != tables[0].planner_data]
    return dict(ChainMap(tables[0].planner_data, *distinct)) if distinct else dict(tables[0].planner_data)
