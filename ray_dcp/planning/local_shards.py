"""``LocalShards``: the part of a tensor that one rank holds, without a process group.

A wrapper subclass of ``torch.Tensor``, since torch's planner looks up shards only in tensors. It answers the
three methods by which that planner accepts foreign values (``__create_write_items__``, ``__create_chunk_list__``,
``__get_tensor_shard__``), so user-written planners derived from torch's handle it too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ray_dcp.errors import ConfigError
from ray_dcp.planning.disjoint import overlapping
from ray_dcp.torch_private import disabled_torch_function, make_wrapper_subclass, to_copy

_CHUNKWISE = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.clone.default,
        to_copy,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
    }
)


class LocalShards(torch.Tensor):
    """The chunks of a tensor of global shape ``size`` that this rank holds: ``{offsets: local tensor}``.

    There may be any number of chunks, even none, of any shape and anywhere in the tensor; two chunks of one rank may
    not overlap. ``offsets`` has one entry for each dimension, in elements (``()`` for a 0-dim tensor). On load the
    chunks are filled in place. All chunks have one dtype; ``dtype`` is needed only where there is no chunk and it is
    not torch's default dtype.

    Raises ``ConfigError`` naming a chunk that does not fit, and for a size or offsets that are not whole numbers.
    """

    chunks: dict[tuple[int, ...], torch.Tensor]
    """The local tensors by their offsets in the whole tensor."""

    @staticmethod
    def __new__(
        cls, size: Sequence[int], chunks: Mapping[tuple[int, ...], torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> LocalShards:
        size = _size(size)
        if not isinstance(chunks, Mapping):
            raise ConfigError(
                "LocalShards.chunks", f"a {type(chunks).__name__} does not say where: pass {{offsets: local tensor}}"
            )
        by_offsets = {_offsets(offsets): _tensor(offsets, chunk) for offsets, chunk in chunks.items()}
        first = next(iter(by_offsets.values()), None)
        dtype = dtype or (first.dtype if first is not None else torch.get_default_dtype())
        _require_fitting(size, by_offsets, dtype)
        device = first.device if first is not None else torch.device("cpu")
        shards = make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        shards.chunks = by_offsets
        return shards

    def __init__(
        self, size: Sequence[int], chunks: Mapping[tuple[int, ...], torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].size()):
            func, args = torch.ops.aten.empty_like.default, args[:1]  # so torch's stager makes room for a copy
        if func not in _CHUNKWISE:
            raise TypeError(
                f"LocalShards only carries chunks to and from a checkpoint and does not compute {func}: "
                "use its .chunks, a dict of plain tensors"
            )
        shards = args[0]
        results = {offsets: func(chunk, *args[1:], **(kwargs or {})) for offsets, chunk in shards.chunks.items()}
        return LocalShards(shards.size(), results, dtype=(kwargs or {}).get("dtype") or shards.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = ", ".join(f"{tuple(chunk.shape)} at {offsets}" for offsets, chunk in self.chunks.items())
        return f"LocalShards(size={tuple(self.size())}, dtype={self.dtype}, chunks=[{held}])"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (tuple(self.size()), self.chunks, self.dtype)

    def __deepcopy__(self, memo: Any) -> LocalShards:
        return LocalShards(self.size(), {o: c.detach().clone() for o, c in self.chunks.items()}, dtype=self.dtype)

    # The methods that torch's planner calls.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """One item for each chunk; an empty chunk gets one only where the whole tensor is empty, to keep its name."""
        whole_is_empty = math.prod(self.size()) == 0
        held = {offsets: chunk for offsets, chunk in self.chunks.items() if chunk.numel() or whole_is_empty}
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.size()),
                    properties=TensorProperties.create_from_tensor(chunk),
                    size=self.size(),
                ),
            )
            for offsets, chunk in held.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.size())
            for offsets, chunk in self.chunks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        if index.offset is None or tuple(index.offset) not in self.chunks:
            held = sorted(self.chunks)
            raise ValueError(f"{index.fqn}: this rank holds no chunk at {index.offset}; it holds those at {held}")
        return self.chunks[tuple(index.offset)]


def _rebuild(size: tuple[int, ...], chunks: dict[tuple[int, ...], torch.Tensor], dtype: torch.dtype) -> LocalShards:
    return LocalShards(size, dict(chunks), dtype=dtype)


def _size(given: Any) -> torch.Size:
    try:
        numbers = tuple(map(operator.index, given))
    except TypeError:
        numbers = (-1,)
    if any(number < 0 for number in numbers):
        raise ConfigError(
            "LocalShards.size", f"{given!r} is not a tuple of whole numbers; a 1-dim tensor has (n,)"
        ) from None
    return torch.Size(numbers)


def _offsets(given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise ConfigError(
            "LocalShards.chunks", f"offsets {given!r} are not a tuple of whole numbers; in a 1-dim tensor (n,)"
        ) from None


def _tensor(offsets: Any, chunk: Any) -> torch.Tensor:
    if not isinstance(chunk, torch.Tensor):
        raise ConfigError("LocalShards.chunks", f"the value at offsets {offsets} is a {type(chunk).__name__}")
    return chunk


def _require_fitting(size: torch.Size, chunks: Mapping[tuple[int, ...], torch.Tensor], dtype: torch.dtype) -> None:
    for offsets, chunk in chunks.items():
        where = f"chunk of shape {tuple(chunk.shape)} at offsets {offsets}"
        if len(offsets) != len(size) or chunk.dim() != len(size):
            raise ConfigError("LocalShards.chunks", f"{where} has other dimensions than the size {tuple(size)}")
        if any(o < 0 or o + n > whole for o, n, whole in zip(offsets, chunk.shape, size, strict=True)):
            raise ConfigError("LocalShards.chunks", f"{where} reaches outside the size {tuple(size)}")
        if chunk.dtype != dtype:
            raise ConfigError("LocalShards.chunks", f"{where} is {chunk.dtype}, others are {dtype}")
    held = list(chunks)
    for one, other in overlapping([(offsets, chunk.shape) for offsets, chunk in chunks.items()]):
        raise ConfigError("LocalShards.chunks", f"chunks at {held[one]} and {held[other]} overlap")
