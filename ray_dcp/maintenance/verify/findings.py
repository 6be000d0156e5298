"""What verifying looks at and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_dcp.format.manifest import Entry
from ray_dcp.wording import counted


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it was written."""

    file: str
    """Key of the file, relative to the checkpoint's folder."""
    start: int
    """Offset of the first byte of the file that is concerned."""
    end: int
    """Offset behind the last byte that is concerned."""
    problem: str
    fqn: str = ""
    """Name of the item that lies there; empty where no item does."""
    offsets: tuple[int, ...] | None = None
    """Offsets of the item's chunk in the whole tensor; None for a Python object."""
    rank: int | None = None
    """The rank that wrote it; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Unchecked:
    """An item for which nothing says what its bytes should be."""

    file: str
    fqn: str
    offsets: tuple[int, ...] | None
    reason: str


@dataclass(frozen=True, slots=True)
class Item:
    """One stored item: a record in a file."""

    fqn: str
    offsets: tuple[int, ...] | None
    rank: int | None
    file: str
    start: int
    nbytes: int
    entry: Entry | None = None
    """What the manifest says of it."""
    not_checkable: str = ""
    """Why its bytes mean nothing to us; empty where they do."""
    padding: int = 0
    """Number of bytes in front of it that must be zero."""
    num_sharing: int = 0
    """Number of other items that have the same record."""
    shared_nbytes: int = 0
    """Number of bytes at its beginning that belong to records before it in its row, the head among them."""
    first_nbytes: int = 0
    """Length of the first record in its row, in bytes, where ``shared_nbytes`` is not 0."""
    num_following: int = 0
    """Number of records behind it in a row that it is the first of: they begin with its head."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def begin(self) -> int:
        """Offset in the file of the first byte that belongs to no item before it: its padding counts as its own."""
        return self.start + self.shared_nbytes - self.padding

    def fault(self, problem: str, start: int | None = None, end: int | None = None) -> Fault:
        """A fault of this item: of all that is its own, or of the bytes from ``start`` to ``end`` of its file."""
        start = self.start + self.shared_nbytes if start is None else start
        if self.num_sharing:
            problem += f"; its record is that of {counted(self.num_sharing, 'other item')} too"
        return Fault(self.file, start, self.end if end is None else end, problem, self.fqn, self.offsets, self.rank)

    def content_fault(self, problem: str, start: int, end: int) -> Fault:
        """A fault in bytes of this item that were read; it says so where they may be those of other records too."""
        front = self.entry.payload_offset if self.entry is not None else self.end
        if self.num_following and start < front:
            problem += f"; it shares its head with {counted(self.num_following, 'other record')} behind it"
        return self.fault(problem, start, end)

    def unchecked(self, reason: str) -> Unchecked:
        return Unchecked(self.file, self.fqn, self.offsets, reason)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file, and the items in it that can be looked at, in their order."""

    key: str
    nbytes: int
    """Length of the file, in bytes; up to the last item's end where no listing shows the file."""
    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What became of verifying one checkpoint; it is whole where there are no faults."""

    checkpoint_id: str
    has_manifest: bool
    """False where the records' own checksums had to do."""
    num_files: int
    num_items: int
    num_blocks: int
    """Number of runs of bytes under one checksum: blocks of payloads, or without a manifest entries of zip files."""
    num_blocks_checked: int
    nbytes: int
    """Bytes of all shard files."""
    nbytes_checked: int
    """Bytes of the blocks that were checked."""
    sample: float | None
    """The share of blocks that was asked for; None for all."""
    seed: int | None
    """The seed that chose the sample, and that chooses the same one again; None where all was checked."""
    seconds: float
    faults: Sequence[Fault] = ()
    unchecked: Sequence[Unchecked] = ()
    notes: Sequence[str] = ()
    """What is odd but not a fault."""
