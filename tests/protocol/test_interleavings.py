"""Random interleavings of whole saves, loads and barriers of two groups, with everything that may go wrong in between.

A hundred runs in `make test`, always the same ones, and some new ones; ten thousand new ones in `make nightly`.
What is checked:

- what is committed at a checkpoint is always exactly what one save was to write, bit by bit, and stays so until a newer
  attempt takes its place; a rank that was told of success was told the truth;
- nobody waits for nobody, and all ranks of a call hear the same of it;
- messages of older generations are refused; attempts that were called failed are never committed;
- when all is over, the next save and load of the same ranks, or of re-formed ones, work at once.
"""

from __future__ import annotations

import contextlib
import types
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import ray_dcp.format.names
from ray_dcp.errors import GroupError, StalledError, SupersededError
from ray_dcp.format.metadata_file import encode_metadata
from ray_dcp.format.names import ShardFile
from ray_dcp.maintenance.sweep.removal import delete_leftovers, plan_sweep
from ray_dcp.store.open import open_store
from ray_dcp.trace_points import observed_by
from ray_dcp.write.commit import Commit
from tests.conftest import interleavings
from tests.protocol.interleavings import (
    EPOCH_S,
    HANDED_OVER,
    SKIPPED,
    DeputyFiber,
    Fiber,
    Group,
    Op,
    Process,
    RankFiber,
    ReadingFiber,
    World,
    pause_here,
    reading_in_fibers,
)

CHECKPOINTS = ("step-00000001", "step-00000002")
TO_ITS_END = 1000
ROUNDS = 200
checkpoints = st.sampled_from(CHECKPOINTS)
sizes = st.integers(1, 4)
disasters = st.sampled_from(
    ["die", "called dead", "coordinator dies", "re-form", "leave", "agent dies", "agent called dead", "both die"]
)
flips = st.booleans()
deputy_at = st.sampled_from(
    ["send hand over", "turn", "store create", "store close", "send write", "answer write", "store put .metadata"]
)
deaths = st.lists(st.sampled_from(["all ranks die", "die", "agent dies", "both die", "coordinator dies", "re-form"]))
places = st.sampled_from(
    [
        "store put .metadata",
        "store put .metadata: done",
        "store put manifest",
        "point after metadata",
        "point before result",
        "store close",
        "send",
        "answer write",
        "send hand over",
        "turn",
        "agent",
        "store delete",
        "point mid read",
    ]
)
accidents = st.sampled_from(["none", "none", "fail", "fail", "die", "coordinator dies", "time passes"])
which = st.integers(0, 7)
slips = st.sampled_from(["skip", "twice", "swap"])
groups = st.sampled_from([0, 0, 0, 1])
stagings = st.sampled_from([False, True, True, HANDED_OVER, HANDED_OVER, SKIPPED])
kinds = st.sampled_from(["save", "save", "save", "load", "barrier"])
pauses = st.sampled_from([1, 1, 2, 3, 5, 8, 13, 21, TO_ITS_END, TO_ITS_END])


class Interleavings(RuleBasedStateMachine):
    """Each rule is one event, or lets somebody go on for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.num_saves = 0
        self.planned_sweep = None
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(reading_in_fibers())
        self.stack.enter_context(observed_by(lambda point: pause_here(f"point {point.title}")))
        self.stack.callback(self.world.close)
        for name, stand_in in (
            ("time", types.SimpleNamespace(time_ns=self.world.time_ns)),
            ("uuid", types.SimpleNamespace(uuid4=self.next_uuid)),
        ):
            self.stack.callback(setattr, ray_dcp.format.names, name, getattr(ray_dcp.format.names, name))
            setattr(ray_dcp.format.names, name, stand_in)
        self.num_uuids = 0
        self.groups: list[Group] = []

    def next_uuid(self) -> uuid.UUID:
        self.num_uuids += 1
        return uuid.UUID(int=self.num_uuids * 2654435761 % 2**32 << 96)

    # The events.

    @initialize(skew=st.sampled_from([0, 1_000_000, -1_000_000]), world_size=st.integers(1, 4))
    def first_ranks(self, skew: int, world_size: int) -> None:
        self.groups = [Group("a", self.world), Group("b", self.world, skew)]
        self.form(self.groups[0], world_size, world_size, incarnations=True)

    def form(self, group: Group, world_size: int, how_many: int, incarnations: bool) -> None:
        """A new set of processes; perhaps not all of them join yet."""
        group.start(world_size, incarnations=incarnations)
        self.join(group, how_many)

    def join(self, group: Group, how_many: int) -> None:
        waiting = [one for one in group.processes if one.alive and one.joining is None]
        for process in waiting[:how_many]:
            group.join(process)

    @rule(group=groups, kind=kinds, checkpoint=checkpoints, staged=stagings, world_size=sizes, how_far=pauses)
    def call(self, group: int, kind: str, checkpoint: str, staged: bool, world_size: int, how_far: int) -> None:
        """All ranks begin the next call, of a new generation where the last one has lost a rank."""
        chosen = self.groups[group]
        if not chosen.is_whole:
            self.form(chosen, world_size, world_size, incarnations=True)
        for process in chosen.members:
            self.start_call(chosen, process, kind, checkpoint, staged)
        self.all_go_on(0, how_far)

    @rule(group=groups, rank=which, kind=kinds, checkpoint=checkpoints, staged=stagings)
    def begin(self, group: int, rank: int, kind: str, checkpoint: str, staged: bool) -> None:
        """One rank does, of any generation."""
        chosen = self.groups[group]
        if processes := [one for one in chosen.processes if one.alive and one.generation is not None]:
            self.start_call(chosen, processes[-1 - rank % len(processes)], kind, checkpoint, staged)

    @rule(group=groups, rank=which, how=slips, kind=kinds, staged=stagings)
    def slip(self, group: int, rank: int, how: str, kind: str, staged: bool) -> None:
        """One rank leaves out a call, makes its last one again (it caught an error), or swaps the next two."""
        chosen = self.groups[group]
        processes = [one for one in chosen.members if one.alive and not one.busy and one.owed is None]
        if not processes:
            return
        process = processes[rank % len(processes)]
        first = max(0, min(member.next_op for member in chosen.members) - 1)
        saves = [op for op in chosen.ops.get(process.generation, [])[first:] if op.kind == "save"]
        if len({op.checkpoint for op in saves}) < len(saves):
            return  # two saves that look the same: nobody could tell which of them it makes
        chosen.slipped.add(process.generation)
        if how == "skip":
            self.op_after(chosen, process, 0, kind, staged)
            process.next_op += 1
        elif how == "twice" and process.next_op > 0:
            chosen.make(process, self.op_after(chosen, process, -1, kind, staged))
        elif how == "swap":
            process.owed = self.op_after(chosen, process, 0, kind, staged)
            chosen.make(process, self.op_after(chosen, process, 1, kind, staged))
            process.next_op += 2

    def op_after(self, group: Group, process: Process, how_many: int, kind: str, staged: bool) -> Op:
        otherwise = self.next_op(group, process, kind, CHECKPOINTS[0], staged)
        return group.op_at(process, process.next_op + how_many, otherwise)

    @rule(who=which, how_far=pauses)
    def go_on(self, who: int, how_far: int) -> None:
        if (fiber := self.pick(who)) is not None:
            self.let_run(fiber, how_far)

    @rule(who=which, how_far=pauses)
    def all_go_on(self, who: int, how_far: int) -> None:
        fibers = self.runnable()
        for fiber in fibers[who % len(fibers) :] + fibers[: who % len(fibers)] if fibers else []:
            self.let_run(fiber, how_far)

    @rule(
        group=groups,
        checkpoint=checkpoints,
        world_size=sizes,
        place=deputy_at,
        dead=deaths,
        which=which,
        one=flips,
    )
    def hand_over(
        self, group: int, checkpoint: str, world_size: int, place: str, dead: list[str], which: int, one: bool
    ) -> None:
        """All ranks save by their agents, and when those are somewhere on their way others die."""
        self.call(group, "save", checkpoint, HANDED_OVER, world_size, 1)
        self.go_on_until(place)
        chosen = self.groups[group]
        for what in dead:
            if what == "all ranks die":
                for process in [one for one in chosen.members if one.alive]:
                    chosen.kill(process, delivered=one)
                    chosen.tell_lost(process)
            else:
                self.disaster(group, what, which, one, one)

    def go_on_until(self, place: str) -> None:
        Fiber.stops_at = place
        while fibers := [fiber for fiber in self.runnable() if not fiber.place.startswith(place)]:
            for fiber in fibers:
                self.let_run(fiber, TO_ITS_END, place)
        Fiber.stops_at = None

    @rule(place=places, then=accidents, who=which)
    def until(self, place: str, then: str, who: int) -> None:
        """All go on until they wait or have come to a place where it matters what happens next."""
        self.go_on_until(place)
        if there := self.runnable():
            self.meet(there[who % len(there)], then, who)

    def meet(self, fiber: Fiber, accident: str, who: int) -> None:
        if accident == "fail" and (failure := fiber.failure_here()) is not None:
            fiber.run(failure)
        elif accident == "die":
            fiber = fiber.owner if isinstance(fiber, ReadingFiber) else fiber
            if isinstance(fiber, DeputyFiber):
                fiber.group.kill_agent(fiber.agent, delivered=who % 2 == 0)
                fiber.group.tell_agent_lost(fiber.agent)
                return
            members = [fiber.process] if isinstance(fiber, RankFiber) else fiber.group.members
            process = members[who % len(members)] if members else None
            if process is not None and process.alive:
                fiber.group.kill(process, delivered=who % 2 == 0)
                fiber.group.tell_lost(process)
        elif accident == "coordinator dies":
            fiber.group.restart_coordinator(steps_go_on=who % 2 == 0, lost_answers=who * 37)
        elif accident == "time passes":
            fiber.group.pass_time(6)

    @rule()
    def until_all_wait(self) -> None:
        self.drain()

    @rule(who=which)
    def go_wrong(self, who: int) -> None:
        """What this fiber does now fails: its own code, the store (before or after it took effect), its answer."""
        can_fail = [fiber for fiber in self.everybody() if fiber.failure_here() is not None]
        if can_fail:
            fiber = can_fail[who % len(can_fail)]
            fiber.run(fiber.failure_here())

    @rule(group=groups, what=disasters, rank=which, one=st.booleans(), other=st.booleans())
    def disaster(self, group: int, what: str, rank: int, one: bool, other: bool) -> None:
        chosen = self.groups[group]
        live = [member for member in chosen.members if member.alive]
        member = live[rank % len(live)] if live else None
        if what == "coordinator dies":
            chosen.restart_coordinator(steps_go_on=one, lost_answers=rank * 37)
        elif what == "re-form":
            self.form(chosen, rank % 4 + 1, 4 if one else rank // 2, incarnations=other)
        elif what in ("agent dies", "agent called dead", "both die"):
            self.agent_disaster(chosen, what, member, rank, one, other)
        elif member is None:
            return
        elif what == "die":
            chosen.kill(member, delivered=one)
            if other:
                chosen.tell_lost(member)
        elif what == "called dead":  # whether or not it is: a killed node's processes go on for a while
            chosen.tell_lost(member)
        elif what == "leave" and not member.busy:
            chosen.leave(member)

    def agent_disaster(
        self, group: Group, what: str, member: Process | None, which: int, one: bool, other: bool
    ) -> None:
        living = [agent for agent in group.agents if agent.alive]
        if not living:
            return
        agent = living[which % len(living)]
        if what == "both die" and member is not None:
            agent = group.agent_of(member)
            group.kill(member, delivered=one)
        if what != "agent called dead":
            group.kill_agent(agent, delivered=one)
        if what == "agent called dead" or other:
            group.tell_agent_lost(agent)
        if what == "both die" and member is not None and (one or not other):
            group.tell_lost(member)

    @rule(group=groups, seconds=st.sampled_from([2, 6, 13]))
    def time_passes(self, group: int, seconds: int) -> None:
        self.groups[group].pass_time(seconds)

    @rule(group=groups, what=st.sampled_from(["join", "send again", "progress", "plan prune", "prune"]), who=which)
    def also(self, group: int, what: str, who: int) -> None:
        chosen = self.groups[group]
        at_work = chosen.unfinished
        if what == "join":
            self.join(chosen, who)
        elif what == "send again" and chosen.waits:
            chosen.redeliver(chosen.waits[-1 - who * 3 % len(chosen.waits)])
        elif what == "progress" and at_work:
            chosen.tell_progress(at_work[who % len(at_work)])
        elif what == "plan prune":
            going_on, failed = chosen.coordinator.attempts
            self.planned_sweep = plan_sweep(
                self.world.url(), dead_attempts=failed, live_attempts=going_on, now=float(EPOCH_S)
            )
        elif what == "prune" and self.planned_sweep is not None:
            delete_leftovers(self.planned_sweep)

    # What must hold.

    @invariant()
    def promises_are_kept(self) -> None:
        for group in self.groups:
            group.check()
        self.world.check()

    def teardown(self) -> None:
        try:
            if self.groups and not self.world.problems:
                self.come_to_an_end()
                self.go_on_afterwards()
        finally:
            left = (one for group in self.groups for one in (*group.unfinished, *group.jobs, *group.steps))
            for fiber in [one for one in left if not one.done]:
                fiber.kill()
            self.stack.close()

    def come_to_an_end(self) -> None:
        """Every rank makes the calls that others have made; all deaths become known; all limits are over."""
        self.drain()
        for group in self.groups:
            for process in group.processes:
                if not process.alive and process in group.members:
                    group.tell_lost(process)
            for agent in group.agents:
                if not agent.alive:
                    group.tell_agent_lost(agent)
            self.drain()
            for _ in range(ROUNDS):
                while any([self.catch_up(group, process) for process in group.members]):
                    self.drain()
                group.pass_time(40)
                self.drain()
                lags = any(group.lags(process) for process in group.members if process.alive)
                if not (lags or group.unfinished or group.jobs):
                    break  # a save that waited for the one before had its own time only since that ended
            for fiber in (*group.unfinished, *group.jobs):
                self.world.wrong(f"{fiber.name} waits for ever at {fiber.place!r}")
            for wait in group.waits:
                if wait.epoch == group.epoch and not wait.future.done():
                    self.world.wrong(f"{wait.call_id}, rank {wait.rank}, {wait.phase!r}: an answer that never comes")
        self.promises_are_kept()

    def catch_up(self, group: Group, process: Process) -> bool:
        """Whether this rank begins a call that others have made."""
        return group.lags(process) and self.start_call(group, process, "save", CHECKPOINTS[0], False) is not None

    def go_on_afterwards(self) -> None:
        """The next save and load work at once."""
        for group in self.groups:
            if not group.processes:
                continue
            if not group.is_whole:
                world_size = len(group.members) % 2 + 1
                self.form(group, world_size, world_size, group.processes[-1].request.incarnation is not None)
            saved = self.all_call(group, "save")
            loaded = self.all_call(group, "load")
            if any(fiber.outcome != saved[0].op.tag for fiber in loaded):
                self.world.wrong(f"{saved[0].name} was saved last, but {[fiber.outcome for fiber in loaded]} loaded")
            self.promises_are_kept()
        for checkpoint in self.world.committed:
            self.world.check_content(checkpoint)
        self.promises_are_kept()

    def all_call(self, group: Group, kind: str) -> list[RankFiber]:
        """Without anything going wrong."""
        self.num_saves += kind == "save"
        # Where ranks have left out calls, one that comes late cannot be told from one that means the next of that name.
        slipped = group.coordinator.generation in group.slipped
        checkpoint = f"step-{100 + self.num_saves:08}" if slipped else CHECKPOINTS[0]
        op = Op(kind, checkpoint, self.num_saves, staged=False)
        fibers = [group.begin(process, op) for process in group.members]
        self.drain()
        for fiber in fibers:
            if isinstance(fiber.outcome, BaseException):
                self.world.wrong(f"afterwards: {fiber.name} ends with {fiber.outcome!r}")
        return fibers

    # Who.

    def start_call(self, group: Group, process: Process, kind: str, checkpoint: str, staged: bool) -> RankFiber | None:
        if not process.alive or process.generation is None or process.busy:
            return None
        return group.begin(process, self.next_op(group, process, kind, checkpoint, staged))

    def next_op(self, group: Group, process: Process, kind: str, checkpoint: str, staged: bool) -> Op:
        self.num_saves += kind == "save"
        if kind == "save" and process.generation in group.slipped:
            checkpoint = f"step-{100 + self.num_saves:08}"  # unlike those that other ranks may be in
        return Op(kind, "" if kind == "barrier" else checkpoint, self.num_saves, staged)

    def runnable(self) -> list[Fiber]:
        return [fiber for group in self.groups for fiber in group.fibers]

    def everybody(self) -> list[Fiber]:
        of_ranks = [one for group in self.groups for fiber in group.unfinished for one in (fiber, *fiber.helpers)]
        others = [one for group in self.groups for one in (*group.jobs, *group.steps)]
        return [one for one in (*of_ranks, *others) if not one.done]

    def pick(self, who: int) -> Fiber | None:
        fibers = self.runnable()
        return fibers[who % len(fibers)] if fibers else None

    def let_run(self, fiber: Fiber, how_far: int, place: str | None = None) -> None:
        Fiber.undisturbed = how_far == TO_ITS_END
        while how_far and fiber.runnable and not (place and fiber.place.startswith(place)):
            fiber.run()
            how_far -= 1
        Fiber.undisturbed = False

    def drain(self) -> None:
        """Until nobody can go on."""
        for _ in range(ROUNDS):
            for fiber in (fibers := self.runnable()):
                self.let_run(fiber, TO_ITS_END)
            if not fibers:
                break
        else:
            self.world.wrong(f"no end: {[(fiber.name, fiber.place) for fiber in fibers]}")
        for group in self.groups:
            group.check_waits()


@pytest.mark.nightly
def test_any_interleaving_keeps_the_promises():
    run_state_machine_as_test(Interleavings, settings=interleavings())


def test_interleavings_that_nobody_has_seen_before_keep_them_too():
    """One that does not is printed as a decorator that repeats it: keep it as a test of its own."""
    run_state_machine_as_test(Interleavings, settings=interleavings(new=70))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.mark.parametrize("reform", [False, True], ids=["", "and the group re-forms"])
def test_a_save_that_all_ranks_have_handed_over_is_committed_when_all_of_them_die(group, reform):
    fibers = [group.begin(process, Op("save", CHECKPOINTS[0], 1, staged=HANDED_OVER)) for process in group.members]
    while not all(fiber.has_handed_over for fiber in fibers):
        next(one for one in group.fibers if one.place != "turn").run()
    for process in list(group.members):
        group.kill(process, delivered=False)
        group.tell_lost(process)
    if reform:
        group.start(1, incarnations=False)
        group.join(group.processes[-1])
    else:
        group.restart_coordinator(steps_go_on=False, lost_answers=255)
    run_all(group)
    assert group.world.committed == {f"/{CHECKPOINTS[0]}": fibers[0].attempt}
    assert [job.deputy.told.failed for agent in group.agents for job in agent.jobs] == [False, False]
    group.world.check()


def group_of(world_size: int, world: World) -> Group:
    group = Group("a", world)
    group.start(world_size, incarnations=False)
    for process in group.processes:
        group.join(process)
    return group


@pytest.fixture
def group(world) -> Iterator[Group]:
    """Two ranks."""
    group = group_of(2, world)
    yield group
    for fiber in group.unfinished:
        fiber.kill()


def run_all(group: Group) -> None:
    while fibers := group.fibers:
        fibers[0].run()


def test_nothing_committed_is_removed_when_the_coordinator_died_before_it_said_so(group):
    for process in group.members:
        group.begin(process, Op("save", CHECKPOINTS[0], 1, staged=False))
    while not group.world.committed or group.steps[-1].runnable:
        next(fiber for fiber in group.fibers if fiber.place != "answer write").run()
    group.restart_coordinator(steps_go_on=False, lost_answers=255)
    group.kill(group.members[1], delivered=False)
    run_all(group)
    group.tell_lost(group.members[1])
    run_all(group)
    group.world.check()


def test_a_part_that_comes_again_when_its_call_is_forgotten_does_not_wait_for_ever(group):
    for _ in range(4):
        for process in group.members:
            group.begin(process, Op("barrier", "", 0, staged=False))
        run_all(group)
    wait = group.waits[0]
    with pytest.raises(GroupError):
        group.deliver(wait.call_id, wait.rank, wait.phase, wait.message)


def test_an_attempt_whose_last_put_failed_after_it_took_effect_is_not_called_failed(group):
    for process in group.members:
        group.begin(process, Op("save", CHECKPOINTS[0], 1, staged=False))
    while not group.steps or group.steps[-1].place != "store put .metadata: done":
        next(fiber for fiber in group.fibers if fiber.place != "answer write").run()
    step = group.steps[-1]
    step.run(step.failure_here())
    run_all(group)
    assert group.world.committed
    assert not group.coordinator.attempts[1]


def test_of_two_attempts_that_began_at_once_the_older_one_by_name_does_not_commit_last(group):
    older, newer = (f"{EPOCH_S * 10**9:016x}{number:08x}" for number in (1, 2))
    for attempt in (older, newer):
        group.world.objects[f"/{CHECKPOINTS[0]}/{ShardFile(0, 0, attempt).key}"] = b""
    store = open_store(group.world.url(CHECKPOINTS[0]))
    with pytest.raises(SupersededError):
        Commit(older).put(store, b"metadata", lambda: b"manifest", files=())


def test_a_save_that_was_given_up_is_not_committed_by_the_next_coordinator(world):
    """It stood still for too long, nobody had told it so yet, and the coordinator that knew has died."""
    group = group_of(1, world)
    fiber = group.begin(group.members[0], Op("save", CHECKPOINTS[0], 1, staged=False))
    with observed_by(lambda point: pause_here(f"point {point.title}")):
        while fiber.place != "point before result":
            next(one for one in group.fibers if one is not fiber or one.place != "point before result").run()
        group.pass_time(6)
        given_up = group.coordinator.attempts[1]
        group.restart_coordinator(steps_go_on=False, lost_answers=0)
        run_all(group)
    assert given_up == {fiber.attempt}
    assert isinstance(fiber.outcome.__cause__, StalledError)
    assert not world.committed
    world.check()


def test_who_asks_again_for_the_answer_to_a_save_that_was_committed_has_it_although_others_are_gone(group):
    """Rank 0 was told that it is committed, goes on, and rank 1 asks a coordinator that can never have all parts."""
    first, second = [group.begin(process, Op("save", CHECKPOINTS[0], 1, staged=False)) for process in group.members]
    while not first.done:
        next(one for one in group.fibers if one is not second or one.place != "answer write").run()
    group.restart_coordinator(steps_go_on=False, lost_answers=255)
    following = group.begin(group.members[0], Op("save", CHECKPOINTS[1], 2, staged=False))
    while not second.done:
        group.fibers[0].run()
    assert group.world.committed == {f"/{CHECKPOINTS[0]}": first.attempt}
    assert encode_metadata(second.outcome) == encode_metadata(first.outcome)
    group.begin(group.members[1], Op("save", CHECKPOINTS[1], 2, staged=False))
    run_all(group)
    assert group.world.committed[f"/{CHECKPOINTS[1]}"] == following.attempt
    group.world.check()
