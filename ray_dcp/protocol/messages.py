"""What travels between ranks and coordinator: every phase of a call, what each rank sends in it, what each rank gets.

A rank sends its *part* of a phase and gets its *answer* when all parts are there (``Exchange``). An answer may ask the
rank for one part more before the real one comes (``Asked``). All of them are plain pickled values; a user's planner,
writer or reader travels without its tensors (``carry``).
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import cloudpickle
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ray_dcp.errors import CoordinatorLostError, GroupError, RayDcpError
from ray_dcp.format.manifest import DifferingReplicas
from ray_dcp.pace.interval import Figures, Interval
from ray_dcp.planning.node_sharing import NodeShare, ShareOffer
from ray_dcp.planning.save_plan.plan_table import Key, PlanTable
from ray_dcp.planning.save_plan.replicas import ShownReplicas
from ray_dcp.planning.template.comparison import TemplateCheck
from ray_dcp.planning.values.containers import Containers
from ray_dcp.protocol.deputy import SealedPart, Told
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.protocol.memory_steps import KeptInMemory, Newest, StepInMemory
from ray_dcp.reads.checkpoint import FromMemory, OpenedCheckpoint
from ray_dcp.settings import DEFAULT_REPLICA_CHECK, Phase, ReplicaCheck
from ray_dcp.wording import first_line_of
from ray_dcp.write.results import WrittenColumns

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallId:
    """One save, load or barrier of one rank. The coordinator finds out to which of the other ranks' it belongs."""

    generation: int
    number: int
    """How many calls this rank had made before in this generation."""
    kind: str
    checkpoint_id: str = ""
    """The place, as all ranks name it; empty where there is no place, or where the ranks may name it differently."""
    behind: tuple[int, ...] = field(default=(), compare=False)
    """The numbers of this rank's saves that go on behind the call while it sends its plan."""

    @classmethod
    def named(cls, generation: int, number: int, kind: str, checkpoint_id: str) -> CallId:
        """A call's id, with ``checkpoint_id`` only if that is a place: else it may be a mistake of one rank alone."""
        is_place = "://" in checkpoint_id or os.path.isabs(checkpoint_id)
        return cls(generation, number, kind, checkpoint_id if is_place else "")


# Plug-ins that travel.


class Carries(Protocol):
    """A planner and a writer or reader, on their way to the coordinator's half of a call."""

    def unpack(self) -> Any:
        """The two objects."""
        ...


@dataclass(frozen=True, slots=True)
class Carried:
    """Planner and writer, or reader, on their way to the coordinator's process."""

    pickled: bytes

    def unpack(self) -> Any:
        return pickle.loads(self.pickled)


@dataclass(frozen=True, slots=True)
class CarriedInPlace:
    """Planner and writer, or reader, themselves, where the coordinator's half runs in this process."""

    objects: tuple[Any, ...]

    def unpack(self) -> Any:
        return self.objects


# What asks for more.


class Asked:
    """An answer that asks every rank for one part more: a step that the coordinator cannot do, or waits for."""

    __slots__ = ()
    done_in: ClassVar[Phase]
    """The phase that an error in the making of that part names."""
    sent_in: ClassVar[Exchange[Any, Any]]


@dataclass(frozen=True, slots=True)
class PlanSaveHere(Asked):
    """Rank 0 is to make the global plan of a save; the others get None and send None."""

    done_in: ClassVar[Phase] = Phase.PLAN
    plans: Sequence[SavePlan] | None
    lowest_rank: bool = False
    """Whether the lowest rank is to write all that several ranks have, since their values differ."""


@dataclass(frozen=True, slots=True)
class CommitHere(Asked):
    """Rank 0 is to commit a save; the others get None and send None."""

    done_in: ClassVar[Phase] = Phase.COMMIT
    results: Sequence[Results] | None
    metadata: Metadata | None


@dataclass(frozen=True, slots=True)
class SendPlan(Asked):
    """A load's plans were kept back, and rank 0's planner or reader wants to see them: each rank sends its own."""

    done_in: ClassVar[Phase] = Phase.PLAN


@dataclass(frozen=True, slots=True)
class PlanLoadHere(Asked):
    """Rank 0 is to make the global plan of a load; the others get None and send None."""

    done_in: ClassVar[Phase] = Phase.PLAN
    plans: Sequence[LoadPlan] | None


# A save.


@dataclass(frozen=True, slots=True)
class Busy:
    """What a rank says which has as many saves in flight as there may be, and does not want to wait."""

    max_in_flight: int
    raises: bool
    """Whether the save is to fail; else it is to be skipped."""


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """The answer to a plan where ranks were busy: nothing is saved, on no rank, and the call is over."""

    max_in_flight: int
    busy_ranks: tuple[int, ...]
    unkept: str = ""
    """Why a save in memory cannot be kept there, where it is that."""


@dataclass(frozen=True, slots=True)
class SavePart:
    """What a rank sends to plan a save. ``carried``, of rank 0 alone: its planner and writer, None where they stay."""

    checkpoint_id: str
    plan: SavePlan | PlanTable
    carried: Carries | None = None
    reports_results: bool = True
    """False for a user's writer, which may keep books of its own."""
    replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK
    replica_digests: array[int] | None = None
    """A digest for each item of the plan; None where there is nothing to compare."""
    containers: Containers = ()
    """The containers of this rank's state dict."""
    figures: Figures | None = None
    """What this rank has measured of steps and saves, where the step is a ``CheckpointManager``'s."""
    busy: Busy | None = None
    """What keeps this rank from another save, if anything does."""
    in_memory: bool = False
    """Whether it is kept in memory alone."""
    unkept: str = ""
    """Why this rank can keep nothing there, if that is so."""

    def dcp_plan(self) -> SavePlan:
        """The plan as any planner takes it."""
        return self.plan.plan() if isinstance(self.plan, PlanTable) else self.plan


@dataclass(frozen=True, slots=True)
class FinalTable:
    """A rank's final plan: the positions that it keeps of its local plan's items (None: all), and where it writes."""

    kept: Sequence[int] | None
    storage_data: Any

    def plan(self, local: SavePlan) -> SavePlan:
        items = local.items if self.kept is None else [local.items[position] for position in self.kept]
        return replace(local, items=items, storage_data=self.storage_data)


@dataclass(frozen=True, slots=True)
class ShowReplicas:
    """The answer to a plan where ranks hold different values, and which of this rank's to send with its results."""

    answer: FinalTable | SavePlan
    keys: Collection[Key]


@dataclass(frozen=True, slots=True)
class Paced:
    """The answer to a plan, and the interval to the next save that all ranks' figures give."""

    answer: FinalTable | SavePlan | ShowReplicas
    interval: Interval


@dataclass(frozen=True, slots=True)
class ResultsWithReplicas:
    """A rank's write results, and the values that it was to show."""

    results: Results
    shown: ShownReplicas


@dataclass(frozen=True, slots=True)
class CommittedWithReplicas:
    """Rank 0's last answer, and which values differed, for the warning."""

    metadata: Metadata
    differing: Sequence[DifferingReplicas]


def unsealed(part: Results | ResultsWithReplicas | SealedPart) -> Results | ResultsWithReplicas:
    """``part`` with its checksums where they belong; one that did not come apart as it is."""
    if not isinstance(part, SealedPart):
        return part
    blank, crcs = cast("WrittenColumns | ResultsWithReplicas", decode(part.prepared)), array("I", part.crcs)
    if isinstance(blank, ResultsWithReplicas):
        return replace(blank, results=cast(WrittenColumns, blank.results).with_crcs(crcs))
    return blank.with_crcs(crcs)


GlobalSavePlan = tuple[Sequence[SavePlan], Metadata]
"""What a planner's and a writer's global steps make of all plans, in rank order."""
Results = WrittenColumns | Sequence[WriteResult] | None
"""What a rank has written: by columns where planner and writer are ray_dcp's, None where that is nothing."""


# A load.


@dataclass(frozen=True, slots=True)
class OpenPart:
    """What a rank sends to open a checkpoint: ``opens`` is False where a user's reader reads the metadata."""

    checkpoint_id: str
    opens: bool
    from_memory: FromMemory | None = None


class NoGlobalStep:
    """Stands for a planner and a reader whose global step is torch's default: each rank's plan stays as it is."""


NO_GLOBAL_STEP = NoGlobalStep()


@dataclass(frozen=True, slots=True)
class LoadPart:
    """What a rank sends to plan a load. ``check`` is None where a user's planner decides what fits.

    ``plan`` is None where this rank's planner and reader have no global step: it may be large. ``carried``, of rank 0
    alone: its planner and reader, None where they stay.
    """

    plan: LoadPlan | None
    check: TemplateCheck | None
    strict: bool | str
    per_rank_problems: tuple[str, ...] = ()
    carried: Carries | NoGlobalStep | None = None
    offer: ShareOffer | None = None
    """What ranks of its node could read for this one."""


LoadAnswer = tuple[LoadPlan | None, tuple[str, ...], NodeShare | None]
"""The final plan (None: the rank's own), the names that no rank's template has, and what its node shares. A tuple, as
it goes to each of many ranks and mostly says nothing."""


# The newest step.


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """How this rank's load of a step ended: ``damaged`` where stored bytes were not what was written."""

    step: int
    damaged: bool
    from_memory: bool = False


@dataclass(frozen=True, slots=True)
class NewestPart:
    """What a rank sends to look up a step; ``failed`` is the load whose step that is to take the place of, if any."""

    root: str
    failed: FailedLoad | None = None
    in_memory: Sequence[StepInMemory] = ()


# The exchanges there are.

Message = (
    SavePart
    | Asked
    | GlobalSavePlan
    | SavePlan
    | FinalTable
    | ShowReplicas
    | Paced
    | SaveSkipped
    | Results
    | ResultsWithReplicas
    | SealedPart
    | Metadata
    | CommittedWithReplicas
    | OpenPart
    | OpenedCheckpoint
    | LoadPart
    | LoadPlan
    | Sequence[LoadPlan]
    | LoadAnswer
    | NewestPart
    | Newest
    | KeptInMemory
    | bool
    | None
)
"""All that travels within a call."""
PartT = TypeVar("PartT", bound=Message)
AnswerT = TypeVar("AnswerT", bound=Message)


class Exchange(Generic[PartT, AnswerT]):
    """A phase in which every rank sends a ``PartT`` and gets an ``AnswerT``, or first something that is ``Asked``."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase

    def parts(self, messages: Sequence[Message]) -> Sequence[PartT]:
        """``messages`` of this phase, with their type."""
        return cast(Sequence[PartT], messages)

    def answer(self, message: Message) -> AnswerT:
        """``message`` of this phase, with its type."""
        return cast(AnswerT, message)


PLAN_SAVE = Exchange[SavePart, FinalTable | SavePlan | ShowReplicas | Paced | SaveSkipped](Phase.PLAN)
PLAN_WARM_UP = Exchange[SavePart, FinalTable | None](Phase.PLAN)
PLAN_SAVE_HERE = Exchange[GlobalSavePlan | None, SavePlan | ShowReplicas | Paced](Phase.GLOBAL_PLAN)
WRITE = Exchange[Results | ResultsWithReplicas | SealedPart, Metadata | CommittedWithReplicas | KeptInMemory](
    Phase.WRITE
)
COMMIT = Exchange[Metadata | None, Metadata | CommittedWithReplicas](Phase.COMMIT)

OPEN = Exchange[OpenPart, OpenedCheckpoint | None](Phase.OPEN)
PLAN_LOAD = Exchange[LoadPart, LoadAnswer](Phase.PLAN)
SEND_PLAN = Exchange[LoadPlan, LoadAnswer](Phase.PLANS)
PLAN_LOAD_HERE = Exchange[Sequence[LoadPlan] | None, LoadAnswer](Phase.GLOBAL_PLAN)
READ = Exchange[bool, bool](Phase.READ)
"""The part: whether something may fail when this rank restores. The answer: whether it may on any rank."""
RESTORE = Exchange[None, None](Phase.RESTORE)

CHOOSE = Exchange[NewestPart, Newest](Phase.CHOOSE)
ARRIVE = Exchange[None, None](Phase.ARRIVE)

PlanSaveHere.sent_in = PLAN_SAVE_HERE
CommitHere.sent_in = COMMIT
SendPlan.sent_in = SEND_PLAN
PlanLoadHere.sent_in = PLAN_LOAD_HERE


# As bytes.


def encode(message: Message) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(content: bytes) -> Message:
    """Undo ``encode``. Messages come from this run's own processes, never from files."""
    return cast(Message, pickle.loads(content))


def decode_call_id(content: bytes) -> CallId:
    """A ``CallId`` that somebody has passed on who cannot read it."""
    return cast(CallId, pickle.loads(content))


def told_to_deputy(ask: Callable[[], bytes | CheckpointException | None]) -> Told:
    """What ``ask`` returns or raises, for a deputy: a failure goes on to its rank as it is, which may look into it.

    What is refused to the deputy alone, the rank is to try by itself.
    """
    answer: bytes | RayDcpError | None
    try:
        answer = ask()
    except RayDcpError as error:
        answer = error
    if isinstance(answer, RayDcpError):
        lost = isinstance(answer, CoordinatorLostError)
        refused = isinstance(answer, GroupError) and not lost
        return Told(failure=pickle.dumps(answer), text=first_line_of(answer), coordinator_lost=lost, taken_back=refused)
    return Told(answer=answer or b"")


def carry(*user_objects: Any) -> Carried | None:
    """Pickle planners, writers or readers, by value where the coordinator could not import their class.

    Tensors that they hold (a reused planner holds a whole state dict) arrive as meta tensors: planning needs shapes,
    never bytes. None when one of them cannot be pickled: it holds a lock, an open file, a process group.
    """
    buffer = io.BytesIO()
    try:
        _TensorlessPickler(buffer).dump(user_objects)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything; it then stays where it is
        logger.info("%s stay on rank 0: %s", ", ".join(type(item).__name__ for item in user_objects), error)
        return None
    return Carried(buffer.getvalue())


class _TensorlessPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _meta_tensor, (tuple(obj.shape), obj.dtype)
        return super().reducer_override(obj)


def _meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
