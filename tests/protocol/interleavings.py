"""Ranks, coordinators and a store in one process, of which one at a time goes one step further when told to.

A *fiber* is a thread that runs only between two of its pauses, while everybody else stands still: so a schedule is a
list of choices, and the same choices are the same run. The fibers are the real halves (``save``, ``load`` over a
``RemoteCall``; the step that a ``Coordinator`` hands to ``execute``). They pause before a message leaves, until its
answer is there, at every ``Point``, and before and after each operation of the store. At each pause a fiber can be made
to fail, or its process be killed: nothing that it does afterwards has any effect. The threads in which a rank reads are
fibers too (``ReadingPool``).

What must never happen is looked for where it would happen (``World.wrong``), and told after the step.
"""

from __future__ import annotations

import itertools
import pickle
import posixpath
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp import LocalShards
from ray_dcp.errors import (
    CoordinatorLostError,
    GroupError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StaleGenerationError,
    StoreError,
)
from ray_dcp.format.names import METADATA, is_newer, parse_shard_file, shard_files_named_in
from ray_dcp.progress import advance
from ray_dcp.protocol.call import Call, agree, phase
from ray_dcp.protocol.coordinator.coordinator import Coordinator, CoordinatorRecord
from ray_dcp.protocol.coordinator.membership import JoinRequest
from ray_dcp.protocol.coordinator.open_call import OpenCall
from ray_dcp.protocol.deputy import DeputyCall, SealedPart, Told
from ray_dcp.protocol.exception import COORDINATOR, CheckpointException, RankFailure
from ray_dcp.protocol.messages import ARRIVE, WRITE, Busy, CallId, SaveSkipped, decode, encode, told_to_deputy
from ray_dcp.protocol.rank.async_save import stage_save
from ray_dcp.protocol.rank.load import LoadRequest, load
from ray_dcp.protocol.rank.remote_call import RemoteCall
from ray_dcp.protocol.rank.save import SaveRequest, plan_save, write_save
from ray_dcp.protocol.solo import SoloCall
from ray_dcp.protocol.steps import SaveSteps, default_load_planner, load_steps
from ray_dcp.reads.reader import StoreReader
from ray_dcp.settings import Limits, Phase
from ray_dcp.staging.buffer_errors import SaveSkippedError
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.store import parallel
from ray_dcp.store.open import register_scheme
from ray_dcp.store.store import ObjectWriter, StoredObject
from ray_dcp.trace_points import Point, reached
from ray_dcp.write.results import WrittenColumns
from tests.ranks import save_request

STALL_S = 5
ARRIVAL_S = 12
LIMITS = Limits(stall_timeout_s=STALL_S, arrival_timeout_s=ARRIVAL_S)
EPOCH_S = 1_000_000_000
INJECTED = "made to fail"
EXPECTED_ERRORS = {
    "CheckpointNotFoundError",
    "CoordinatorLostError",
    "GroupError",
    "OutOfStepError",
    "RankAbsentError",
    "RankLostError",
    "RuntimeError",
    "StaleGenerationError",
    "StalledError",
    "StoreError",
    "SupersededError",
}
"""What a save or load may fail with when ranks and stores fail: all else is a bug."""
HANDED_OVER = "handed over"
SKIPPED = "skipped"
MAX_IN_FLIGHT = 3
SHAPE = (5, 2)
_worlds: dict[str, World] = {}
_names = itertools.count()


class Killed(BaseException):
    """The process of this fiber is gone."""


class Fiber:
    """See the module. ``run`` from outside; ``pause`` from inside."""

    current: ClassVar[Fiber | None] = None
    undisturbed: ClassVar[bool] = False
    """Whether fibers go on until they wait for others, without a pause between, save at ``stops_at``."""
    stops_at: ClassVar[str | None] = None

    def __init__(self, name: str, group: Group, body: Callable[[], None]) -> None:
        self.name = name
        self.group = group
        self.place = "start"
        self.epoch: int | None = None
        """Of the coordinator whose step this is."""
        self.helpers: list[ReadingFiber] = []
        """What its process does for it in other threads."""
        self.done = False
        self.dead = False
        self.atomic = False
        self._body = body
        self._ready: Callable[[], bool] = lambda: True
        self._thrown: BaseException | None = None
        self._go, self._back = threading.Lock(), threading.Lock()  # each is held, and released for the other side
        self._go.acquire()
        self._back.acquire()
        self._thread: threading.Thread | None = None

    @property
    def runnable(self) -> bool:
        return not self.done and self._ready()

    def run(self, thrown: BaseException | None = None) -> None:
        """To its next pause, or its end; ``thrown`` is raised where it pauses now."""
        assert not self.done
        self._thrown = thrown
        Fiber.current = self
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        Fiber.current = None
        if self.done:
            self._thread.join()

    def kill(self) -> None:
        for helper in self.helpers:
            helper.kill()
        self.dead = True
        if self._thread is None:
            self.done = True
        elif not self.done:
            self.run()

    def pause(self, place: str, ready: Callable[[], bool] = lambda: True) -> None:
        if self.dead:
            raise Killed
        goes_past = Fiber.stops_at is None or not place.startswith(Fiber.stops_at)
        if self.atomic or (Fiber.undisturbed and goes_past and ready()):
            return
        self.place, self._ready = place, ready
        self._back.release()
        self._go.acquire()
        thrown, self._thrown = self._thrown, None
        if self.dead:
            raise Killed
        if thrown is not None:
            raise thrown

    def failure_here(self) -> BaseException | None:
        """What may be raised where this fiber pauses."""
        what = self.place.split()[0]
        if what == "point":
            return RuntimeError(INJECTED)
        if what == "store":
            return StoreError(INJECTED, url=self.place)
        if what == "answer":
            return CoordinatorLostError("the answer got lost", group=self.group.name)
        return None

    def _main(self) -> None:
        try:
            self._body()
        except Killed:
            pass
        except BaseException as error:
            self.group.world.wrong(f"{self.name} ended with {error!r}")
        finally:
            self.done = True
            self._back.release()


class ReadingFiber(Fiber):
    """One read, in a thread of the pool of ``owner``, with no more than ``at_once`` others."""

    def __init__(self, owner: Fiber, read: Callable[[], Any], at_once: int) -> None:
        super().__init__(f"{owner.name}, reading", owner.group, self._read_into_future)
        self.owner = owner
        self.future: Future[Any] = Future()
        self._read = read
        self._started = False
        self._ready = lambda: sum(one._started and not one.done for one in owner.helpers) < at_once

    def _read_into_future(self) -> None:
        self._started = True
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._read())
        except BaseException as error:
            self.future.set_exception(error)


class ReadingPool:
    """As a ``ThreadPoolExecutor``, but that its threads are fibers; out of all fibers each read is done at once."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "") -> None:
        self._owner = Fiber.current
        self._max_workers = max_workers

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._owner is None:
            future: Future[Any] = Future()
            future.set_result(function(*args))
            return future
        fiber = ReadingFiber(self._owner, lambda: function(*args), self._max_workers)
        self._owner.helpers = [one for one in self._owner.helpers if not one.done] + [fiber]
        return fiber.future

    def __enter__(self) -> ReadingPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owner is not None:
            helpers = self._owner.helpers
            self._owner.pause("wait for all reads", ready=lambda: all(one.done for one in helpers))


def wait_for_some(futures: Iterable[Future[Any]], return_when: str) -> types.SimpleNamespace:
    """As ``concurrent.futures.wait`` for the first of them, in an order that is always the same."""
    waited_for = list(futures)
    if Fiber.current is not None:
        Fiber.current.pause("wait for reads", ready=lambda: any(one.done() for one in waited_for))
    return types.SimpleNamespace(done=[one for one in waited_for if one.done()])


@contextmanager
def reading_in_fibers() -> Iterator[None]:
    """Within the block what is read in several threads is read in fibers."""
    before = parallel.ThreadPoolExecutor, parallel.wait
    parallel.ThreadPoolExecutor, parallel.wait = ReadingPool, wait_for_some
    try:
        yield
    finally:
        parallel.ThreadPoolExecutor, parallel.wait = before


def pause_here(place: str) -> None:
    if Fiber.current is not None:
        Fiber.current.pause(place)


@contextmanager
def at_once() -> Iterator[None]:
    """Nobody else gets a turn within the block."""
    fiber = Fiber.current
    before = fiber is not None and fiber.atomic
    if fiber is not None:
        fiber.atomic = True
    try:
        yield
    finally:
        if fiber is not None:
            fiber.atomic = before


class World:
    """The store that everybody shares, what was ever committed in it, and what went wrong."""

    def __init__(self) -> None:
        self.name = f"world{next(_names)}"
        self.objects: dict[str, bytes] = {}
        self.problems: list[str] = []
        self.committed: dict[str, str] = {}
        """Checkpoint to the attempt that is committed now."""
        self.history: dict[str, list[str]] = {}
        self.tags: dict[str, int] = {}
        """Attempt to the values that it saves."""
        self.failed: dict[str, str] = {}
        """Attempts that a coordinator has called failed."""
        self.told_failed: dict[str, int] = {}
        """Attempts of which ranks were told that they have failed, and by which coordinator of theirs."""
        self.committed_unseen: set[str] = set()
        """Attempts that a coordinator has committed when another one had taken its place already."""
        self.unchecked: dict[str, None] = {}
        self.now_s = 0.0
        self._files: dict[str, dict[str, bytes]] = {}
        self._ticks = itertools.count(1)
        _worlds[self.name] = self

    def close(self) -> None:
        del _worlds[self.name]

    def url(self, checkpoint: str = "") -> str:
        return f"world://{self.name}/{checkpoint}".rstrip("/")

    def wrong(self, problem: str) -> None:
        self.problems.append(problem)

    def time_ns(self) -> int:
        """Ranks' clocks disagree."""
        skew_ns = Fiber.current.group.skew_ns if Fiber.current is not None else 0
        return EPOCH_S * 10**9 + next(self._ticks) + skew_ns

    def put(self, place: str, content: bytes) -> None:
        checkpoint, _, key = place.rpartition("/")
        if key == METADATA:
            self._commit(checkpoint, content)
        elif (shard := parse_shard_file(key)) is not None:
            self._note_shard(checkpoint, shard.attempt)
        self.objects[place] = content

    def _note_shard(self, checkpoint: str, attempt: str) -> None:
        fiber = Fiber.current
        assert isinstance(fiber, RankFiber | DeputyFiber)
        if self.tags.setdefault(attempt, fiber.op.tag) != fiber.op.tag:
            self.wrong(f"attempt {attempt} of {checkpoint} mixes the saves {self.tags[attempt]} and {fiber.op.tag}")

    def _commit(self, checkpoint: str, content: bytes) -> None:
        files = {f"{checkpoint}/{key}" for key in shard_files_named_in(content)}
        attempts = {parse_shard_file(posixpath.basename(file)).attempt for file in files}
        if len(attempts) != 1:
            self.wrong(f"{checkpoint} is committed with the files of {sorted(attempts)}")
            return
        (attempt,) = attempts
        before = self.committed.get(checkpoint)
        if before is not None and before != attempt and not is_newer(attempt, before):
            self.wrong(f"{checkpoint}: the older attempt {attempt} replaces the newer {before}")
        step = Fiber.current
        assert step is not None
        assert step.epoch is not None
        if before != attempt and step.epoch >= self.told_failed.get(attempt, step.epoch + 1):
            self.wrong(f"{checkpoint}: {attempt} is committed after its ranks were told that it has failed")
        if step.epoch < step.group.epoch:
            self.committed_unseen.add(attempt)
        if step.epoch == step.group.epoch and attempt in step.group.attempts_in_order[1:]:
            self.wrong(f"{checkpoint}: {attempt} is committed before {step.group.attempts_in_order[0]}")
        if missing := files - self.objects.keys():
            self.wrong(f"{checkpoint}: {attempt} is committed without {sorted(missing)}")
        self.committed[checkpoint] = attempt
        self.history.setdefault(checkpoint, []).append(attempt)
        self._files[checkpoint] = {file: self.objects.get(file, b"") for file in sorted(files)}
        self.unchecked[checkpoint] = None

    def check(self) -> None:
        """Everything that is committed is there, bit by bit, and no failed attempt is."""
        for checkpoint, attempt in self.committed.items():
            if f"{checkpoint}/{METADATA}" not in self.objects:
                self.wrong(f"{checkpoint} was committed and is gone")
            for file, content in self._files[checkpoint].items():
                if self.objects.get(file) is not content:
                    self.wrong(f"{file} of the committed attempt {attempt} of {checkpoint} is gone or changed")
            if attempt in self.failed:
                self.wrong(
                    f"attempt {attempt} of {checkpoint} is committed and called failed by {self.failed[attempt]}"
                )
        for checkpoint in self.unchecked:
            self.check_content(checkpoint)
        self.unchecked = {}
        if self.problems:
            raise AssertionError("\n".join(self.problems))

    def check_content(self, checkpoint: str) -> None:
        """Read it as a user does: it is the whole of what one save was to write."""
        found = template_of(0, 1)
        location = self.url(checkpoint.rpartition("/")[2])
        read_into(found, location, SoloCall("load", location))
        self.require_tag(found, self.tags[self.committed[checkpoint]], 0, 1, f"{checkpoint} as committed")

    def require_tag(self, found: dict[str, Any], tag: int, rank: int, world_size: int, what: str) -> None:
        wanted = state_of(tag, rank, world_size)
        same = found.get("python", wanted["python"]) == wanted["python"]
        same = same and torch.equal(found["copies"], wanted["copies"])
        for offsets, chunk in wanted["rows"].chunks.items():
            same = same and torch.equal(found["rows"].chunks[offsets], chunk)
        if not same:
            self.wrong(f"{what}: is not the whole of save {tag}: {found}")


def state_of(tag: int, rank: int, world_size: int) -> dict[str, Any]:
    """What rank ``rank`` holds at the save ``tag``: sharded rows, a replicated tensor, a Python value."""
    rows = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE) + 1000 * tag
    start, stop = (SHAPE[0] * one // world_size for one in (rank, rank + 1))
    return {
        "rows": LocalShards(SHAPE, {(start, 0): rows[start:stop].clone()}),
        "copies": torch.full((3,), float(tag)),
        "python": ("save", tag),
    }


def template_of(rank: int, world_size: int) -> dict[str, Any]:
    return state_of(-1, rank, world_size)


def read_into(template: dict[str, Any], location: str, call: Call) -> None:
    planner = default_load_planner(None, cast=False, trusted=False, checkpoint_id=location)
    steps = load_steps(planner, StoreReader(location), call, trusted=False, checkpoint_id=location, share_reads=True)
    load(LoadRequest(template, location, steps, True), call)


class SteppingStore:
    """The objects of a world. A put's last look and its effect are one step, as close as a backend can make them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._world_name, _, self._root = url.removeprefix("world://").partition("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return SteppingStore, (self.url,)

    @property
    def _world(self) -> World:
        return _worlds[self._world_name]

    def _place(self, key: str) -> str:
        return posixpath.normpath(f"/{self._root}/{key}")

    def put(self, key: str, content: bytes, *, last_look: Callable[[], None] | None = None) -> None:
        pause_here(f"store put {key}")
        with at_once():
            if last_look is not None:
                last_look()
            self._world.put(self._place(key), bytes(content))
        pause_here(f"store put {key}: done")

    def put_new(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self._put_new(key)

    @contextmanager
    def _put_new(self, key: str) -> Iterator[ObjectWriter]:
        fiber = Fiber.current
        if isinstance(fiber, RankFiber) and fiber.laying_out is not None:
            writer = _Writer()
            yield writer
            fiber.laying_out[key] = bytes(writer.buffer)
            return
        pause_here(f"store create {key}")
        writer = _Writer()
        yield writer
        pause_here(f"store close {key}")
        if self._place(key) in self._world.objects:
            raise StoreError("cannot create: File exists", url=self.url, key=key)
        self._world.put(self._place(key), bytes(writer.buffer))
        pause_here(f"store close {key}: done")

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        pause_here(f"store get {key}")
        content = self._world.objects.get(self._place(key))
        if content is None:
            raise ObjectNotFoundError("cannot read: No such file", url=self.url, key=key)
        advance(len(content))
        end = len(content) if nbytes is None else offset + nbytes
        if max(offset, end) > len(content):
            raise ObjectTooShortError(f"{len(content)} bytes are there", url=self.url, key=key)
        return content[offset:end]

    def has(self, key: str, content: bytes) -> bool:
        """Whether this object is there; one with other bytes must not be."""
        there = self._world.objects.get(self._place(key))
        if there is not None and there != content:
            self._world.wrong(f"{key} is there with other bytes than its rank has handed over")
        return there is not None

    def list(self, prefix: str = "") -> Sequence[StoredObject]:
        pause_here(f"store list {prefix}")
        root = self._place(prefix).rstrip("/") + "/"
        cut = len(self._place("").rstrip("/")) + 1
        return [
            StoredObject(place[cut:], len(content), float(EPOCH_S))
            for place, content in sorted(self._world.objects.items())
            if place.startswith(root)
        ]

    def list_folders(self, prefix: str = "") -> Sequence[str]:
        root = self._place(prefix).rstrip("/") + "/"
        below = [place[len(root) :] for place in self._world.objects if place.startswith(root)]
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def delete(self, key: str) -> None:
        pause_here(f"store delete {key}")
        self._world.objects.pop(self._place(key), None)


class _Writer:
    def __init__(self) -> None:
        self.buffer = bytearray()

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        view = memoryview(chunk).cast("B") if len(memoryview(chunk)) else memoryview(b"")
        self.buffer += view
        advance(len(view))
        return len(view)

    def tell(self) -> int:
        return len(self.buffer)


register_scheme("world", SteppingStore)


@dataclass(frozen=True)
class Op:
    """One call of a group: what all its ranks do."""

    kind: str
    checkpoint: str
    tag: int
    staged: bool | str
    """Whether it goes on in the background; ``HANDED_OVER``: an agent writes it; ``SKIPPED``: a rank is busy."""


@dataclass
class Process:
    """One rank of one generation, as it is and as its coordinator knows it."""

    request: JoinRequest
    joining: Future[int] | None = None
    generation: int | None = None
    alive: bool = True
    known_lost: bool = False
    num_calls: int = 0
    next_op: int = 0
    """How far it is in what its group is to do."""
    owed: Op | None = None
    """What it does next, having gone on to a later one before."""
    fibers: list[RankFiber] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.request.rank

    @property
    def busy(self) -> bool:
        return any(not fiber.done and not fiber.in_background for fiber in self.fibers)


@dataclass
class Wait:
    """A part at the coordinator, and whether its answer can still come."""

    call_id: CallId
    rank: int
    phase: str
    message: bytes
    epoch: int
    call: OpenCall | None
    future: Future[bytes]
    lost: bool = False


class RankFiber(Fiber):
    """One rank in one call."""

    def __init__(self, process: Process, op: Op, group: Group) -> None:
        assert process.generation is not None
        self.process = process
        self.op = op
        location = group.world.url(op.checkpoint) if op.checkpoint else ""
        self.call_id = CallId(process.generation, process.num_calls, op.kind, location)
        self.earlier = [fiber for fiber in process.fibers if not fiber.done]
        self.in_background = False
        self.has_handed_over = False
        self.laying_out: dict[str, bytes] | None = None
        """What it writes, while that goes to no store."""
        self.attempt: str | None = None
        self.looked_in_vain = False
        """Something failed where it asked the store what is committed."""
        self.epochs = {group.epoch}
        self.sending: tuple[str, bytes] | None = None
        self.sent_results = False
        self.waiting: Wait | None = None
        self.open_call: OpenCall | None = None
        self.outcome: Any = None
        self.call = RemoteCall(
            rank=process.rank,
            world_size=process.request.world_size,
            kind=op.kind,
            checkpoint_id=location,
            link=Link(self),
        )
        super().__init__(f"{process.request.member}, {op.kind} {self.call_id.number}", group, self._do)

    def _do(self) -> None:
        try:
            self.outcome = {"save": self._save, "load": self._load, "barrier": self._barrier}[self.op.kind]()
        except CheckpointException as error:
            self.outcome = error
            for failure in error.rank_failures:
                text = f"{failure.error_type}: {failure.message}"
                made_up = failure.error_type in ("GroupError", "RuntimeError", "StoreError")
                if failure.error_type not in EXPECTED_ERRORS or (made_up and not _is_ours(text)):
                    self.group.world.wrong(f"{self.name} failed with {error}")
            self._require_not_committed(error)

    def _require_not_committed(self, error: CheckpointException) -> None:
        """But for a failure of the commit itself, which may be one of its last word only."""
        by_coordinator = any(failure.rank == COORDINATOR for failure in error.rank_failures)
        world = self.group.world
        if (
            self.attempt is not None
            and not (error.phase == "commit" or by_coordinator or self.looked_in_vain)
            and world.committed.get(f"/{self.op.checkpoint}") == self.attempt
            and self.attempt not in world.committed_unseen
        ):
            world.wrong(f"{self.name} was told that it failed, but {self.attempt} is committed: {error}")

    def failure_here(self) -> BaseException | None:
        self.looked_in_vain |= self.op.kind == "save" and self.place.startswith("store get")
        return super().failure_here()

    def _settle(self) -> None:
        """A save or load waits for the saves before it, unless one is handed over and the only one.

        A save in the background lets some go on.
        """

        def may_go_on() -> bool:
            going_on = [fiber for fiber in self.earlier if not fiber.done]
            if self.op.kind == "save" and self.op.staged:
                return len(going_on) < MAX_IN_FLIGHT
            return not going_on or (len(going_on) == 1 and going_on[0].has_handed_over)

        with phase(self.call, Phase.COLLECT):
            self.pause("settle", ready=may_go_on)

    def _save(self) -> Metadata | str:
        self._settle()
        location = self.call.checkpoint_id
        state = state_of(self.op.tag, self.process.rank, self.process.request.world_size)
        request = save_request(state, location, self.call)
        if self.op.staged == SKIPPED:
            return self._skip(request)
        planned = plan_save(request, self.call)
        self.attempt = planned.final_plan.storage_data.attempt
        if self.op.staged:
            planned = stage_save(planned, self.call, BufferPool())
            self.in_background = True
        if self.op.staged == HANDED_OVER:
            metadata = self._in_other_hands(planned)
        else:
            metadata = write_save(planned, self.call, turn=self if self.op.staged else None)
        attempts = {parse_shard_file(info.relative_path).attempt for info in metadata.storage_data.values()}
        committed = self.group.world.history.get(f"/{self.op.checkpoint}", [])
        if len(attempts) != 1 or not attempts <= set(committed):
            self.group.world.wrong(f"{self.name} was told that {attempts} is committed, but only {committed} are")
        return metadata

    def wait_to_write(self) -> None:
        """As a ``Turn``: the earlier saves come first."""
        self.pause("settle", ready=lambda: all(fiber.done for fiber in self.earlier))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The numbers of the saves that go on behind this call."""
        return tuple(one.call_id.number for one in self.earlier if not one.done and one.in_background)

    def _skip(self, request: SaveRequest) -> str:
        busy = Busy(MAX_IN_FLIGHT, raises=False) if self.process.rank == self._busy_rank else None
        try:
            plan_save(replace(request, busy=busy), self.call)
        except SaveSkippedError as skipped:
            if skipped.busy_ranks != (self._busy_rank,):
                self.group.world.wrong(f"{self.name} is skipped for {skipped.busy_ranks}")
            return SKIPPED
        self.group.world.wrong(f"{self.name} is not skipped")
        return ""

    @property
    def _busy_rank(self) -> int:
        return self.op.tag % self.process.request.world_size

    def _in_other_hands(self, planned: SaveSteps) -> Metadata:
        """As ``write_save``, by an agent, or by this rank in its place where the agent is gone."""
        with phase(self.call, Phase.STAGE), at_once(), torch.no_grad():
            self.laying_out = files = {}
            results = planned.write()
            self.laying_out = None
        part = SealedPart(encode(results), b"") if isinstance(results, WrittenColumns) else results
        self.in_background = True
        self.pause("settle", ready=lambda: all(fiber.done or fiber.has_handed_over for fiber in self.earlier))
        job = self.group.agent_of(self.process).take(self, files, encode(part))
        try:
            self.pause("hand over", ready=lambda: job.announced or job.done or not job.agent.alive)
            self.has_handed_over = job.announced
            self.pause("agent", ready=lambda: job.done or not job.agent.alive)
            told = job.deputy.told
            if told is not None and not told.taken_back:
                committed = self.call.deputys_answer(WRITE, told)
            else:
                self.has_handed_over = False
                self.wait_to_write()
                self.call.take_back()
                with phase(self.call, Phase.WRITE):
                    write_files(self.call.checkpoint_id, files)
                    reached(Point.BEFORE_RESULT)
                committed = agree(self.call, WRITE, part, planned.asked)
        except CheckpointException:
            found = planned.committed_by_then() if self.call.started_over else None
            if found is None:
                raise
            committed = found
        return planned.end(committed)

    def _load(self) -> int:
        self._settle()
        world, rank, world_size = self.group.world, self.process.rank, self.process.request.world_size
        before = len(world.history.get(f"/{self.op.checkpoint}", [1])) - 1
        found = template_of(rank, world_size)
        # Python values on all ranks, on one alone, on none: by it the load has its last phase, or has not.
        if self.call_id.number % 3 == 2 or (self.call_id.number % 3 == 1 and rank > 0):
            del found["python"]
        read_into(found, self.call.checkpoint_id, self.call)
        tag = int(found["copies"][0])
        world.require_tag(found, tag, rank, world_size, self.name)
        # This rank may have come to the call when others had opened the checkpoint already.
        if tag not in [world.tags[one] for one in world.history[f"/{self.op.checkpoint}"]]:
            world.wrong(f"{self.name} loaded save {tag}, which was never committed ({before})")
        self.group.note_loaded(self, tag)
        return tag

    def _barrier(self) -> None:
        with phase(self.call, Phase.ARRIVE):
            self.call.exchange(ARRIVE, None)


def _is_ours(text: str) -> bool:
    expected = (INJECTED, "given up before its commit", "and gone on to a later")
    return any(one in text for one in expected)


class Link:
    """As ``CallLink``: each message may be on its way for a while, and its coordinator may die."""

    def __init__(self, fiber: RankFiber) -> None:
        self._fiber = fiber
        self._call_id = replace(fiber.call_id, behind=fiber.in_flight)

    def send(self, phase: str, message: bytes) -> bytes:
        fiber, group = self._fiber, self._fiber.group
        epoch = group.epoch
        fiber.sending = (phase, message)
        fiber.sent_results = fiber.sent_results or phase == "write"
        fiber.pause(f"send {phase}")
        fiber.sending = None
        if group.epoch != epoch:
            raise CoordinatorLostError("died", group=group.name)
        wait = fiber.waiting = group.deliver(self._call_id, fiber.process.rank, phase, message)
        fiber.open_call = wait.call
        fiber.epochs.add(epoch)
        fiber.pause(f"answer {phase}", ready=lambda: wait.lost or wait.future.done())
        fiber.waiting = None
        if wait.lost:
            raise CoordinatorLostError("died", group=group.name)
        return wait.future.result(timeout=0)

    def tell(self, failure: RankFailure) -> None:
        group = self._fiber.group
        self._fiber.pause("tell")
        group.coordinator.fail(self._fiber.call_id, self._fiber.process.rank, failure)

    def reconnect(self) -> None:
        """There always is a coordinator."""
        self._call_id = replace(self._call_id, behind=self._fiber.in_flight)


def write_files(location: str, files: dict[str, bytes]) -> None:
    """Write what rank and deputy write alike; where the other one has, it is there."""
    store = SteppingStore(location)
    for key, content in files.items():
        pause_here(f"store get {key}")
        if store.has(key, content):
            continue
        with store.put_new(key) as file:
            file.write(content)


@dataclass
class Agent:
    """The process that has what ranks of one node have handed over."""

    name: str
    group: Group
    alive: bool = True
    called_lost: bool = False
    """Whether any coordinator was told so, truly or not."""
    jobs: list[DeputyFiber] = field(default_factory=list)

    def take(self, fiber: RankFiber, files: dict[str, bytes], message: bytes) -> DeputyFiber:
        before = [job for job in self.jobs if job.process is fiber.process and not job.done]
        self.jobs.append(DeputyFiber(self, fiber, files, message, before[-1] if before else None))
        return self.jobs[-1]


class DeputyFiber(Fiber):
    """An agent in one save of one rank."""

    def __init__(
        self, agent: Agent, fiber: RankFiber, files: dict[str, bytes], message: bytes, after: DeputyFiber | None
    ) -> None:
        super().__init__(f"{agent.name} for {fiber.name}", agent.group, self._do)
        self.agent = agent
        self.process, self.op, self.call_id, self.attempt = fiber.process, fiber.op, fiber.call_id, fiber.attempt
        self.files, self.message = files, message
        self.after = after
        self.epochs = {agent.group.epoch}
        self.announced = False
        self.announced_in = -1
        """The latest coordinator that knows of this deputy."""
        self.gave_back = False
        """Whether it has begun to give the part back, which is then its rank's own, or nobody's."""
        self.sending: tuple[str, bytes] | None = None
        self.written = False
        handed_over = fiber.call.handed_over(fiber.call_id)
        self.deputy = DeputyCall(handed_over, DeputysLink(self), after=after.deputy if after is not None else None)

    def _do(self) -> None:
        try:
            told = self.deputy.hand_over()
        except CoordinatorLostError:
            return
        self.announced = not told.failed
        if told.failed:
            return
        self.pause("turn", ready=lambda: self.after is None or self.after.written or self.after.done)
        try:
            write_files(self.call_id.checkpoint_id, self.files)
        except (StoreError, RuntimeError) as error:
            self.deputy.fail(error)
            return
        self.written = True
        told = self.deputy.deliver(self.message)
        if told.failed and not told.started_over:
            self._require_not_committed(pickle.loads(told.failure))

    def _require_not_committed(self, error: Exception) -> None:
        world = self.group.world
        if (
            isinstance(error, CheckpointException)
            and error.phase != "commit"
            and all(failure.rank != COORDINATOR for failure in error.rank_failures)
            and world.committed.get(f"/{self.op.checkpoint}") == self.attempt
            and self.attempt not in world.committed_unseen
        ):
            world.wrong(f"{self.name} was told that it failed, but {self.attempt} is committed: {error}")


class DeputysLink:
    """As ``Link``, for a deputy: what travels is bytes."""

    def __init__(self, fiber: DeputyFiber) -> None:
        self._fiber = fiber
        self.group = fiber.group.name

    def hand_over(self, call_id: bytes, rank: int) -> Told:
        def ask(to: Coordinator) -> CheckpointException | None:
            failure = to.hand_over(pickle.loads(call_id), rank, fiber.agent.name)
            for job in fiber.agent.jobs:
                if job.process is fiber.process and job.call_id == pickle.loads(call_id):
                    job.announced_in = fiber.group.epoch
            return failure

        fiber = self._fiber
        return self._ask("hand over", ask)

    def hand_back(self, call_id: bytes, rank: int, why: str) -> Told:
        self._fiber.announced_in = -1
        self._fiber.gave_back = True
        return self._ask("hand back", lambda to: to.hand_back(pickle.loads(call_id), rank, self._fiber.agent.name, why))

    def fail(self, call_id: bytes, rank: int, error: bytes, traced: str) -> Told:
        failure = RankFailure.of_deputy(error, rank=rank, phase=Phase.WRITE, traced=traced)
        return self._ask("failure", lambda to: to.fail(pickle.loads(call_id), rank, failure))

    def deliver(self, call_id: bytes, rank: int, phase: str, message: bytes, again: bool) -> Told:
        fiber, group = self._fiber, self._fiber.group
        fiber.sending = (phase, message)

        def answer() -> bytes:
            wait = group.deliver(pickle.loads(call_id), rank, phase, message)
            fiber.epochs.add(wait.epoch)
            fiber.pause(f"answer {phase}", ready=lambda: wait.lost or wait.future.done())
            if wait.lost:
                raise CoordinatorLostError("died", group=group.name)
            return wait.future.result(timeout=0)

        return self._ask(phase, lambda to: answer())

    def reconnect(self) -> None:
        """There always is a coordinator."""

    def _ask(self, what: str, ask: Callable[[Coordinator], bytes | CheckpointException | None]) -> Told:
        fiber, group = Fiber.current, self._fiber.group
        assert isinstance(fiber, DeputyFiber)  # this one, or a later one of its rank that announces both
        epoch = group.epoch
        fiber.pause(f"send {what}")
        fiber.sending = None
        if group.epoch != epoch:
            raise CoordinatorLostError("died", group=group.name)
        told = told_to_deputy(lambda: ask(group.coordinator))
        if told.coordinator_lost:
            raise CoordinatorLostError(told.text, group=group.name)
        return told


class Group:
    """A group's processes and its coordinator, which may be another one tomorrow (``epoch``)."""

    def __init__(self, name: str, world: World, skew_ns: int = 0) -> None:
        self.name = name
        self.world = world
        self.skew_ns = skew_ns
        self.epoch = 0
        self.now_s = 0.0
        self.processes: list[Process] = []
        self.ops: dict[int, list[Op]] = {}
        self.steps: list[Fiber] = []
        self.agents: list[Agent] = []
        self.restarted_s = 0.0
        self.waits: list[Wait] = []
        self._incarnations = itertools.count()
        self._members = itertools.count()
        self.slipped: set[int] = set()
        """Generations of which a rank does other calls than all."""
        self._loaded: dict[OpenCall | None, int] = {}
        self._ended: dict[OpenCall, str] = {}
        self._generations = [0]
        self.coordinator = self._new_coordinator()
        self._record = pickle.dumps(self.coordinator.record)

    def _new_coordinator(self) -> Coordinator:
        epoch = self.epoch

        def keep(record: CoordinatorRecord) -> None:
            if epoch == self.epoch:
                self._record = pickle.dumps(record)

        def execute(step: Callable[[], None]) -> None:
            self._begin_step(step, epoch)

        return Coordinator(self.name, execute=execute, clock=lambda: self.now_s, keep=keep)

    def _begin_step(self, step: Callable[[], None], epoch: int) -> None:
        """A step of any coordinator: one that another has taken the place of goes on for a while."""
        fiber = Fiber(f"coordinator {self.name}/{epoch}, step {len(self.steps)}", self, step)
        fiber.epoch = epoch
        self.steps.append(fiber)

    @property
    def members(self) -> list[Process]:
        """The current generation."""
        return [one for one in self.processes if one.generation == self.coordinator.generation]

    @property
    def is_whole(self) -> bool:
        """Whether the current generation can make a call that works."""
        return bool(self.members) and all(one.alive and not one.known_lost for one in self.members)

    @property
    def fibers(self) -> list[Fiber]:
        """Those that can go on."""
        of_ranks = [one for process in self.processes for fiber in process.fibers for one in (fiber, *fiber.helpers)]
        return [fiber for fiber in (*of_ranks, *self.jobs, *self.steps) if fiber.runnable]

    @property
    def jobs(self) -> list[DeputyFiber]:
        """What agents that live have not done yet."""
        return [job for agent in self.agents if agent.alive for job in agent.jobs if not job.done]

    def agent_of(self, process: Process) -> Agent:
        """The agent of this rank's node: ranks with even numbers are on one, the others on another."""
        node = f"{self.name}'s agent {process.rank % 2}"
        living = [agent for agent in self.agents if agent.alive and agent.name.startswith(node)]
        if not living:
            living = [Agent(f"{node}.{len(self.agents)}", self)]
            self.agents += living
        return living[-1]

    def kill_agent(self, agent: Agent, *, delivered: bool) -> None:
        """The agent ends, unnoticed so far. What it was sending may still arrive."""
        agent.alive = False
        for job in agent.jobs:
            if not job.done:
                sending, epoch = job.sending, self.epoch
                job.kill()
                if sending is not None and delivered and epoch in job.epochs:
                    with suppress(GroupError):
                        self.deliver(job.call_id, job.process.rank, *sending)

    def tell_agent_lost(self, agent: Agent) -> None:
        """The coordinator hears that it is dead, whether that is true or not."""
        agent.called_lost = True
        self.coordinator.deputy_lost(agent.name, "killed")

    @property
    def unfinished(self) -> list[RankFiber]:
        return [fiber for process in self.processes for fiber in process.fibers if not fiber.done]

    # Membership.

    def start(self, world_size: int, *, incarnations: bool) -> None:
        """Processes that are to join; those before them that still wait to are stopped."""
        for process in self.processes:
            if process.generation is None and process.alive:
                self.kill(process, delivered=False)
                self.tell_lost(process)
        incarnation = f"{next(self._incarnations):03}" if incarnations else None
        self.processes += [
            Process(JoinRequest(rank, world_size, f"{self.name}{next(self._members)}/{rank}", incarnation, LIMITS))
            for rank in range(world_size)
        ]

    def join(self, process: Process) -> None:
        future = process.joining = self.coordinator.join(process.request)
        self.write_record()
        self.notice_joined()
        if future.done() and future.exception(0) is not None:
            self.world.wrong(f"{process.request} was refused: {future.exception(0)!r}")

    def notice_joined(self) -> None:
        for process in self.processes:
            if process.joining is not None and process.generation is None and process.joining.done():
                if process.joining.cancelled() or process.joining.exception(0) is not None:
                    continue
                process.generation = process.joining.result(0)
                if process.generation < self._generations[-1]:
                    self.world.wrong(f"{process.request.member} joined {process.generation} after {self._generations}")
                if process.generation != self._generations[-1]:
                    self._generations.append(process.generation)

    def write_record(self) -> None:
        self._record = pickle.dumps(self.coordinator.record)

    def kill(self, process: Process, *, delivered: bool) -> None:
        """The process ends, unnoticed so far. What it was sending may still arrive."""
        process.alive = False
        for fiber in process.fibers:
            if not fiber.done:
                sending, epoch = fiber.sending, self.epoch
                fiber.kill()
                if sending is not None and delivered and epoch in fiber.epochs:
                    with suppress(GroupError):
                        self.deliver(fiber.call_id, process.rank, *sending)

    def tell_lost(self, process: Process) -> None:
        """Its coordinator hears that it is dead, whether that is true or not."""
        process.known_lost = True
        self.coordinator.member_lost(process.request.member, "killed")

    def leave(self, process: Process) -> None:
        assert process.generation is not None
        self.kill(process, delivered=False)
        self.coordinator.leave(process.generation, process.rank)
        process.known_lost = True
        self.write_record()

    def restart_coordinator(self, *, steps_go_on: bool, lost_answers: int) -> None:
        """Another process takes over; the old one's steps end with it, or go on for a while where nobody sees it."""
        old = self.epoch
        self.epoch += 1
        self.restarted_s = self.now_s
        for number, wait in enumerate(self.waits):
            if wait.epoch == old:
                wait.lost = not wait.future.done() or bool(lost_answers >> number % 8 & 1)
        for step in self.steps:
            if not step.done and not steps_go_on:
                step.kill()
        self.coordinator = self._new_coordinator()
        self.coordinator.restore(pickle.loads(self._record))
        for process in self.processes:
            if process.generation is None and process.joining is not None and process.alive:
                process.joining = None  # it comes again
            process.known_lost = process.rank in self.coordinator.record.membership.lost and process in self.members

    # Calls.

    def begin(self, process: Process, op: Op) -> RankFiber:
        """The next call of this rank: ``op``, unless other ranks are there already, or it owes one."""
        if process.owed is not None:
            next_op, process.owed = process.owed, None
            return self.make(process, next_op)
        process.next_op += 1
        return self.make(process, self.op_at(process, process.next_op - 1, op))

    def op_at(self, process: Process, position: int, otherwise: Op) -> Op:
        """What this rank's generation does there; ``otherwise`` where nobody has said so yet."""
        assert process.generation is not None
        ops = self.ops.setdefault(process.generation, [])
        if len(ops) == position:
            ops.append(otherwise)
        return ops[position]

    def make(self, process: Process, op: Op) -> RankFiber:
        fiber = RankFiber(process, op, self)
        process.num_calls += 1
        process.fibers.append(fiber)
        return fiber

    def lags(self, process: Process) -> bool:
        """Whether this rank has yet to make calls that others have made."""
        assert process.generation is not None
        return process.owed is not None or process.next_op < len(self.ops.get(process.generation, []))

    def deliver(self, call_id: CallId, rank: int, phase: str, message: bytes) -> Wait:
        """A part arrives. One of an older generation must be refused."""
        try:
            future = self.coordinator.contribute(call_id, rank, phase, message, again=self.epoch > 0)
        except StaleGenerationError:
            if call_id.generation == self.coordinator.generation:
                self.world.wrong(f"{call_id} of rank {rank} was refused as stale")
            raise
        call = self.find(call_id, rank)
        if call is None:
            self.world.wrong(f"{call_id} of rank {rank} was taken at generation {self.coordinator.generation}")
        wait = Wait(call_id, rank, phase, message, self.epoch, call, future)
        self.waits.append(wait)
        future.add_done_callback(lambda _: self._note_answer(wait))
        return wait

    @property
    def saves_in_order(self) -> list[OpenCall]:
        """The saves that go on, those of older generations first."""
        older = [one for generation in self.coordinator._older for one in generation.open_saves]
        return [*older, *self.coordinator._calls.open_saves]

    @property
    def attempts_in_order(self) -> list[str | None]:
        """What they are attempts at; None of those that have no plan yet."""
        return [call.attempt for call in self.saves_in_order]

    def find(self, call_id: CallId, rank: int) -> OpenCall | None:
        """The call of the current generation, or the save of an older one that was in the hands of deputies."""
        if call_id.generation == self.coordinator.generation:
            return self.coordinator._calls.find(call_id, rank)
        older = [one for one in self.coordinator._older if one.number == call_id.generation]
        return older[0].find(call_id, rank) if older else None

    def _jobs_of(self, call: OpenCall | None, rank: int) -> list[DeputyFiber]:
        """What agents have of a rank's part of this call, whether or not they live."""
        jobs = [job for agent in self.agents for job in agent.jobs if job.process.rank == rank]
        return [job for job in jobs if call is not None and self.find(job.call_id, rank) is call]

    def _is_in_good_hands(self, call: OpenCall | None, rank: int) -> bool:
        """Whether a rank's part is an agent's that lives, and the coordinator knows, or has to wait for its word."""
        return any(
            job.announced
            and not job.gave_back
            and not job.done
            and job.agent.alive
            and not job.agent.called_lost
            and (job.announced_in == self.epoch or self.now_s == self.restarted_s)
            for job in self._jobs_of(call, rank)
        )

    def _require_cause(self, wait: Wait, error: CheckpointException) -> None:
        """No save fails for a rank whose part is in good hands, nor for a new generation if that is so of all."""
        for failure in error.rank_failures:
            missed = failure.error_type == "RankLostError" or "gone on to a later" in failure.message
            if missed and self._is_in_good_hands(wait.call, failure.rank):
                self.world.wrong(f"{wait.call_id} failed for rank {failure.rank}, which has a deputy: {error}")
        ranks = [one.rank for one in self.processes if one.generation == wait.call_id.generation]
        hands = [
            self._is_in_good_hands(wait.call, rank)
            and any(job.announced_in == self.epoch for job in self._jobs_of(wait.call, rank))
            for rank in ranks
        ]
        if isinstance(error.__cause__, StaleGenerationError) and hands and all(hands):
            self.world.wrong(f"{wait.call_id} ended with its generation, and all ranks have deputies: {error}")

    def _note_answer(self, wait: Wait) -> None:
        """All ranks of a call hear the same of one coordinator: that it is done, or one and the same failure."""
        if wait.epoch != self.epoch:
            return
        last = {"save": "write", "load": "restore", "barrier": "arrive"}[wait.call_id.kind]
        answered = wait.call_id.kind == "save" and wait.phase == "plan" and wait.future.exception(0) is None
        skipped = answered and isinstance(decode(wait.future.result(0)), SaveSkipped)
        if wait.phase == "read" and wait.future.exception(0) is None and not decode(wait.future.result(0)):
            last = "read"
        error = wait.future.exception(0)
        if isinstance(error, CheckpointException):
            ended = f"failed in {error.phase}: ranks {error.failed_ranks}: {error.args[0]}"
            self._require_cause(wait, error)
            if wait.call is not None and wait.call.attempt:
                self.world.told_failed.setdefault(wait.call.attempt, self.epoch)
        elif wait.phase == last:
            ended = "is done"
        elif skipped:
            ended = "is skipped"
        else:
            return
        assert wait.call is not None
        before = self._ended.setdefault(wait.call, ended)
        if before != ended:
            self.world.wrong(f"{wait.call_id}: rank {wait.rank} hears that it {ended}, others that it {before}")

    def note_loaded(self, fiber: RankFiber, tag: int) -> None:
        if len(fiber.epochs) == 1:
            before = self._loaded.setdefault(fiber.open_call, tag)
            if before != tag:
                self.world.wrong(f"{fiber.name} loaded save {tag}, another rank save {before}")

    def redeliver(self, wait: Wait) -> None:
        """A message comes once more, however late."""
        try:
            again = self.deliver(wait.call_id, wait.rank, wait.phase, wait.message)
        except GroupError:
            return
        same_coordinator = wait.epoch == again.epoch and wait.future.done() and not wait.lost
        if same_coordinator and again.future.done() and wait.future.exception(0) is None:
            error = again.future.exception(0)
            if error is None and again.future.result(0) != wait.future.result(0):
                self.world.wrong(f"{wait.call_id}, rank {wait.rank}, {wait.phase}: another answer the second time")

    def pass_time(self, seconds: float) -> None:
        """With the coordinator looking at its limits all the while."""
        while seconds > 0:
            self.now_s += min(seconds, 0.75)
            seconds -= 0.75
            self.coordinator.check_limits()

    def tell_progress(self, fiber: RankFiber) -> None:
        """As the pulse of its process does."""
        progress = fiber.call.progress
        if progress.phase is None:
            return
        try:
            failure = self.coordinator.report_progress(
                fiber.call_id, fiber.process.rank, progress.phase, progress.mark, progress.nbytes
            )
        except StaleGenerationError:
            return
        if failure is not None:
            progress.interrupt(fiber.call.as_failed(failure))

    # What must hold.

    def check(self) -> None:
        going_on, failed = self.coordinator.attempts
        if going_on & failed:
            self.world.wrong(f"attempts {going_on & failed} go on and have failed")
        for attempt in sorted(failed):
            self.world.failed.setdefault(attempt, f"{self.name}/{self.epoch}")
        open_calls = sum(not call.ended for call in self.coordinator._calls)
        if len(self.coordinator._calls) > 65 + open_calls:
            self.world.wrong(f"{len(self.coordinator._calls)} calls are remembered")

    def check_waits(self) -> None:
        """Nobody can go on: then whoever waits, waits for a rank that has not come and may still come."""
        for fiber in (*self.unfinished, *self.jobs):
            generation_is_over = fiber.call_id.generation != self.coordinator.generation
            if generation_is_over and self.find(fiber.call_id, fiber.process.rank) is None:
                self.world.wrong(f"{fiber.name} still waits after its generation has ended")
            elif not self._may_wait(fiber):
                self.world.wrong(f"{fiber.name} waits at {fiber.place!r} for nobody")

    def _may_wait(self, fiber: RankFiber | DeputyFiber) -> bool:
        call = self.find(fiber.call_id, fiber.process.rank)
        if fiber.place in ("settle", "hand over", "agent", "turn"):
            return True  # for another one of its own, or its deputy, which is looked at by itself
        if call is None or call.ended:
            return False
        if call in self.saves_in_order[1:] and not call.waits_for_ranks:
            return True  # for an earlier save, whose ranks are looked at by themselves
        for other in [one for one in self.processes if one.generation == fiber.call_id.generation]:
            if not call.waits_for(other.rank):
                continue
            if self.coordinator._calls.may_be_announced(call, other.rank):
                return True
            jobs = self._jobs_of(call, other.rank)
            if any(not job.done and job.agent.alive for job in jobs):
                return True
            if any(not job.agent.alive and job.agent.name in call.deputies for job in jobs):
                return True  # it is gone, and the coordinator has not heard of that
            if other.known_lost:
                continue  # a lost rank fails the call; one of which nobody knows does not
            if not other.alive:
                return True
            unfinished = [one for one in other.fibers if not one.done]
            if unfinished:
                if any(one.place == "settle" for one in unfinished):
                    return True
                continue  # in another call, which waits as well
            here = [one for one in other.fibers if self.find(one.call_id, other.rank) is call]
            if not here or any(len(fiber.epochs | one.epochs) > 1 for one in here):
                return True  # it may yet come, or had its answer of a coordinator before
        return False
