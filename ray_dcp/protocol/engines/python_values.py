"""The Python values of one load on one rank: read and decoded before a tensor is filled, put in place after all are.

So a value that cannot be read, or must not be, is told of while the template is as it was. Where a user's planner or
reader changes plans globally, or reads in its own way, all is read at once, as under torch.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ray_dcp.errors import UnsafeDataError
from ray_dcp.progress import Progress
from ray_dcp.protocol.engines.plugin_calls import CountingPlanner
from ray_dcp.reads.tasks import KeepsRecords, NamedBytes
from ray_dcp.trace_points import Point, reached
from ray_dcp.wording import joined


class Kept(NamedTuple):
    """A Python object that was read; ``content`` is a new stream of all its bytes each time."""

    item: ReadItem
    record: bytes
    file: str

    @property
    def content(self) -> io.BytesIO:
        return NamedBytes(self.record, self.file)


class Reads(Protocol):
    """A reader of Python values."""

    reader: Any
    """DCP's ``StorageReader``."""
    counts_progress: bool
    """Whether it tells how far it is while it reads."""
    can_keep_python_back: bool
    """Whether the planner may take a Python value later than when it is read."""


class TakesPython(Protocol):
    """A planner that takes Python values."""

    planner: Any
    """DCP's ``LoadPlanner``."""

    def take(self, kept: Kept) -> None:
        """Decode a value, and keep it until it is put in place. Raises if it must not, or cannot, be decoded."""
        ...


class PythonValues:
    """Reads plans for one planner by one reader."""

    def __init__(self, planner: TakesPython, reader: Reads, progress: Progress, checkpoint_id: str) -> None:
        self._planner = planner
        self._reader = reader
        self._progress = progress
        self._checkpoint_id = checkpoint_id
        self._kept_back: list[Kept] = []
        self._read: set[int] = set()
        """The ``id`` of each item of the local plan that ``read_first`` has read."""
        self._rest: tuple[LoadPlan, LoadPlan] | None = None
        """A plan and what is left of it: a reader may know a plan again."""

    def read_first(self, plan: LoadPlan) -> None:
        """Read and decode all Python values of ``plan``, a local one. Raises what one of them raises."""
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if items:
            self._read = set(map(id, items))
            self.fill(LoadPlan(items))

    def rest_of(self, plan: LoadPlan) -> LoadPlan:
        """What of ``plan`` is still to be read."""
        if not self._read:
            return plan
        if self._rest is None or self._rest[0] is not plan:
            rest = [item for item in plan.items if id(item) not in self._read]
            self._rest = plan, replace(plan, items=rest)
        return self._rest[1]

    def fill(self, plan: LoadPlan) -> None:
        """Read ``plan``: fill its tensors, decode its Python values."""
        planner: Any = self._planner.planner
        if self._reader.can_keep_python_back:
            planner = _PythonValuesLater(planner, self._kept_back, self._checkpoint_id)
        if not self._reader.counts_progress:
            planner = CountingPlanner(planner, self._progress)
        self._reader.reader.read_data(plan, planner).wait()
        self._decode()

    def _decode(self) -> None:
        unsafe: list[UnsafeDataError] = []
        for kept in self._kept_back:
            try:
                self._planner.take(kept)
            except UnsafeDataError as error:
                unsafe.append(error)
        self._kept_back.clear()
        if unsafe:
            raise _all_of(unsafe)


def _all_of(unsafe: Sequence[UnsafeDataError]) -> UnsafeDataError:
    first, *rest = sorted(unsafe, key=lambda error: error.fqn)
    if not rest:
        return first
    others = joined([error.fqn for error in rest])
    error = UnsafeDataError(f"{first}. The same goes for {others}", file=first.file)
    error.fqn = first.fqn
    return error


class _PythonValuesLater(KeepsRecords):
    """The planner as the reader sees it: tensors go to the real one, Python values are kept for later."""

    def __init__(self, planner: LoadPlanner, kept_back: list[Kept], checkpoint_id: str) -> None:
        self._planner = planner
        self._kept_back = kept_back
        self._checkpoint_id = checkpoint_id

    def keep_record(self, item: ReadItem, record: bytes, file: str) -> None:
        self._kept_back.append(Kept(item, record, file))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        file = getattr(value, "name", self._checkpoint_id)
        self.keep_record(read_item, value.getvalue()[value.tell() :], file)

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        return self._planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        self._planner.commit_tensor(read_item, tensor)
        reached(Point.MID_READ)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._planner.set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> LoadPlan:
        return self._planner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return self._planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._planner.finish_plan(central_plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


__all__ = ["Kept", "PythonValues"]
