"""The coordinator's half of one save, load or barrier: what it does when all ranks have sent their part.

A session is a plain object. Each of its phases takes what every rank sent, in rank order, and returns what every rank
gets, in rank order. It raises to fail the call for all ranks. Phases run once each, in order, one at a time.

A user's writer stays on rank 0, and so does a planner or reader that cannot be pickled. Their global steps then run
there, in a phase of their own: rank 0 gets an ``OnRankZero`` with what all ranks sent, and sends back the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from ray_dcp.catalog import CheckpointInfo, latest_checkpoint
from ray_dcp.dcp_io.opened import OpenedCheckpoint, open_checkpoint
from ray_dcp.dcp_io.store_writer import StoreWriter
from ray_dcp.errors import StateDictError
from ray_dcp.planning.check_save import require_agreeing_plans, require_whole_tensors
from ray_dcp.planning.template import TemplateCheck
from ray_dcp.points import Point, reached
from ray_dcp.protocol.wire import Carried


class Session(Protocol):
    """See the module."""

    first_phase: ClassVar[str]
    checkpoint_id: str
    attempt: str | None = None
    """Names a save that writes, as its shard files do; None where there is none."""

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        """Carry out the coordinator's part of a phase."""
        ...

    def next_phase(self, phase: str) -> str | None:
        """What follows ``phase`` once its step is done; None when that ends the call."""
        ...

    @property
    def may_have_committed(self) -> bool:
        return False

    def give_up(self) -> None:
        """The call has failed; a step that still runs must not commit any more. Called from another thread."""


@dataclass(frozen=True, slots=True)
class OnRankZero:
    """The answer to all ranks where the next step is rank 0's. Only rank 0's has the parts."""

    parts: Sequence[Any] | None
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class SaveContribution:
    """What a rank sends to plan a save. ``carried``, of rank 0 alone: its (planner, writer), None where they stay."""

    checkpoint_id: str
    plan: SavePlan
    carried: Carried | tuple[SavePlanner, StorageWriter] | None = None
    reports_results: bool = True
    """False for a user's writer, which may keep books of its own."""


@dataclass(frozen=True, slots=True)
class OpenContribution:
    """What a rank sends to open a checkpoint: ``opens`` is False where a user's reader reads the metadata."""

    checkpoint_id: str
    opens: bool


@dataclass(frozen=True, slots=True)
class LoadContribution:
    """What a rank sends to plan a load. ``check`` is None where a user's planner decides what fits.

    ``carried``, of rank 0 alone: its (planner, reader), None where they stay.
    """

    plan: LoadPlan
    check: TemplateCheck | None
    strict: bool | str
    per_rank_problems: tuple[str, ...] = ()
    carried: Carried | tuple[LoadPlanner, StorageReader] | None = None


class SaveSession(Session):
    """plan: local plans to final plans. write: write results to the committed ``Metadata``.

    With what stays on rank 0, "global plan" follows the one and "commit" the other.
    """

    first_phase: ClassVar[str] = "plan"

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._writer: StorageWriter | None = None
        self._reports_results = True
        self._metadata: Metadata | None = None
        self._planned: set[MetadataIndex] = set()

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        steps: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
            "plan": self._plan,
            "global plan": self._planned_on_rank_zero,
            "write": self._write,
            "commit": lambda parts: [parts[0]] * len(parts),
        }
        return steps[phase](contributions)

    @property
    def may_have_committed(self) -> bool:
        return isinstance(self._writer, StoreWriter) and self._writer.may_have_committed

    def give_up(self) -> None:
        if isinstance(self._writer, StoreWriter):
            self._writer.give_up()

    def next_phase(self, phase: str) -> str | None:
        stays = self._writer is None
        following = {"plan": "global plan" if stays else "write", "global plan": "write"}
        return following.get(phase, "commit" if stays and phase == "write" else None)

    def _plan(self, contributions: Sequence[SaveContribution]) -> Sequence[SavePlan | OnRankZero]:
        self.checkpoint_id = _one_checkpoint_id([part.checkpoint_id for part in contributions])
        local_plans = [part.plan for part in contributions]
        require_agreeing_plans(local_plans)
        carried = contributions[0].carried
        self._reports_results = contributions[0].reports_results
        if carried is None:
            return _for_rank_zero(local_plans)
        planner, self._writer = carried.unpack() if isinstance(carried, Carried) else carried
        reached(Point.GLOBAL_PLAN)
        planned = plan_globally(planner, self._writer, local_plans)
        self.attempt = self._writer.attempt if isinstance(self._writer, StoreWriter) else None
        return self._accept(*planned)

    def _planned_on_rank_zero(self, parts: Sequence[Any]) -> Sequence[SavePlan]:
        return self._accept(*parts[0])

    def _accept(self, plans: Sequence[SavePlan], metadata: Metadata) -> Sequence[SavePlan]:
        require_whole_tensors(metadata)
        self._metadata = metadata
        self._planned = {item.index for plan in plans for item in plan.items}
        return plans

    def _write(self, results: Sequence[list[WriteResult]]) -> Sequence[Metadata | OnRankZero]:
        assert self._metadata is not None
        self._require_all_written(results)
        if self._writer is None:
            return _for_rank_zero(results, self._metadata)
        self._writer.finish(self._metadata, list(results))
        return [self._metadata] * len(results)

    def _require_all_written(self, results: Sequence[list[WriteResult]]) -> None:
        """Count what came back: torch's own writer loses the errors of its helper threads.

        A user's writer that reports nothing at all keeps its own books and is believed.
        """
        written = {result.index for of_rank in results for result in of_rank}
        lacking = self._planned - written
        if lacking and (written or self._reports_results):
            raise StateDictError(
                f"{len(lacking)} of {len(self._planned)} planned items were never written; nothing was committed",
                sorted(f"{index.fqn} at {index.offset}" for index in lacking),
            )


class LoadSession(Session):
    """open: the checkpoint, once for all. plan: local plans to final plans, after all checks.

    read: every rank has all bytes. restore: every rank has put them where they belong.
    """

    first_phase: ClassVar[str] = "open"

    def __init__(self) -> None:
        self.checkpoint_id = ""
        self._stays_on_rank_zero = False
        self._unexpected: tuple[str, ...] = ()

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        steps: Mapping[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
            "open": self._open,
            "plan": self._plan,
            "global plan": lambda parts: self._accept(parts[0]),
            "read": lambda parts: [None] * len(parts),
            "restore": lambda parts: [None] * len(parts),
        }
        return steps[phase](contributions)

    def next_phase(self, phase: str) -> str | None:
        after_plan = "global plan" if self._stays_on_rank_zero else "read"
        return {"open": "plan", "plan": after_plan, "global plan": "read", "read": "restore"}.get(phase)

    def _open(self, contributions: Sequence[OpenContribution]) -> Sequence[OpenedCheckpoint | None]:
        self.checkpoint_id = _one_checkpoint_id([part.checkpoint_id for part in contributions])
        opened = open_checkpoint(self.checkpoint_id) if contributions[0].opens else None
        return [opened] * len(contributions)

    def _plan(self, contributions: Sequence[LoadContribution]) -> Sequence[Any]:
        reached(Point.LOAD_PLAN)
        self._unexpected = _unexpected_everywhere(contributions)
        _require_fitting_templates(contributions, self._unexpected)
        local_plans = [part.plan for part in contributions]
        carried = contributions[0].carried
        self._stays_on_rank_zero = carried is None
        if carried is None:
            return _for_rank_zero(local_plans)
        planner, reader = carried.unpack() if isinstance(carried, Carried) else carried
        return self._accept(plan_load_globally(planner, reader, local_plans))

    def _accept(self, plans: Sequence[LoadPlan]) -> Sequence[tuple[LoadPlan, tuple[str, ...]]]:
        """Final plans, and to every rank the names that no rank's template has."""
        return [(plan, self._unexpected) for plan in plans]


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """How this rank's load of a step ended: ``damaged`` where stored bytes were not what was written."""

    step: int
    damaged: bool


@dataclass(frozen=True, slots=True)
class NewestContribution:
    """What a rank sends to look up a step. ``failed`` where it is to take the place of one that did not load."""

    root: str
    failed: FailedLoad | None = None


class NewestSession(Session):
    """choose: the newest committed checkpoint under a root, looked up once for all ranks; None when there is none.

    After a failed load it is an older one, for all ranks or for none, although each may have seen another reason: it is
    worth going on where the bytes were bad for any of them.
    """

    first_phase: ClassVar[str] = "choose"

    def __init__(self) -> None:
        self.checkpoint_id = ""

    def step(self, phase: str, contributions: Sequence[NewestContribution]) -> Sequence[CheckpointInfo | None]:
        self.checkpoint_id = _one_checkpoint_id([part.root for part in contributions])
        return [self._choose([part.failed for part in contributions])] * len(contributions)

    def _choose(self, failed: Sequence[FailedLoad | None]) -> CheckpointInfo | None:
        steps = {load.step if load is not None else None for load in failed}
        if len(steps) > 1:
            raise StateDictError(f"ranks look for different steps: {failed}")
        hopeless = failed[0] is not None and not any(load is not None and load.damaged for load in failed)
        return None if hopeless else latest_checkpoint(self.checkpoint_id, before=steps.pop())

    def next_phase(self, phase: str) -> str | None:
        return None


class BarrierSession(Session):
    """arrive: all ranks are here."""

    first_phase: ClassVar[str] = "arrive"
    checkpoint_id = ""

    def step(self, phase: str, contributions: Sequence[Any]) -> Sequence[Any]:
        return [None] * len(contributions)

    def next_phase(self, phase: str) -> str | None:
        return None


SESSIONS: Mapping[str, Callable[[], Session]] = {
    "save": SaveSession,
    "load": LoadSession,
    "newest": NewestSession,
    "barrier": BarrierSession,
}


def plan_globally(
    planner: SavePlanner, writer: StorageWriter, local_plans: Sequence[SavePlan]
) -> tuple[Sequence[SavePlan], Metadata]:
    """A save's global step, wherever planner and writer are."""
    plans, metadata = planner.create_global_plan(list(local_plans))
    return writer.prepare_global_plan(plans), metadata


def plan_load_globally(
    planner: LoadPlanner, reader: StorageReader, local_plans: Sequence[LoadPlan]
) -> Sequence[LoadPlan]:
    """A load's global step, wherever planner and reader are."""
    return reader.prepare_global_plan(planner.create_global_plan(list(local_plans)))


def _for_rank_zero(parts: Sequence[Any], metadata: Metadata | None = None) -> Sequence[OnRankZero]:
    return [OnRankZero(parts, metadata), *[OnRankZero(None)] * (len(parts) - 1)]


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
