"""CRC-32, as zip files have it: of blocks while bytes pass, and of the whole from its blocks.

Computed by isal, which is several times as fast as zlib and gives the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isal import isal_zlib

from ray_dcp.format.names import BLOCK_NBYTES

Bytes = bytes | bytearray | memoryview


def crc32(content: Bytes, crc: int = 0) -> int:
    """The CRC-32 of ``content`` (flat bytes); ``crc`` is that of bytes in front of it, which then count, too."""
    value: int = isal_zlib.crc32(content, crc)
    return value


def block_crcs(content: Bytes) -> tuple[int, ...]:
    """The CRC-32 of each block of ``content``, the last one short; empty for no bytes."""
    if len(content) <= BLOCK_NBYTES:
        return (crc32(content),) if len(content) else ()
    view = memoryview(content)
    return tuple(crc32(view[start : start + BLOCK_NBYTES]) for start in range(0, len(view), BLOCK_NBYTES))


def crc_of_blocks(crcs: Sequence[int], nbytes: int) -> int:
    """The CRC-32 of ``nbytes`` bytes, from the ``crcs`` of their blocks."""
    whole = 0
    for number, crc in enumerate(crcs):
        whole = combined_crc(whole, crc, min(BLOCK_NBYTES, nbytes - number * BLOCK_NBYTES))
    return whole


def combined_crc(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of bytes whose CRC-32 is ``first``, and ``second_nbytes`` behind them whose CRC-32 is ``second``."""
    value: int = isal_zlib.crc32_combine(first, second, second_nbytes)
    return value


class BlockChecksums:
    """CRC-32 of each block of a stream of bytes that is fed in pieces of any size."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._crc = 0
        self._in_block = 0

    def update(self, piece: Bytes) -> None:
        if not self._in_block and len(piece) == BLOCK_NBYTES:  # nearly all of them
            self._crcs.append(crc32(piece))
            return
        view = memoryview(piece)
        while view:
            part = view[: BLOCK_NBYTES - self._in_block]
            self._crc = crc32(part, self._crc)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK_NBYTES:
                self._close_block()

    def crcs(self) -> tuple[int, ...]:
        """The CRC-32 of each block, the last one short. Call it once, at the end."""
        if self._in_block:
            self._close_block()
        return tuple(self._crcs)

    def _close_block(self) -> None:
        self._crcs.append(self._crc)
        self._crc = 0
        self._in_block = 0


@dataclass(frozen=True, slots=True)
class Check:
    """How a run of stored bytes is checked: by the CRC-32 of each of its blocks, the last one short.

    Bytes that have one checksum for all of them are one block.
    """

    nbytes: int
    crcs: Sequence[int] | None
    """The CRC-32 of each block; None where nothing says what the bytes should be."""
    block_nbytes: int = BLOCK_NBYTES

    @classmethod
    def of_whole(cls, nbytes: int, crc: int) -> Check:
        """A check that needs all of the bytes."""
        return cls(nbytes, (crc,), max(1, nbytes))

    @property
    def needs_all(self) -> bool:
        """Whether nothing can be checked before all of it is read."""
        return self.crcs is not None and self.block_nbytes >= self.nbytes

    @property
    def is_complete(self) -> bool:
        """Whether there is one checksum for each block."""
        return self.crcs is None or len(self.crcs) == -(-self.nbytes // self.block_nbytes)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, nbytes, CRC-32) of each block that has a checksum."""
        for number, crc in enumerate(self.crcs or ()):
            start = number * self.block_nbytes
            yield start, min(self.block_nbytes, self.nbytes - start), crc

    def damage(self, content: memoryview, start: int = 0) -> tuple[int, int] | None:
        """Return (start, nbytes) of the first block of ``content`` that is not as it was written, or None.

        ``content`` begins with a block, ``start`` bytes into the run, and ends with one.
        """
        return RunningCheck(self).damage(content, start)


class RunningCheck:
    """Checks bytes while they pass, in pieces of any size: each block where it ends."""

    def __init__(self, check: Check) -> None:
        self._crcs = check.crcs
        self._nbytes = check.nbytes
        self._block_nbytes = check.block_nbytes
        self._crc = 0
        self._at = 0

    def damage(self, content: memoryview, start: int) -> tuple[int, int] | None:
        """Return (start, nbytes) of the first block that ends in ``content`` and is not as it was written, or None.

        ``content`` goes on where the one before has ended, or begins at a block.
        """
        if self._crcs is None:
            return None
        crc = self._crc if start == self._at else 0
        at, end = start, start + len(content)
        while at < end:
            number = at // self._block_nbytes
            block_start = number * self._block_nbytes
            block_end = min(block_start + self._block_nbytes, self._nbytes)
            until = min(block_end, end)
            crc = crc32(content[at - start : until - start], crc)
            if until == block_end:
                if crc != self._crcs[number]:
                    return block_start, block_end - block_start
                crc = 0
            at = until
        self._crc, self._at = crc, end
        return None
