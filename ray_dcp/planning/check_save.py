"""What the coordinator checks of a save before a byte is written: do the ranks agree, is every tensor whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ray_dcp.errors import StateDictError
from ray_dcp.wording import ranks_text

_Kind = tuple[str, tuple[int, ...] | None, str]


def require_agreeing_plans(plans: Sequence[SavePlan]) -> None:
    """Raise ``StateDictError`` unless all ranks mean the same by each name: kind, whole shape, dtype.

    Torch takes the first plan's word and drops the rest. Lists are in rank order.
    """
    seen: dict[str, dict[_Kind, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks = seen.setdefault(item.index.fqn, {}).setdefault(item_kind(item), [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    problems = [
        f"{fqn}: " + "; ".join(_who_has(ranks, kind) for kind, ranks in kinds.items())
        for fqn, kinds in sorted(seen.items())
        if len(kinds) > 1
    ]
    if problems:
        raise StateDictError(
            "ranks disagree on values of one name. Give values that belong to one rank as PerRank, "
            "and different tensors different names",
            problems,
        )


def require_whole_tensors(metadata: Metadata) -> None:
    """Raise ``StateDictError`` naming each tensor whose planned chunks do not add up to all of it.

    Torch's planner checks bounds and overlaps, but holes only where more than one rank takes part.
    """
    problems = []
    for fqn, saved in sorted(metadata.state_dict_metadata.items()):
        if isinstance(saved, TensorStorageMetadata):
            planned = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
            whole = math.prod(saved.size)
            if planned != whole:
                problems.append(f"{fqn}: chunks of all ranks hold {planned} of {whole} elements")
    if problems:
        raise StateDictError("tensors are not whole across the ranks that save", problems)


def item_kind(item: WriteItem) -> _Kind:
    """What all ranks must mean alike by a name."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return "a Python object", None, ""
    return "a tensor", tuple(item.tensor_data.size), str(item.tensor_data.properties.dtype)


def _who_has(ranks: Sequence[int], kind: _Kind) -> str:
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {_describe(kind)}"


def _describe(kind: _Kind) -> str:
    name, size, dtype = kind
    return name if size is None else f"{name} of shape {size} and {dtype}"
