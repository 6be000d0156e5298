"""Real rank actors with a committed past, and one thing that goes wrong at one point of a save or load."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, trace_points
from ray_dcp.format.manifest import decode_manifest
from ray_dcp.format.names import parse_shard_file
from ray_dcp.settings import Limits
from ray_dcp.trace_points import Point
from tests.ranks import ThreadRanks, require_no_errors
from tests.slack import within

AT_COORDINATOR = (
    Point.GLOBAL_PLAN,
    Point.BEFORE_MANIFEST,
    Point.BETWEEN_MANIFEST_AND_METADATA,
    Point.AFTER_METADATA,
    Point.LOAD_PLAN,
)
ROWS = 6


@ray.remote(num_cpus=0.1, max_concurrency=3)
class Rank:
    """A process that is a rank of one group at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.group: Any = None

    def join(self, name: str, rank: int, world_size: int, limits: Limits) -> int:
        self.group = dcp.RankGroup.join(name, rank=rank, world_size=world_size, limits=limits, timeout_s=within(120))
        return os.getpid()

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(rank, world_size, *args)`` within the group."""
        with self.group:
            return function(self.group.rank, self.group.world_size, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def arm(title: str, action: Callable[[], None], stamp: str) -> None:
    """Have this process do ``action`` when it next comes to a point; it notes when."""

    def observe(point: Point) -> None:
        if point.title == title:
            trace_points.observe(None)
            Path(stamp).write_text(repr(time.monotonic()))
            action()

    trace_points.observe(observe)


def misbehave(kind: str, pid: int) -> None:
    if kind == "raise":
        raise OSError(errno.EIO, "injected")
    of_kind = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind]
    if pid == os.getpid():  # this thread comes no further, which one that takes the process's signal does not say
        signal.pthread_kill(threading.get_ident(), of_kind)
    else:
        os.kill(pid, of_kind)


def state_of(rank: int, world_size: int, value: float) -> dict[str, Any]:
    """Rows of a tensor, a replicated tensor and a Python value, all of which say which save they are of."""
    share = ROWS // world_size
    rows = torch.arange(share * 3, dtype=torch.float32).reshape(share, 3) + 100 * rank + value
    whole = torch.full((5,), value, dtype=torch.bfloat16)
    return {"rows": LocalShards((ROWS, 3), {(rank * share, 0): rows}), "all": whole, "n": {"step": value}}


def save_at(rank: int, world_size: int, place: str, value: float) -> tuple[Any, float]:
    """How the save ended on this rank ("saved" or its error), and when."""
    try:
        dcp.save(state_of(rank, world_size, value), checkpoint_id=place)
    except CheckpointException as error:
        return error, time.monotonic()
    return "saved", time.monotonic()


def template_of(rank: int, world_size: int) -> dict[str, Any]:
    share = ROWS // world_size
    empty = LocalShards((ROWS, 3), {(rank * share, 0): torch.full((share, 3), float("nan"))})
    return {"rows": empty, "all": torch.full((5,), float("nan"), dtype=torch.bfloat16), "n": {"step": None}}


def load_at(rank: int, world_size: int, place: str, value: float) -> tuple[Any, float]:
    """How the load ended on this rank ("loaded", "WRONG" or its error), and when."""
    template = template_of(rank, world_size)
    try:
        dcp.load(template, checkpoint_id=place)
    except CheckpointException as error:
        return error, time.monotonic()
    right = same_state(template, state_of(rank, world_size, value))
    return "loaded" if right else "WRONG", time.monotonic()


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    chunks = [state["rows"].chunks for state in (one, other)]
    return (
        one["n"] == other["n"]
        and torch.equal(one["all"], other["all"])
        and chunks[0].keys() == chunks[1].keys()
        and all(torch.equal(chunks[0][offsets], chunks[1][offsets]) for offsets in chunks[0])
    )


def value_at(place: str, saved_by: int) -> float:
    """Of which save the checkpoint is; every part of it must be, loaded by three ranks, and by torch alone."""
    templates = [template_of(rank, 3) for rank in range(3)]
    require_no_errors(ThreadRanks(3).load(templates, place))
    value = templates[0]["n"]["step"]
    expected = torch.cat([state_of(rank, saved_by, value)["rows"].chunks[(rank * ROWS // saved_by, 0)]
                          for rank in range(saved_by)])  # fmt: skip
    for rank, template in enumerate(templates):
        assert template["n"] == {"step": value}
        assert torch.equal(template["all"], torch.full((5,), value, dtype=torch.bfloat16))
        assert torch.equal(template["rows"].chunks[(2 * rank, 0)], expected[2 * rank : 2 * rank + 2])
    assert_one_attempt(Path(place))
    return float(value)


def assert_one_attempt(folder: Path) -> None:
    """What is committed refers to files of one attempt only, and they are there."""
    manifest = decode_manifest((folder / "manifest.parquet").read_bytes(), file=str(folder))
    files = {entry.file for entry in manifest.entries}
    attempts = {shard.attempt for file in files if (shard := parse_shard_file(file)) is not None}
    assert len(attempts) == 1
    assert all((folder / file).exists() for file in files)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return when ``condition()`` holds; fails the test when it does not in time."""
    deadline = time.monotonic() + within(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


@dataclass
class Outcomes:
    """Of the ranks that survived: how it ended there, and how long after the fault."""

    by_rank: dict[int, Any]
    seconds: float


class Cast:
    """Rank actors in one group, with a spare that takes the place of one that was killed.

    Those of ``troupe``, a list, play in it, and are put back at the end; where it has too few, more are started.
    """

    def __init__(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        actors: list[Any] | None = None,
        troupe: list[Any] | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or Limits(coordinator_timeout_s=within(Limits().coordinator_timeout_s))
        self._troupe = [] if troupe is None else troupe
        self.actors = actors or [self._another() for _ in range(2)]
        self.world_size = len(self.actors)
        self.spare = None if actors else self._another()
        self.pids: list[int] = []
        self.form()

    def _another(self) -> Any:
        return self._troupe.pop() if self._troupe else Rank.remote()

    def form(self) -> None:
        """Gather all actors as a new generation."""
        joins = [
            actor.join.remote(self.name, rank, self.world_size, self.limits) for rank, actor in enumerate(self.actors)
        ]
        self.pids = ray.get(joins, timeout=within(120))

    def do(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return ray.get([actor.do.remote(function, *args) for actor in self.actors], timeout=within(120))

    def save(self, place: Path, value: float) -> None:
        """Save without a fault."""
        assert [outcome for outcome, _ in self.do(save_at, str(place), value)] == ["saved"] * self.world_size

    def coordinator(self) -> Any:
        return ray.get_actor(f"coordinator/{self.name}", namespace="ray_dcp")

    def coordinator_pid(self) -> int:
        return ray.get(self.coordinator().__ray_call__.remote(lambda actor: os.getpid()), timeout=within(60))

    def arm(self, point: Point, kind: str, stamp: Path) -> None:
        """``kind``: raise, or kill or stop the rank 1 or the coordinator ("kill rank")."""
        what, _, whom = kind.partition(" ")
        pid = self.coordinator_pid() if whom == "coordinator" else self.pids[1]
        self.arm_action(point, lambda: misbehave(what, pid), stamp)

    def arm_action(self, point: Point, action: Callable[[], None], stamp: Path) -> None:
        """In the process that comes to ``point``: the coordinator's or rank 1's."""
        arguments = (point.title, action, str(stamp))
        if point in AT_COORDINATOR:
            ray.get(
                self.coordinator().__ray_call__.remote(lambda actor, *given: arm(*given), *arguments),
                timeout=within(60),
            )
        else:
            ray.get(self.actors[1].call.remote(arm, *arguments), timeout=within(60))

    def start(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [actor.do.remote(function, *args) for actor in self.actors]

    def outcomes(self, references: list[Any], stamp: Path, *, without: tuple[int, ...] = ()) -> Outcomes:
        """Of all ranks but ``without``."""
        found = {r: ray.get(ref, timeout=within(60)) for r, ref in enumerate(references) if r not in without}
        since = float(stamp.read_text())
        return Outcomes({r: outcome for r, (outcome, _) in found.items()}, max(at for _, at in found.values()) - since)

    def replace(self, rank: int) -> Any:
        """Let the spare take a rank's place in a new generation; the actor that had it."""
        before, self.actors[rank], self.spare = self.actors[rank], self.spare, self._another()
        self.form()
        return before

    def end(self) -> None:
        """Let all leave the group, and see that the coordinator ends by itself."""
        ray.get([actor.leave.remote() for actor in self.actors], timeout=within(120))
        self._troupe += [*self.actors, self.spare]
        name = f"coordinator/{self.name}"
        wait_until(lambda: name not in [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)])
