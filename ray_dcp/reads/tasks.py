"""The reads that fill a planner's tensors and get it its Python objects, record after record."""

from __future__ import annotations

import functools
import io
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.engine import Lane, Task, read_run
from ray_dcp.reads.plan.shape import ReadShape, batches, runs
from ray_dcp.reads.record_reads import RecordReads
from ray_dcp.reads.wanted import WantedRecord

Loaded = list[Callable[[], None]]
"""Functions to call once a read has ended."""


class NamedBytes(io.BytesIO):
    """A stored Python object on its way to the planner; ``name`` is its file, as opened files have it."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


class KeepsRecords(LoadPlanner):
    """A planner that takes Python objects as they are stored, to decode them all later."""

    @abstractmethod
    def keep_record(self, item: ReadItem, record: bytes, file: str) -> None:
        """Take the checked record of ``item``; ``file`` names its file in messages."""


class RecordTasks:
    """The reads for one planner. ``nbytes_loaded`` counts the bytes that it has been given."""

    def __init__(self, planner: LoadPlanner, reads: RecordReads, files: CheckpointFiles, shape: ReadShape) -> None:
        self._planner = planner
        self._keeps = planner if isinstance(planner, KeepsRecords) else None
        self._reads = reads
        self._files = files
        self._shape = shape
        self.nbytes_loaded = 0

    def of(
        self, wanted: Mapping[str, Sequence[WantedRecord]], is_done: Callable[[WantedRecord], bool]
    ) -> Iterator[Task[Loaded]]:
        """Yield the reads, file after file: in each the large records that are not done, then the small ones.

        The planner is asked for a tensor when its read is next, as torch does it: it may make a tensor each time. Only
        a planner that gives the memory of the state itself is asked for several at once.
        """
        in_place = getattr(self._planner, "resolves_in_place", False) is True
        for records in wanted.values():
            small = [record for record in records if record.is_small]
            large = [] if len(small) == len(records) else [r for r in records if not r.is_small and not is_done(r)]
            for batch in batches(large, self._shape.batch_nbytes if in_place else 0):
                yield self._large(batch)
            for run in runs(small, self._shape):
                yield self._run(run)

    def targets(self, record: WantedRecord) -> list[torch.Tensor]:
        """The tensors that the planner gives to fill from a record, one for each of its items."""
        return [self._target(item, record.key) for item in record.items]

    def loaded(self, record: WantedRecord, targets: Sequence[torch.Tensor]) -> Loaded:
        return [functools.partial(self._commit, *pair) for pair in zip(record.items, targets, strict=True)]

    def _large(self, batch: Sequence[WantedRecord]) -> Task[Loaded]:
        """The reads of several records, one after the other, made ready beforehand; see ``LargeRead``."""
        reads: list[Callable[[Lane], int]] = []
        loaded: Loaded = []
        filled: list[torch.Tensor] = []
        for record in batch:
            targets = self.targets(record)
            filled += targets
            reads.append(self._reads.large_read(record, targets))
            loaded += self.loaded(record, targets)
        count_as_changed(filled)
        return Task(lambda lane: sum([read(lane) for read in reads]), loaded)

    def _run(self, run: Sequence[WantedRecord]) -> Task[Loaded]:
        """One read of several small records that lie close together."""
        targets_of = [None if record.items[0].type == LoadItemType.BYTE_IO else self.targets(record) for record in run]
        count_as_changed([target for targets in targets_of if targets is not None for target in targets])
        python: list[bytes] = []

        def use(held: memoryview, address: int) -> None:
            python.extend(self._reads.use_run(run, targets_of, held, address))

        loaded = functools.partial(self._run_loaded, run, targets_of, python)
        return Task(functools.partial(read_run, self._files, run, use), [loaded])

    def _run_loaded(
        self,
        run: Sequence[WantedRecord],
        targets_of: Sequence[Sequence[torch.Tensor] | None],
        python: Sequence[bytes],
    ) -> None:
        """Tell the planner of all records of a run, in their order."""
        shown = self._files.shown(run[0].key)
        records = iter(python)
        for wanted, targets in zip(run, targets_of, strict=True):
            if targets is None:
                self._load_python(wanted.items, next(records), shown)
            else:
                for item, target in zip(wanted.items, targets, strict=True):
                    self._commit(item, target)

    def _target(self, item: ReadItem, key: str) -> torch.Tensor:
        target: Any = self._planner.resolve_tensor(item).detach()
        if target.shape != item.lengths and tuple(target.shape) != tuple(item.lengths):
            raise CorruptCheckpointError(
                f"the planner gives a tensor of shape {tuple(target.shape)} for a read of {tuple(item.lengths)}",
                file=self._files.shown(key),
                fqn=item.dest_index.fqn,
            )
        return target

    def _commit(self, item: ReadItem, target: torch.Tensor) -> None:
        self._planner.commit_tensor(item, target)
        self.nbytes_loaded += target.nbytes

    def _load_python(self, items: Sequence[ReadItem], record: bytes, shown: str) -> None:
        self.nbytes_loaded += len(record)
        for item in items:
            if self._keeps is not None:
                self._keeps.keep_record(item, record, shown)
            else:
                self._planner.load_bytes(item, NamedBytes(record, shown))


def count_as_changed(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` are written to: torch does not see it, since their memory is filled directly.

    A backward pass through what was computed from the old values then raises, as after every other change in place.
    """
    torch.autograd.graph.increment_version(tensors)
