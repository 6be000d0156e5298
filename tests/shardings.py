"""Tensors of every kind, cut among ranks in every way, and templates that show a hole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ray_dcp import LocalShards

KINDS = ("rows", "columns", "uneven", "two_chunks", "no_rows", "scalar", "replicated")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.complex64,
    torch.bool,
    torch.int64,
)
_SHAPES = {
    "rows": (8, 6),
    "columns": (5, 12),
    "uneven": (13, 7),
    "two_chunks": (16, 3),
    "no_rows": (0, 3),
    "scalar": (),
    "replicated": (4, 5),
}


def whole_tensor(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The same values in every process."""
    shape = _SHAPES[kind]
    count = torch.Size(shape).numel()
    if dtype == torch.int64:
        return (torch.arange(count, dtype=torch.int64) + (2**53 + 1)).reshape(shape)
    bits = torch.arange(count * dtype.itemsize, dtype=torch.int64) * 37 % 119  # no NaN in any of the formats
    if dtype == torch.bool:
        bits = bits % 2
    return bits.to(torch.uint8).view(dtype).reshape(shape).clone()


def chunk_boxes(kind: str, rank: int, world_size: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the chunks of one rank. Some get nothing where there are more ranks than rows."""
    shape = _SHAPES[kind]
    if kind in ("scalar", "replicated"):
        yield (0,) * len(shape), shape
    elif kind == "columns":
        start, stop = _span(shape[1], rank, world_size)
        yield (0, start), (shape[0], stop - start)
    elif kind == "two_chunks":  # strips i and i + world_size of 2 x world_size strips
        for strip in (rank, rank + world_size):
            start, stop = _span(shape[0], strip, 2 * world_size)
            yield (start, 0), (stop - start, shape[1])
    else:  # torch.chunk's rule: 13 rows over 5 ranks are 3, 3, 3, 3, 1
        start, stop = _span(shape[0], rank, world_size)
        yield (start, 0), (stop - start, *shape[1:])


def shards(kind: str, dtype: torch.dtype, rank: int, world_size: int) -> LocalShards:
    """This rank's part, filled."""
    whole = whole_tensor(kind, dtype)
    return LocalShards(
        _SHAPES[kind],
        {
            offsets: whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
            for offsets, sizes in chunk_boxes(kind, rank, world_size)
        },
        dtype=dtype,
    )


def template(kind: str, dtype: torch.dtype, rank: int, world_size: int) -> LocalShards:
    """This rank's part to fill: NaN, or the bit pattern that differs everywhere."""
    empty = _unlike(whole_tensor(kind, dtype))
    return LocalShards(
        _SHAPES[kind],
        {
            offsets: empty[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
            for offsets, sizes in chunk_boxes(kind, rank, world_size)
        },
        dtype=dtype,
    )


def _unlike(whole: torch.Tensor) -> torch.Tensor:
    if whole.dtype.is_floating_point:
        return torch.full(whole.shape, float("nan")).to(whole.dtype)
    if whole.dtype.is_complex:
        return torch.full(whole.shape, complex("nan"), dtype=whole.dtype)
    if whole.dtype == torch.bool:
        return ~whole
    return (whole.reshape(-1).view(torch.uint8) ^ 0xFF).view(whole.dtype).reshape(whole.shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, whatever the dtype."""
    return a.dtype == b.dtype and a.shape == b.shape and (not a.numel() or torch.equal(_bytes(a), _bytes(b)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def state(rank: int, world_size: int) -> dict[str, object]:
    """One value of every kind and dtype."""
    return {f"{kind}.{_name(dtype)}": shards(kind, dtype, rank, world_size) for kind in KINDS for dtype in DTYPES}


def templates(rank: int, world_size: int) -> dict[str, object]:
    return {f"{kind}.{_name(dtype)}": template(kind, dtype, rank, world_size) for kind in KINDS for dtype in DTYPES}


def differences(filled: dict[str, object], rank: int, world_size: int) -> list[str]:
    """Names in ``filled`` whose chunks are not bit for bit what ``state`` holds."""
    wanted = state(rank, world_size)
    return [
        name
        for name, value in wanted.items()
        if any(not same_bits(chunk, filled[name].chunks[offsets]) for offsets, chunk in value.chunks.items())
    ]


def _span(length: int, part: int, num_parts: int) -> tuple[int, int]:
    size = -(-length // num_parts)
    return min(part * size, length), min((part + 1) * size, length)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
