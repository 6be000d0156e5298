"""Plans what the ranks of a load would read: of which files, in which ranges, with how many requests.

The plan is made from the manifest alone, of the same ``RecordRead``s and runs that a load carries out. Tensors are
split by rows, as by ``Shard(0)``; Python values are read by every rank. Each rank reads for itself: what the ranks of a
node may read for each other depends on where they run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.manifest import Entry
from ray_dcp.reads.plan.record_read import Box, RecordRead, read_of_entry
from ray_dcp.reads.plan.shape import ReadShape, is_small, runs
from ray_dcp.store.ranges import joined


@dataclass(frozen=True, slots=True)
class FileReads:
    """The reads of one rank from one file."""

    file: str
    num_requests: int
    nbytes: int
    """Bytes of all requests together."""
    ranges: Sequence[tuple[int, int]]
    """(start, end) in the file of all bytes that are read, in order; neighbours are joined."""


@dataclass(frozen=True, slots=True)
class RankReads:
    """The reads of one rank."""

    rank: int
    num_requests: int
    nbytes_read: int
    nbytes_wanted: int
    """Bytes of the rank's tensors and Python values: fewer than it reads where it needs only a part of some blocks."""
    files: Sequence[FileReads]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load of a whole checkpoint by some ranks."""

    checkpoint_id: str
    num_ranks: int
    ranks: Sequence[RankReads]
    """The reads of each rank, in rank order."""


def plan_load(checkpoint_id: str, entries: Iterable[Entry], shape: ReadShape, num_ranks: int) -> PlannedLoad:
    """Plan what ``num_ranks`` would read of all ``entries``, from a store that is best read in ``shape``.

    Raises ``CorruptCheckpointError`` for an entry whose numbers do not fit together.
    """
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_name[entry.fqn].append(entry)
    ranks = [_rank_reads(rank, num_ranks, by_name, shape) for rank in range(num_ranks)]
    return PlannedLoad(checkpoint_id, num_ranks, ranks)


def _rank_reads(rank: int, num_ranks: int, by_name: Mapping[str, Sequence[Entry]], shape: ReadShape) -> RankReads:
    values = [_whole(entry) for chunks in by_name.values() for entry in chunks if entry.dtype is None]
    tensors = [read for chunks in by_name.values() for read in _parts_of(chunks, rank, num_ranks)]
    # Python values come first: a load that they do not fit changes nothing.
    requests: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for key, start, end in itertools.chain(_runs(values, shape), _requests(tensors, shape)):
        requests[key].append((start, end))
    files = [_file_reads(key, asked) for key, asked in sorted(requests.items())]
    wanted = sum(math.prod(box.lengths) * read.itemsize for read in tensors for box in read.boxes)
    return RankReads(
        rank=rank,
        num_requests=sum(file.num_requests for file in files),
        nbytes_read=sum(file.nbytes for file in files),
        nbytes_wanted=wanted + sum(value.nbytes for value in values),
        files=files,
    )


def _file_reads(key: str, asked: Sequence[tuple[int, int]]) -> FileReads:
    places = [(start, end) for start, end, _ in joined(sorted(asked), lambda place: place)]
    return FileReads(key, len(asked), sum(end - start for start, end in asked), places)


def _whole(entry: Entry) -> RecordRead:
    read = read_of_entry(entry, ())
    if entry.payload_offset < 0 or not read.check.is_complete:
        raise _inconsistent(entry)
    return read


def _parts_of(chunks: Sequence[Entry], rank: int, num_ranks: int) -> Iterator[RecordRead]:
    """Yield the reads of one tensor by a rank, one for each chunk that has some of its rows."""
    tensors = [chunk for chunk in chunks if chunk.dtype is not None]
    ends = [(chunk.offsets[0] if chunk.offsets else 0) + chunk.sizes[0] if chunk.sizes else 0 for chunk in tensors]
    rows = max(ends, default=0)
    each = -(-rows // num_ranks)
    for chunk in tensors:
        sizes = chunk.sizes or ()
        read = read_of_entry(chunk, (_part(sizes, chunk.offsets or (), rank * each, (rank + 1) * each),))
        if read.nbytes != read.itemsize * math.prod(sizes) or read.offset < 0 or not read.is_consistent:
            raise _inconsistent(chunk)
        if not read.boxes[0].is_empty:
            yield read


def _part(sizes: Sequence[int], offsets: Sequence[int], first: int, end: int) -> Box:
    """The part of a chunk at ``offsets`` that lies in rows ``first`` to ``end`` of its tensor; all of a 0-dim one."""
    if not sizes:
        return Box((), ())
    at = offsets[0] if offsets else 0
    low = min(max(first - at, 0), sizes[0])
    high = min(max(end - at, low), sizes[0])
    return Box((low, *(0 for _ in sizes[1:])), (high - low, *sizes[1:]))


def _requests(reads: Sequence[RecordRead], shape: ReadShape) -> Iterator[tuple[str, int, int]]:
    """Yield (file, start, end) of each request for tensors, as ``RecordTasks`` makes them."""
    for read in reads:
        if not is_small(read.nbytes, is_tensor=True):
            for start, end in read.ranges(shape):
                yield read.key, start, end
    yield from _runs([read for read in reads if is_small(read.nbytes, is_tensor=True)], shape)


def _runs(reads: Sequence[RecordRead], shape: ReadShape) -> Iterator[tuple[str, int, int]]:
    by_file: dict[str, list[RecordRead]] = defaultdict(list)
    for read in reads:
        by_file[read.key].append(read)
    for key, of_file in by_file.items():
        for run in runs(sorted(of_file, key=lambda read: read.offset), shape):
            yield key, run[0].offset, max(read.offset + read.nbytes for read in run)


def _inconsistent(entry: Entry) -> CorruptCheckpointError:
    return CorruptCheckpointError("the manifest's numbers for it do not fit together", file=entry.file, fqn=entry.fqn)
