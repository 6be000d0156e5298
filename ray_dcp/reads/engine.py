"""Carrying reads out: one after the other or several in flight, each in a lane that keeps memory and file at hand."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.plan.shape import Part
from ray_dcp.staging.host_pieces import tensor_memory
from ray_dcp.store.parallel import in_parallel
from ray_dcp.store.reading import Fill

T = TypeVar("T")


class Lane:
    """What one thread of a rank's reads keeps from read to read: some memory, and the file it last read, still open."""

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
    """Read all parts of a run, which are of one file, at once; return how many bytes were read.

    ``use`` gets the bytes, which begin with those of the first part, and their address in memory. They are there until
    it returns. Where it raises ``CorruptCheckpointError`` it gets those of another place, if there is one.
    """
    return files.checked(run[0].key, lambda: _read_and_use(files, run, use, lane))


def _read_and_use(
    files: CheckpointFiles, run: Sequence[Part], use: Callable[[memoryview, int], None], lane: Lane
) -> int:
    start = run[0].offset
    end = max([part.offset + part.nbytes for part in run])
    try:
        memory = lane.memory(end - start)
        held = tensor_memory(memory)
    except RuntimeError:
        # There is not so much memory. Is the file that long, or is the number wrong?
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
    """One read: ``read`` does it and returns how many bytes it read; ``done`` is what it was for."""

    read: Callable[[Lane], int]
    done: T


def finished(tasks: Iterable[Task[T]], num_in_flight: int) -> Generator[tuple[T, int], None, None]:
    """Carry out ``tasks``; yield what each was for, and its bytes, as they end. See ``in_parallel``."""
    lanes = [Lane() for _ in range(num_in_flight)]
    spare: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        spare.put(lane)
    # torch has inference mode for each thread, and tensors made in it may be filled only in it.
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
