"""Reading a box out of a stored chunk into any tensor: on a device, of another dtype, not in order in memory.

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

from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads.chunk import Box, StoredChunk
from ray_dcp.torch_private import narrow_tensor_by_index

PIECE_NBYTES = 16 * BLOCK_NBYTES
"""Read at a time: large enough that the blocks at its ends, read twice, cost little."""

GetVerified = Callable[[int, int], bytes]
"""(start in the payload, at a block; nbytes) -> checked bytes"""


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    """Of its bytes in the payload."""
    sizes: tuple[int, ...]
    """Shape of those bytes."""
    offsets: tuple[int, ...]
    """Of the wanted part in them."""
    target: torch.Tensor


def read_box(get_verified: GetVerified, chunk: StoredChunk, box: Box) -> int:
    """Fill the box's target; return how many bytes were read."""
    dtype = chunk.dtype
    nbytes_read = 0
    for piece in _pieces(0, chunk.sizes, box.offsets, box.target, dtype.itemsize):
        nbytes = math.prod(piece.sizes) * dtype.itemsize
        start = piece.start // BLOCK_NBYTES * BLOCK_NBYTES
        end = min(-(-(piece.start + nbytes) // BLOCK_NBYTES) * BLOCK_NBYTES, chunk.nbytes)
        content = get_verified(start, end - start)
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
