"""The coordinator's half of one save, load or barrier: what it does when all ranks have sent their part.

A session is a plain object. Each of its phases takes what every rank sent, in rank order, and returns what every rank
gets, in rank order. It raises to fail the call for all ranks. Phases run once each, in order, one at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from ray_dcp.catalog import CheckpointInfo, latest_checkpoint
from ray_dcp.dcp_io.store_reader import OpenedCheckpoint, open_checkpoint
from ray_dcp.dcp_io.store_writer import StoreWriter
from ray_dcp.errors import StateDictError
from ray_dcp.planning.check_save import require_agreeing_plans, require_whole_tensors
from ray_dcp.planning.template import TemplateCheck
from ray_dcp.protocol.wire import Carried


class Session(Protocol):
    """See the module."""

    phases: ClassVar[tuple[str, ...]]
    """Names of the exchanges, in order; ``step`` is called with each once."""
    checkpoint_id: str

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class SaveContribution:
    """What a rank sends to plan a save. ``planner`` and ``writer`` come from rank 0 alone."""

    checkpoint_id: str
    plan: SavePlan
    planner: Carried | SavePlanner | None = None
    writer: Carried | StorageWriter | None = None


@dataclass(frozen=True, slots=True)
class OpenContribution:
    """What a rank sends to open a checkpoint: ``opens`` is False where a user's reader reads the metadata."""

    checkpoint_id: str
    opens: bool


@dataclass(frozen=True, slots=True)
class LoadContribution:
    """What a rank sends to plan a load. ``check`` is None where a user's planner decides what fits."""

    plan: LoadPlan
    check: TemplateCheck | None
    strict: bool | str
    per_rank_problems: tuple[str, ...] = ()
    planner: Carried | LoadPlanner | None = None
    reader: Carried | StorageReader | None = None


class SaveSession:
    """plan: local plans to final plans. write: write results to the committed ``Metadata``."""

    phases: ClassVar[tuple[str, ...]] = ("plan", "write")

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._writer: StorageWriter | None = None
        self._metadata: Metadata | None = None
        self._planned: set[MetadataIndex] = set()

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        return self._plan(contributions) if phase == "plan" else self._write(contributions)

    def _plan(self, contributions: Sequence[SaveContribution]) -> Sequence[SavePlan]:
        self.checkpoint_id = _one_checkpoint_id([part.checkpoint_id for part in contributions])
        local_plans = [part.plan for part in contributions]
        require_agreeing_plans(local_plans)
        planner: SavePlanner = _unpacked(contributions[0].planner)
        self._writer = _unpacked(contributions[0].writer)
        if isinstance(contributions[0].writer, Carried):
            self._writer.set_up_storage_writer(True, **_accepted(self._writer.set_up_storage_writer, rank=0))
        plans, self._metadata = planner.create_global_plan(local_plans)
        require_whole_tensors(self._metadata)
        final = self._writer.prepare_global_plan(plans)
        self._planned = {item.index for plan in final for item in plan.items}
        return final

    def _write(self, results: Sequence[list[WriteResult]]) -> Sequence[Metadata]:
        assert self._writer is not None
        assert self._metadata is not None
        self._require_all_written(results)
        self._writer.finish(self._metadata, list(results))
        return [self._metadata] * len(results)

    def _require_all_written(self, results: Sequence[list[WriteResult]]) -> None:
        """Count what came back: torch's own writer loses the errors of its helper threads.

        A user's writer that reports nothing at all keeps its own books and is believed.
        """
        written = {result.index for of_rank in results for result in of_rank}
        counts = isinstance(self._writer, StoreWriter | _FileSystemWriter)
        lacking = self._planned - written
        if lacking and (written or counts):
            raise StateDictError(
                f"{len(lacking)} of {len(self._planned)} planned items were never written; nothing was committed",
                sorted(f"{index.fqn} at {index.offset}" for index in lacking),
            )


class LoadSession:
    """open: the checkpoint, once for all. plan: local plans to final plans, after all checks.

    read: every rank has all bytes. restore: every rank has put them where they belong.
    """

    phases: ClassVar[tuple[str, ...]] = ("open", "plan", "read", "restore")

    def __init__(self) -> None:
        self.checkpoint_id = ""

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        steps: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
            "open": self._open,
            "plan": self._plan,
            "read": lambda parts: [None] * len(parts),
            "restore": lambda parts: [None] * len(parts),
        }
        return steps[phase](contributions)

    def _open(self, contributions: Sequence[OpenContribution]) -> Sequence[OpenedCheckpoint | None]:
        self.checkpoint_id = _one_checkpoint_id([part.checkpoint_id for part in contributions])
        opened = open_checkpoint(self.checkpoint_id) if contributions[0].opens else None
        return [opened] * len(contributions)

    def _plan(self, contributions: Sequence[LoadContribution]) -> Sequence[tuple[LoadPlan, tuple[str, ...]]]:
        """Final plans, and to every rank the names that no rank's template has."""
        unexpected = _unexpected_everywhere(contributions)
        _require_fitting_templates(contributions, unexpected)
        planner: LoadPlanner = _unpacked(contributions[0].planner)
        reader: StorageReader = _unpacked(contributions[0].reader)
        plans = reader.prepare_global_plan(planner.create_global_plan([part.plan for part in contributions]))
        return [(plan, unexpected) for plan in plans]


class NewestSession:
    """choose: the newest committed checkpoint under a root, looked up once for all ranks; None when there is none."""

    phases: ClassVar[tuple[str, ...]] = ("choose",)

    def __init__(self) -> None:
        self.checkpoint_id = ""

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[CheckpointInfo | None]:
        self.checkpoint_id = _one_checkpoint_id(contributions)
        return [latest_checkpoint(self.checkpoint_id)] * len(contributions)


class BarrierSession:
    """arrive: all ranks are here."""

    phases: ClassVar[tuple[str, ...]] = ("arrive",)
    checkpoint_id = ""

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        return [None] * len(contributions)


SESSIONS: Mapping[str, Callable[[], Session]] = {
    "save": SaveSession,
    "load": LoadSession,
    "newest": NewestSession,
    "barrier": BarrierSession,
}


def _unpacked(carried: Any) -> Any:
    return carried.unpack() if isinstance(carried, Carried) else carried


def _accepted(method: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those keyword arguments that ``method`` takes: torch passes them only to those that declare ``**kwargs``."""
    return kwargs if "kwargs" in inspect.signature(method).parameters else {}


def _one_checkpoint_id(checkpoint_ids: Sequence[str]) -> str:
    by_id: dict[str, list[int]] = {}
    for rank, checkpoint_id in enumerate(checkpoint_ids):
        by_id.setdefault(checkpoint_id, []).append(rank)
    if len(by_id) > 1:
        raise StateDictError(
            "ranks passed different checkpoint_ids", [f"ranks {ranks}: {name}" for name, ranks in by_id.items()]
        )
    return checkpoint_ids[0]


def _unexpected_everywhere(contributions: Sequence[LoadContribution]) -> tuple[str, ...]:
    checks = [part.check for part in contributions]
    if not checks or any(check is None for check in checks):
        return ()
    return tuple(sorted(set.intersection(*(set(check.unexpected) for check in checks if check is not None))))


def _require_fitting_templates(contributions: Sequence[LoadContribution], unexpected: tuple[str, ...]) -> None:
    found: dict[str, list[int]] = {}
    for rank, part in enumerate(contributions):
        for problem in [*_rank_problems(part, unexpected), *part.per_rank_problems]:
            found.setdefault(problem, []).append(rank)
    if found:
        everywhere = list(range(len(contributions)))
        raise StateDictError(
            "the template does not fit the checkpoint; nothing was loaded",
            [p if ranks == everywhere else f"{p} (ranks {ranks})" for p, ranks in sorted(found.items())],
        )


def _rank_problems(part: LoadContribution, unexpected: tuple[str, ...]) -> list[str]:
    if part.check is None:
        return []
    problems = list(part.check.problems)
    if part.strict:
        problems += [f"{fqn}: not in the checkpoint (strict=False loads the rest)" for fqn in part.check.missing]
    if part.strict == "exact":
        problems += [f'{fqn}: in the checkpoint, but not in the template (strict="exact")' for fqn in unexpected]
    return problems
