"""Several ranks in one process: threads that talk to a plain ``Coordinator``, as actors do through Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.api import absolute
from ray_dcp.planning.template.stored_names import NameChoice
from ray_dcp.protocol.call import Call
from ray_dcp.protocol.coordinator.coordinator import Coordinator
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.exception import RankFailure
from ray_dcp.protocol.messages import CallId
from ray_dcp.protocol.rank.background import BackgroundSaves
from ray_dcp.protocol.rank.load import LoadRequest, load
from ray_dcp.protocol.rank.remote_call import Deputies, RemoteCall
from ray_dcp.protocol.rank.report import LoadReport
from ray_dcp.protocol.rank.save import SaveRequest, save
from ray_dcp.protocol.steps import default_load_planner, default_save_planner, load_steps, save_steps
from ray_dcp.reads.reader import StoreReader
from ray_dcp.settings import DEFAULT_REPLICA_CHECK, Limits, ReplicaCheck
from ray_dcp.write.writer import StoreWriter
from tests.slack import within


class _ThreadLink:
    """A thread's way to a coordinator in the same process, which another one may take the place of."""

    def __init__(
        self, ranks: ThreadRanks, call_id: CallId, rank: int, in_flight: Callable[[], tuple[int, ...]]
    ) -> None:
        self._ranks = ranks
        self._in_flight = in_flight
        self._call_id = replace(call_id, behind=in_flight())
        self._rank = rank

    def send(self, phase: str, message: bytes) -> bytes:
        answer = self._ranks.coordinator.contribute(self._call_id, self._rank, phase, message)
        self._ranks.waiting.add(self._rank)
        try:
            return answer.result(timeout=within(30))
        finally:
            self._ranks.waiting.discard(self._rank)

    def tell(self, failure: RankFailure) -> None:
        self._ranks.coordinator.fail(self._call_id, self._rank, failure)

    def reconnect(self) -> None:
        """The coordinator of the moment is always in reach."""
        self._call_id = replace(self._call_id, behind=self._in_flight())


class ThreadRanks:
    """``world_size`` ranks of one generation of a group."""

    def __init__(
        self,
        world_size: int,
        *,
        coordinator: Coordinator | None = None,
        limits: Limits | None = None,
        tag: str = "member",
        deputies: Deputies | None = None,
    ) -> None:
        self.world_size = world_size
        self._deputies = deputies
        self.coordinator = coordinator or Coordinator("threads")
        joins = [
            self.coordinator.join(JoinRequest(r, world_size, f"{tag}-{r}", limits=limits or Limits()))
            for r in range(world_size)
        ]
        self.generation = joins[0].result(timeout=0)
        self._num_calls = [0] * world_size
        self.calls: list[RemoteCall] = []
        """All that there ever were."""
        self.waiting: set[int] = set()
        """The ranks that have sent a part and wait for its answer."""

    def call(
        self,
        rank: int,
        kind: str,
        checkpoint_id: str = "",
        *,
        background: BackgroundSaves | None = None,
        deputies: Deputies | None = None,
    ) -> RemoteCall:
        """A rank's end of its next call, behind what goes on in ``background``."""
        call_id = CallId.named(self.generation, self._num_calls[rank], kind, checkpoint_id)
        self._num_calls[rank] += 1

        def in_flight() -> tuple[int, ...]:
            return () if background is None else background.numbers_in_flight(call_id.number)

        call = RemoteCall(
            rank=rank,
            world_size=self.world_size,
            kind=kind,
            checkpoint_id=checkpoint_id,
            link=_ThreadLink(self, call_id, rank, in_flight),
            call_id=call_id,
            deputies=deputies or self._deputies,
        )
        self.calls.append(call)
        return call

    def run(self, on_rank: Callable[[int], Any]) -> list[Any]:
        """What ``on_rank`` returns or raises on every rank, all at once, in rank order."""
        with ThreadPoolExecutor(self.world_size) as threads:
            futures = [threads.submit(on_rank, rank) for rank in range(self.world_size)]
            return [future.exception(timeout=within(60)) or future.result() for future in futures]

    def save(self, state_of: Callable[[int], dict[str, Any]], checkpoint_id: Any, **options: Any) -> list[Any]:
        """Save ``state_of(rank)`` on every rank; ``Metadata`` or error of each."""
        return self.run(lambda rank: self.save_rank(rank, state_of(rank), checkpoint_id, **options))

    def save_rank(
        self,
        rank: int,
        state: dict[str, Any],
        checkpoint_id: Any,
        *,
        planner: Any = None,
        writer: Any = None,
        replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK,
    ) -> Metadata:
        location = absolute(checkpoint_id)
        call = self.call(rank, "save", location)
        return save(save_request(state, location, call, planner, writer, replica_check), call)

    def load(self, templates: list[dict[str, Any]], checkpoint_id: Any, **options: Any) -> list[Any]:
        """Load into each rank's template; ``LoadReport`` or error of each."""
        return self.run(lambda rank: self.load_rank(rank, templates[rank], checkpoint_id, **options))

    def load_rank(
        self,
        rank: int,
        template: dict[str, Any],
        checkpoint_id: Any,
        *,
        planner: Any = None,
        reader: Any = None,
        strict: Any = True,
        cast: bool = False,
        trusted: bool = False,
        **choice: Any,
    ) -> LoadReport:
        location = absolute(checkpoint_id)
        chosen = NameChoice(**choice)
        load_planner = default_load_planner(planner, cast=cast, trusted=trusted, checkpoint_id=location, choice=chosen)
        call = self.call(rank, "load", location)
        reader = reader or StoreReader(location, trusted=trusted)
        steps = load_steps(load_planner, reader, call, trusted=trusted, checkpoint_id=location, share_reads=True)
        return load(LoadRequest(template, location, steps, strict, chosen), call)


def save_request(
    state: dict[str, Any],
    location: str,
    call: Call,
    planner: Any = None,
    writer: Any = None,
    replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK,
) -> SaveRequest:
    """What ``dcp.save`` asks of a rank in ``call``."""
    steps = save_steps(default_save_planner(planner), writer or StoreWriter(location), call)
    return SaveRequest(state, location, steps, replica_check)


class ThreadGroup:
    """What ``save``, ``async_save`` and ``load`` ask of a ``RankGroup``, for one of ``ThreadRanks``."""

    def __init__(self, ranks: ThreadRanks, rank: int, deputies: Deputies | None = None) -> None:
        self.rank, self.world_size = rank, ranks.world_size
        self.name, self.generation = "threads", ranks.generation
        self.background = BackgroundSaves()
        self._ranks = ranks
        self._deputies = deputies

    def start_call(self, kind: str, checkpoint_id: str = "") -> RemoteCall:
        return self._ranks.call(self.rank, kind, checkpoint_id, background=self.background, deputies=self._deputies)


def require_no_errors(outcomes: list[Any]) -> list[Any]:
    """``outcomes`` again; raises the first that is an error."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
