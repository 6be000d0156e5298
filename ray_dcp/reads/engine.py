"""The reads of a rank: what lies close together is read together, and several reads are in flight where it helps."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.names import BLOCK_NBYTES
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.staging.host_pieces import tensor_memory
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.ranges import joined
from ray_dcp.store.reading import Fill
from ray_dcp.store.store import Store
from ray_dcp.store.threads import in_parallel

_LOCAL_UNIT_NBYTES = 2 * BLOCK_NBYTES
"""Stays in a CPU's cache until it has been checked; measured against one, four and eight blocks."""
_LOCAL_PIECE_NBYTES = BLOCK_NBYTES // 2
"""Stays in a core's own cache; measured against an eighth, a quarter, one and two blocks."""
_LOCAL_BATCH_NBYTES = 512 * BLOCK_NBYTES
_SHARED_BATCH_NBYTES = 64 * BLOCK_NBYTES
"""Where several threads read: small enough that all of them find something to do."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShape:
    """How a store is best read."""

    unit_nbytes: int
    """Of a large payload at once, where it passes through memory of the reader's; whole blocks."""
    piece_nbytes: int
    """Of one that goes straight to where it belongs."""
    run_nbytes: int
    """Of small payloads at once."""
    max_gap_nbytes: int
    """Between two of them: more is left out."""
    num_in_flight: int
    batch_nbytes: int = 0
    """Of large payloads that are read one after the other without a look at anything else; 0: each by itself."""


def read_shape(store: Store) -> ReadShape:
    """Local files come from the page cache, a few blocks at a time, and are checked while the CPU's cache has them."""
    if isinstance(store, LocalStore | MemoryStore):
        num_in_flight = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
        return ReadShape(
            unit_nbytes=_LOCAL_UNIT_NBYTES,
            piece_nbytes=_LOCAL_PIECE_NBYTES,
            batch_nbytes=_LOCAL_BATCH_NBYTES if num_in_flight == 1 else _SHARED_BATCH_NBYTES,
            run_nbytes=4 * BLOCK_NBYTES,
            max_gap_nbytes=16 << 10,
            num_in_flight=num_in_flight,
        )
    request = 16 * BLOCK_NBYTES
    return ReadShape(
        unit_nbytes=request, piece_nbytes=request, run_nbytes=request, max_gap_nbytes=256 << 10, num_in_flight=8
    )


class Part(Protocol):
    """A range of a file's bytes that holds one value."""

    @property
    def key(self) -> str: ...
    @property
    def fqn(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Part)


def runs(parts: Iterable[P], shape: ReadShape) -> Iterator[list[P]]:
    """``parts``, in order of their offsets, in runs to be read at once; one that is longer than a run is alone."""
    for _, _, run in joined(parts, _place, max_gap=shape.max_gap_nbytes, max_length=shape.run_nbytes):
        yield run


def _place(part: Part) -> tuple[int, int]:
    return part.offset, part.offset + part.nbytes


def batches(parts: Sequence[P], nbytes: int) -> Iterator[list[P]]:
    """``parts`` in their order; each batch but the last is the shortest that has ``nbytes``, and never empty."""
    batch: list[P] = []
    held = 0
    for part in parts:
        batch.append(part)
        held += part.nbytes
        if held >= nbytes:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


class Lane:
    """What one thread of a rank's reads keeps from read to read: some memory, and the file it last read, open."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._until_next = ExitStack()
        self._key: str | None = None
        self._fill: Fill | None = None

    def memory(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor for bytes that do not go straight to where they belong; the same memory each time."""
        if len(self._held) < nbytes:
            self._held = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._held[:nbytes]

    def file(self, files: CheckpointFiles, key: str) -> Fill:
        """Read a file of the one checkpoint that this lane is for; it stays open until another is asked for."""
        if self._fill is None or self._key != key:
            self.close()
            self._fill = self._until_next.enter_context(files.opened(key))
            self._key = key
        return self._fill

    def close(self) -> None:
        self._fill = None
        self._until_next.close()


def read_run(files: CheckpointFiles, run: Sequence[Part], use: Callable[[memoryview, int], None], lane: Lane) -> int:
    """Read all parts of a run, which are of one file, at once; how many bytes were read.

    ``use`` gets them, from the first part's on, and the address at which they lie until it returns.
    """
    start = run[0].offset
    end = max([part.offset + part.nbytes for part in run])
    try:
        memory = lane.memory(end - start)
        held = tensor_memory(memory)
    except RuntimeError:
        # So much memory is not there. Is the file as long, or is the number wrong?
        for part in run:
            files.get(part.key, part.fqn, part.offset + part.nbytes, 0)
        raise
    try:
        files.fill(run[0].key, run[0].fqn, start, [held])
    except CorruptCheckpointError:
        # Whose bytes are missing? The first one's may all be there.
        for part in run:
            files.fill(part.key, part.fqn, part.offset, [held[part.offset - start :][: part.nbytes]])
        raise
    use(held, memory.data_ptr())
    return end - start


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """One read: ``read`` does it and returns how many bytes it took; what it was for is done then."""

    read: Callable[[Lane], int]
    done: T


def finished(tasks: Iterable[Task[T]], num_in_flight: int) -> Generator[tuple[T, int], None, None]:
    """Carry out ``tasks``; yield what each was for, and its bytes, as they end. See ``in_parallel``."""
    lanes = [Lane() for _ in range(num_in_flight)]
    spare: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        spare.put(lane)
    # Torch keeps it for each thread, and only within it may the tensors made in it be filled.
    in_inference = torch.is_inference_mode_enabled()

    def read(task: Task[T]) -> int:
        lane = spare.get()
        try:
            with torch.inference_mode(in_inference):
                return task.read(lane)
        finally:
            spare.put(lane)

    with ExitStack() as at_end:
        for lane in lanes:
            at_end.callback(lane.close)
        ended = at_end.enter_context(closing(in_parallel(read, tasks, max_at_once=num_in_flight)))
        for task, nbytes in ended:
            yield task.done, nbytes
