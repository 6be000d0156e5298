"""The plan made from tables is torch's own, item for item."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ray_dcp.errors import StateDictError
from ray_dcp.planning.save_plan.global_plan import plan_tables
from ray_dcp.planning.save_plan.plan_table import PlanTable


def python_item(fqn: str) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def tensor_item(fqn: str, size: int, start: int = 0, end: int | None = None, dtype=torch.float32) -> WriteItem:
    """Rows ``start`` to ``end`` of a tensor of ``size`` rows; all of it is a replicated one."""
    end = size if end is None else end
    offsets, sizes = torch.Size((start, 0)), torch.Size((end - start, 3))
    return WriteItem(
        MetadataIndex(fqn, offsets),
        WriteItemType.TENSOR if end - start == size else WriteItemType.SHARD,
        None,
        TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size((size, 3))),
    )


@st.composite
def all_plans(draw):
    """Of some ranks: values that all or some of them have, and tensors in rows, some of them on several ranks."""
    num_ranks = draw(st.integers(1, 4))
    items: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["python", "replicated", "rows"]))
        if kind == "rows":
            size = draw(st.integers(1, 9))
            cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
            for start, end in itertools.pairwise(cuts):
                for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                    items[rank].append(tensor_item(f"v{number}", size, start, end))
        else:
            size = draw(st.integers(1, 9))
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
                made = python_item(f"v{number}") if kind == "python" else tensor_item(f"v{number}", size)
                items[rank].append(made)
    data = [{item.index.fqn: (item.index.fqn,) for item in of_rank} for of_rank in items]
    return [SavePlan(of_rank, planner_data=names) for of_rank, names in zip(items, data, strict=True)]


def chunk_nbytes(item: WriteItem) -> int | None:
    """What an item adds to its rank. Torch counts the whole tensor for each chunk of it, and so balances worse."""
    return (
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize if item.tensor_data else None
    )


def hints(plans) -> list[list[int | None]]:
    return [[item.index.index for item in plan.items] for plan in plans]


@given(all_plans(), st.booleans(), st.booleans())
def test_it_is_torchs_plan(plans, lowest_rank, travelled):
    tables = [PlanTable.of(plan) for plan in plans]
    if travelled:
        tables = pickle.loads(pickle.dumps(tables))
    planned = plan_tables(tables, lowest_rank=lowest_rank, with_planner_data=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriteItem, "tensor_storage_size", chunk_nbytes)
        expected, metadata = create_default_global_save_plan(dedup_save_plans(plans, lowest_rank))
    assert planned.plans() == expected
    assert hints(planned.plans()) == hints(expected)
    assert planned.metadata.state_dict_metadata == metadata.state_dict_metadata
    assert list(planned.metadata.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert planned.metadata.planner_data.keys() == metadata.state_dict_metadata.keys()
    for rank, plan in enumerate(plans):
        kept = planned.kept[rank]
        own = plan.items if kept is None else [plan.items[position] for position in kept]
        assert own == expected[rank].items
    assert planned.indexes() == [[item.index for item in plan.items] for plan in expected]


@given(all_plans())
def test_a_table_is_its_plan(plans):
    for plan in plans:
        table = pickle.loads(pickle.dumps(PlanTable.of(plan)))
        assert table.plan() == plan
        assert hints([table.plan()]) == hints([plan])


def test_items_that_share_their_data_share_a_layout():
    first = tensor_item("a", 4)
    plan = SavePlan([first, *[dataclasses.replace(first, index=MetadataIndex(f"b{n}", first.index.offset)) for n in
                              range(50)], *[python_item(f"p{n}") for n in range(50)]])  # fmt: skip
    table = PlanTable.of(plan)
    assert len(table.layouts) == 2
    described = plan_tables([table], lowest_rank=False, with_planner_data=False).metadata.state_dict_metadata
    assert len({id(value) for value in described.values()}) == 2


def problems(*plans: SavePlan) -> tuple[str, ...]:
    with pytest.raises(StateDictError) as caught:
        plan_tables([PlanTable.of(plan) for plan in plans], lowest_rank=False, with_planner_data=False)
    return caught.value.problems


def test_all_names_that_ranks_disagree_on_are_named():
    found = problems(
        SavePlan([tensor_item("a", 4), tensor_item("b", 4), tensor_item("c", 4)]),
        SavePlan([tensor_item("a", 5), tensor_item("b", 4), tensor_item("c", 4, dtype=torch.int32)]),
    )
    assert [line.partition(":")[0] for line in found] == ["a", "c"]


def test_all_tensors_with_a_hole_are_named_though_they_lie_alike():
    half = tensor_item("a", 4, 0, 2)
    alike = [dataclasses.replace(half, index=MetadataIndex(name, half.index.offset)) for name in ("b", "c")]
    found = problems(SavePlan([half, *alike, tensor_item("whole", 3)]))
    assert [line.partition(":")[0] for line in found] == ["a", "b", "c"]


def test_overlaps_and_chunks_out_of_bounds_are_named():
    assert "rank 0 has rows 2:3 twice" in problems(SavePlan([tensor_item("a", 4, 0, 3), tensor_item("a", 4, 2, 4)]))[0]
    outside = dataclasses.replace(
        tensor_item("a", 4, 0, 2),
        tensor_data=dataclasses.replace(tensor_item("a", 4, 2, 6).tensor_data, size=torch.Size((4, 3))),
    )
    assert (
        "rank 0 has rows 2:6 of a tensor of shape (4, 3)"
        in problems(SavePlan([outside]), SavePlan([tensor_item("a", 4, 0, 2)]))[0]
    )


def test_nothing_to_save_is_a_plan_too():
    planned = plan_tables([PlanTable.of(SavePlan([], planner_data={}))] * 2, lowest_rank=False, with_planner_data=True)
    assert planned.metadata.state_dict_metadata == {}
    assert [plan.items for plan in planned.plans()] == [[], []]
