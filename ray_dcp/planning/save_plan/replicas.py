"""Compares values that several ranks save under one name, of which one is written: they should be the same.

A rank sends a digest of each with its plan; the coordinator compares. Where they differ the lowest rank's value is
written, for every name that differs, so that what is stored was together on one rank. Ranks then send the bytes that
were looked at with their results, and the coordinator tells how far they are apart. None of this takes an exchange
of its own. In DCP's terms it comes between ``create_local_plan`` and ``create_global_plan``.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ray_dcp.format.checksums import crc32
from ray_dcp.format.manifest import DifferingReplicas, ranks_by_value
from ray_dcp.format.scalar_record import PYTHON_SCALARS
from ray_dcp.planning.layouts import local_part
from ray_dcp.planning.per_rank import is_per_rank_name
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.value_digest import NoDigestError, scalar_digest, value_digest
from ray_dcp.settings import DEFAULT_REPLICA_NBYTES, ReplicaCheck
from ray_dcp.staging.host_pieces import flat, small_content, tensor_memory

NOT_LOOKED_AT = 0
"""Stands in place of a digest for a value that was not looked at."""
_COUNTER_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32))
_NUM_SAMPLES, _SAMPLE_NBYTES = 16, 4096
"""Number of samples, and bytes of each, from a tensor that is too large to be looked at as a whole."""
_MAX_SHOWN_NBYTES = 16 << 20
"""Most bytes, about, that a rank sends to tell how far its values are from those of others."""
_MAX_SHOWN_VALUES = 8
"""Most different values of one name that are compared to the lowest rank's."""


@dataclass(frozen=True, slots=True)
class Differing:
    """One name, or one chunk of it, under which ranks hold different values."""

    key: Key
    ranks: tuple[tuple[int, ...], ...]
    """The ranks in groups that hold the same value, sorted; the first has the lowest rank, whose value is written."""


@dataclass(frozen=True, slots=True)
class ShownReplicas:
    """What a rank sends of values that differ: their dtype and the bytes that were looked at, by name and place."""

    content: Mapping[Key, tuple[torch.dtype, bytes]] = field(default_factory=dict)


# The rank's half.


def replica_digests(plan: SavePlan, planner: SavePlanner, check: ReplicaCheck) -> array[int] | None:
    """A digest for each item of a local plan, in its order; None where there is nothing to look at.

    An item that no other rank can have, or that cannot be looked at, gets ``NOT_LOOKED_AT``. Only planners that keep
    the state by name can be asked: ``DefaultSavePlanner`` and what derives from it.
    """
    if check.mode == "off" or not isinstance(planner, DefaultSavePlanner):
        return None
    state: Mapping[str, Any] = planner.state_dict
    unsharded = _Unsharded()
    digests = array("I", bytes(4 * len(plan.items)))
    on_devices: list[tuple[int, torch.Tensor]] = []
    for number, item in enumerate(plan.items):
        fqn = item.index.fqn
        value = state.get(fqn)
        if item.type is WriteItemType.BYTE_IO:
            digest = scalar_digest(value) if type(value) in PYTHON_SCALARS else _object_digest(fqn, value)
            digests[number] = digest or 1
            continue
        if type(value) is torch.Tensor and value.dtype in _COUNTER_DTYPES and value.is_cpu and not value.dim():
            digests[number] = scalar_digest(value.item()) or 1  # counters, of which optimizers have thousands
            continue
        tensor = _replica(item, value, planner, unsharded)
        if tensor is None:
            continue
        if tensor.is_cpu:
            content = _looked_at(tensor, check.max_nbytes)
            digests[number] = NOT_LOOKED_AT if content is None else crc32(content) or 1
        else:
            on_devices.append((number, tensor))
    for number, content in _from_devices(on_devices, check.max_nbytes):
        digests[number] = crc32(content) or 1
    return digests if any(digests) else None


def shown_replicas(plan: SavePlan, planner: SavePlanner, keys: Collection[Key]) -> ShownReplicas:
    """The tensors that this rank holds under ``keys`` of its local plan, up to a limit in bytes."""
    content: dict[Key, tuple[torch.dtype, bytes]] = {}
    nbytes = 0
    unsharded = _Unsharded()
    for item in plan.items if keys else ():
        if (item.index.fqn, item.index.offset) not in keys or item.type is WriteItemType.BYTE_IO:
            continue
        assert isinstance(planner, DefaultSavePlanner), "others have no digests"
        tensor = _replica(item, planner.state_dict.get(item.index.fqn), planner, unsharded)
        if tensor is None or nbytes > _MAX_SHOWN_NBYTES:
            continue
        for _, seen in _from_devices([(0, tensor)], DEFAULT_REPLICA_NBYTES):
            content[item.index.fqn, item.index.offset] = tensor.dtype, seen
            nbytes += len(seen)
    return ShownReplicas(content)


class _Unsharded:
    """Whether other ranks hold what this rank holds of a DTensor; worked out once for each layout."""

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}

    def __call__(self, value: DTensor) -> bool:
        mesh, placements = value.device_mesh, value.placements
        key = id(mesh), placements
        if key not in self._known:
            self._known[key] = any(
                placement.is_replicate() and mesh.size(dim) > 1 for dim, placement in enumerate(placements)
            )
        return self._known[key]


def _replica(item: WriteItem, value: Any, planner: DefaultSavePlanner, unsharded: _Unsharded) -> torch.Tensor | None:
    """The tensor that ``item`` writes, where other ranks may hold it too; else None."""
    if isinstance(value, DTensor) and not unsharded(value):
        return None
    local = local_part(value)
    if local is None:
        found = planner.lookup_object(item.index)
        local = found if isinstance(found, torch.Tensor) else None
    return None if local is None or local.layout is not torch.strided or local.device.type == "meta" else local


def _object_digest(fqn: str, value: Any) -> int:
    if is_per_rank_name(fqn):
        return NOT_LOOKED_AT
    try:
        return value_digest(value)
    except NoDigestError:
        return NOT_LOOKED_AT


def _looked_at(tensor: torch.Tensor, max_nbytes: int | None) -> bytes | memoryview | None:
    """All bytes of a CPU tensor of at most ``max_nbytes``, samples of a larger one; None if that is not in order."""
    nbytes = tensor.nbytes
    if max_nbytes is None or nbytes <= max_nbytes:
        return small_content(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    memory = tensor_memory(tensor)
    return b"".join(memory[start : start + _SAMPLE_NBYTES] for start in _sample_starts(nbytes))


def _sample_starts(nbytes: int) -> Iterable[int]:
    """The starts of the samples, in bytes: spread over the whole tensor, at multiples of every element's size."""
    step = (nbytes - _SAMPLE_NBYTES) // (_NUM_SAMPLES - 1) // 64 * 64
    return range(0, _NUM_SAMPLES * step, step)


def _from_devices(tensors: Sequence[tuple[int, torch.Tensor]], max_nbytes: int | None) -> list[tuple[int, bytes]]:
    """The looked-at bytes of tensors on any device, which come to the host together; (number, bytes) of each."""
    found: list[tuple[int, bytes]] = []
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in tensors:
        if tensor.device.type == "cpu":
            content = _looked_at(tensor, max_nbytes)
            found += [] if content is None else [(number, bytes(content))]
            continue
        sample = _flat_sample(tensor, max_nbytes)
        if sample is not None:
            by_device.setdefault(tensor.device, []).append((number, sample))
    for samples in by_device.values():
        together = tensor_memory(torch.cat([sample for _, sample in samples]).cpu())
        start = 0
        for number, sample in samples:
            found.append((number, bytes(together[start : start + len(sample)])))
            start += len(sample)
    return found


def _flat_sample(tensor: torch.Tensor, max_nbytes: int | None) -> torch.Tensor | None:
    """The bytes that ``_looked_at`` would give for a tensor on a device, left there."""
    if max_nbytes is None or tensor.nbytes <= max_nbytes:
        return flat(tensor.detach().resolve_conj().resolve_neg().contiguous()).view(torch.uint8)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    content = flat(tensor).view(torch.uint8)
    return torch.cat([content[start : start + _SAMPLE_NBYTES] for start in _sample_starts(tensor.nbytes)])


# The coordinator's half.


@dataclass(frozen=True, slots=True)
class HeldReplicas:
    """The items that a rank has planned, in columns, with the digest of each."""

    fqns: Sequence[str]
    offsets: Sequence[torch.Size | None]
    digests: array[int]

    @classmethod
    def of(cls, plan: SavePlan | PlanTable, digests: array[int]) -> HeldReplicas:
        if isinstance(plan, PlanTable):
            offsets = [layout.offset for layout in plan.layouts]
            return cls(plan.fqns, [offsets[number] for number in plan.layout_of], digests)
        return cls([item.index.fqn for item in plan.items], [item.index.offset for item in plan.items], digests)


def find_differing(
    plans: Sequence[SavePlan | PlanTable], digests_of: Sequence[array[int] | None]
) -> tuple[Differing, ...]:
    """The names and chunks of which ranks hold different values, sorted by name. Both arguments are in rank order."""
    distinct: list[tuple[HeldReplicas, list[int]]] = []
    for rank, (plan, digests) in enumerate(zip(plans, digests_of, strict=True)):
        if digests is None:
            continue
        held = HeldReplicas.of(plan, digests)
        if distinct and held == distinct[0][0]:
            distinct[0][1].append(rank)  # as nearly all are
        else:
            distinct.append((held, [rank]))
    seen: dict[Key, int] = {}
    differing: dict[Key, dict[int, list[int]]] = {}
    for held, _ in distinct:
        for key, digest in _looked_at_in(held):
            if seen.setdefault(key, digest) != digest:
                differing[key] = {}
    for held, ranks in distinct if differing else ():
        for key, digest in _looked_at_in(held):
            if key in differing:
                differing[key].setdefault(digest, []).extend(ranks)
    return tuple(
        Differing(key, tuple(sorted(tuple(sorted(ranks)) for ranks in by_digest.values())))
        for key, by_digest in sorted(differing.items(), key=lambda one: (one[0][0], tuple(one[0][1] or ())))
    )


def _looked_at_in(held: HeldReplicas) -> Iterator[tuple[Key, int]]:
    for fqn, offset, digest in zip(held.fqns, held.offsets, held.digests, strict=True):
        if digest != NOT_LOOKED_AT:
            yield (fqn, offset), digest


def keys_to_show(differing: Sequence[Differing]) -> Mapping[int, Collection[Key]]:
    """The values that each rank is to show, by rank: one rank for each different value is enough."""
    by_rank: dict[int, set[Key]] = {}
    for one in differing:
        for ranks in one.ranks[: _MAX_SHOWN_VALUES + 1]:
            by_rank.setdefault(ranks[0], set()).add(one.key)
    return by_rank


def describe_differing(differing: Sequence[Differing], shown: Sequence[ShownReplicas]) -> list[DifferingReplicas]:
    """What the manifest records of them, by name: who holds what, and how far the values shown are apart.

    ``shown`` is in rank order, or empty.
    """
    by_name: dict[str, list[tuple[Differing, float | None]]] = {}
    for one in differing:
        by_name.setdefault(one.key[0], []).append((one, _largest_difference(one, shown)))
    return [
        DifferingReplicas(
            fqn,
            chunks[0][0].ranks,
            max((apart for _, apart in chunks if apart is not None), default=None),
        )
        for fqn, chunks in by_name.items()
    ]


def refusals(differing: Sequence[Differing]) -> list[str]:
    """A line for each name, for an error that lists them."""
    return [
        f"{one.fqn}: {ranks_by_value(one.ranks)} hold different values" for one in describe_differing(differing, ())
    ]


def _largest_difference(one: Differing, shown: Sequence[ShownReplicas]) -> float | None:
    """The largest difference of an element between the lowest rank's value and any other.

    None where the values are not tensors or were not shown.
    """
    if not shown:
        return None
    values = [shown[ranks[0]].content.get(one.key) for ranks in one.ranks[: _MAX_SHOWN_VALUES + 1]]
    try:
        lowest, *others = [_as_numbers(*value) if value is not None else None for value in values]
        distances = [float((other - lowest).abs().max()) for other in others if lowest is not None is not other]
    except (RuntimeError, NotImplementedError):  # torch cannot compute with every dtype that it can store
        return None
    return max(distances, default=None)


def _as_numbers(dtype: torch.dtype, content: bytes) -> torch.Tensor:
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype)
    return values.to(torch.complex128 if dtype.is_complex else torch.float64)
