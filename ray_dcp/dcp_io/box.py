"""Reading a box out of a stored chunk: the byte ranges that hold it, a bounded piece at a time.

A chunk's payload is row-major. A box of it is runs of rows of its first dimension; rows too large for one piece are
boxes of one dimension less. So memory stays at one piece, whatever the size of the chunk.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import ReadItem

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.layout import BLOCK_NBYTES
from ray_dcp.manifest import Entry

PIECE_NBYTES = 16 * BLOCK_NBYTES
"""Read at a time: large enough that the blocks at its ends, read twice, cost little."""

GetVerified = Callable[[Entry, int, int, int], bytes]
"""(entry, start in payload, nbytes, number of the first block) -> checked bytes"""


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    """Of its bytes in the payload."""
    sizes: tuple[int, ...]
    """Shape of those bytes."""
    offsets: tuple[int, ...]
    """Of the wanted part in them."""
    target: torch.Tensor


def read_box(get_verified: GetVerified, entry: Entry, item: ReadItem, target: torch.Tensor, *, file: str = "") -> int:
    """Fill ``target`` with the box that ``item`` names; return how many bytes were read.

    ``file`` is the entry's file in messages, where its key alone would not say enough.
    """
    file = file or entry.file
    dtype = _dtype(entry, file)
    sizes = tuple(entry.sizes or ())
    _require_consistent(entry, sizes, dtype, item, file)
    nbytes_read = 0
    for piece in _pieces(0, sizes, tuple(item.storage_offsets), target, dtype.itemsize):
        nbytes = math.prod(piece.sizes) * dtype.itemsize
        first_block = piece.start // BLOCK_NBYTES
        start = first_block * BLOCK_NBYTES
        end = min(-(-(piece.start + nbytes) // BLOCK_NBYTES) * BLOCK_NBYTES, entry.payload_nbytes)
        content = get_verified(entry, start, end - start, first_block)
        nbytes_read += len(content)
        _expect_read_only_buffers()
        stored = torch.frombuffer(content, dtype=torch.uint8, offset=piece.start - start, count=nbytes).view(dtype)
        wanted = narrow_tensor_by_index(stored.view(piece.sizes), piece.offsets, tuple(piece.target.shape))
        piece.target.copy_(wanted)
    return nbytes_read


@functools.cache
def _expect_read_only_buffers() -> None:
    """Use up torch's one warning that ``bytes`` are not to be written to: they are copied from, nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _pieces(
    start: int, sizes: Sequence[int], offsets: Sequence[int], target: torch.Tensor, itemsize: int
) -> Iterator[_Piece]:
    if target.numel() == 0:
        return
    if not sizes:
        yield _Piece(start, (), (), target)
        return
    row_nbytes = math.prod(sizes[1:]) * itemsize
    first, num_rows = offsets[0], target.shape[0]
    if row_nbytes > PIECE_NBYTES and len(sizes) > 1:
        for row in range(num_rows):
            yield from _pieces(start + (first + row) * row_nbytes, sizes[1:], offsets[1:], target[row], itemsize)
        return
    rows_a_piece = max(1, PIECE_NBYTES // row_nbytes)
    for row in range(0, num_rows, rows_a_piece):
        part = target[row : row + rows_a_piece]
        yield _Piece(start + (first + row) * row_nbytes, (part.shape[0], *sizes[1:]), (0, *offsets[1:]), part)


def _dtype(entry: Entry, file: str) -> torch.dtype:
    dtype = getattr(torch, entry.dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"the manifest gives it the dtype {entry.dtype!r}", file=file, fqn=entry.fqn)
    return dtype


def _require_consistent(entry: Entry, sizes: tuple[int, ...], dtype: torch.dtype, item: ReadItem, file: str) -> None:
    """The manifest and ``.metadata`` must mean the same chunk, and the payload must be as long as its shape says."""
    fits = len(sizes) == len(item.storage_offsets) and all(
        offset >= 0 and offset + length <= size
        for offset, length, size in zip(item.storage_offsets, item.lengths, sizes, strict=True)
    )
    num_blocks = -(-entry.payload_nbytes // BLOCK_NBYTES)
    if (
        not fits
        or entry.fqn != item.storage_index.fqn
        or entry.payload_nbytes != math.prod(sizes) * dtype.itemsize
        or len(entry.block_crcs) != num_blocks
    ):
        raise CorruptCheckpointError(
            "manifest and metadata disagree about this item", file=file, fqn=item.storage_index.fqn
        )
