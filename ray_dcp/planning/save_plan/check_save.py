"""The coordinator's checks of a save before a byte is written: that ranks agree, and that every tensor is whole."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ray_dcp.errors import StateDictError
from ray_dcp.planning.save_plan.cover import Held, cover_problem, is_covered
from ray_dcp.wording import ranks_text

_Kind = tuple[str, tuple[int, ...] | None, str]


def require_agreeing_plans(plans: Sequence[SavePlan]) -> None:
    """Raise ``StateDictError`` unless all ranks mean the same by each name: kind, whole shape, dtype.

    Torch takes the first plan's word and drops the rest. ``plans`` are in rank order.
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


def require_whole_tensors(metadata: Metadata, plans: Sequence[SavePlan] = ()) -> None:
    """Raise ``StateDictError`` naming each tensor whose planned chunks do not hold each of its elements once.

    ``plans``, in rank order, tell which ranks have what. Torch's planner checks bounds and overlaps, but holes only
    where more than one rank takes part, and of those it tells no more than two numbers.
    """
    tensors = {f: s for f, s in metadata.state_dict_metadata.items() if isinstance(s, TensorStorageMetadata)}
    known: dict[Hashable, bool] = {}  # a model has thousands of tensors and a dozen layouts
    wrong = {}
    for fqn, saved in tensors.items():
        layout = saved.size, tuple([(chunk.offsets, chunk.sizes) for chunk in saved.chunks])
        if layout not in known:
            known[layout] = is_covered(saved.size, _held(saved))
        if not known[layout]:
            wrong[fqn] = saved
    if wrong:
        held = held_by_ranks(plans, wrong)
        raise not_whole({fqn: (saved.size, held[fqn] or _held(saved)) for fqn, saved in wrong.items()}, len(plans))


def not_whole(tensors: Mapping[str, tuple[Sequence[int], Sequence[Held]]], world_size: int) -> StateDictError:
    """The error about ``tensors``, which maps each name to the tensor's size and who has what of it."""
    alone = (
        ". No group here, so this process saves alone: ranks that save one checkpoint together need a group "
        "(RankGroup.join, RankPool)"
    )
    return StateDictError(
        f"the chunks of all ranks do not make up whole tensors, each element once{alone if world_size == 1 else ''}",
        [f"{fqn}: {cover_problem(size, held)}" for fqn, (size, held) in sorted(tensors.items())],
    )


def require_valid_plans(plans: Sequence[SavePlan]) -> None:
    """Check like ``require_whole_tensors``, but before a planner has put the plans together."""
    sizes = {item.index.fqn: item.tensor_data.size for plan in plans for item in plan.items if item.tensor_data}
    held = held_by_ranks(plans, sizes)
    wrong = {fqn: (size, held[fqn]) for fqn, size in sizes.items() if not is_covered(size, held[fqn])}
    if wrong:
        raise not_whole(wrong, len(plans))


def held_by_ranks(plans: Sequence[SavePlan], fqns: Collection[str]) -> dict[str, list[Held]]:
    """The chunks that ranks plan, by name; a chunk that several ranks have is there once."""
    ranks_of: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]] = {fqn: {} for fqn in fqns}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None and item.index.fqn in ranks_of:
                chunk = item.tensor_data.chunk
                place = tuple(chunk.offsets), tuple(chunk.sizes)
                ranks_of[item.index.fqn].setdefault(place, []).append(rank)
    return {fqn: [Held(*place, tuple(ranks)) for place, ranks in places.items()] for fqn, places in ranks_of.items()}


def _held(saved: TensorStorageMetadata) -> list[Held]:
    return [Held(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks]


def item_kind(item: WriteItem) -> _Kind:
    """The kind, shape and dtype on which all ranks must agree for a name."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return "a Python object", None, ""
    return "a tensor", tuple(item.tensor_data.size), str(item.tensor_data.properties.dtype)


def _who_has(ranks: Sequence[int], kind: _Kind) -> str:
    return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {_describe(kind)}"


def _describe(kind: _Kind) -> str:
    name, size, dtype = kind
    return name if size is None else f"{name} of shape {size} and {dtype}"
