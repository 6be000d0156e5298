"""A process in which both sides run: a rank of a gloo process group and of a ray_dcp group at once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh

import ray_dcp
from side_by_side.loops import LOOPS, rate_while
from side_by_side.probes import Probes
from side_by_side.sides import SIDES
from side_by_side.states import Layout, Scalars, State, local_tensors
from side_by_side.timed_call import TimedCall, start_together, timed

_IDLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """A load of a rank, and what came of it."""

    call: TimedCall
    differences: list[str]
    """Names of what was not loaded right."""
    needed_nbytes: int
    """Of the tensors that it was to fill."""
    reported_nbytes: int | None
    """Read from storage, as the side says; None where it says nothing. ``call.used`` has the kernel's count."""


@dataclass(frozen=True, slots=True)
class AsyncSave:
    """What an asynchronous save cost a rank."""

    stalled_s: float
    """Until the call returned."""
    staged_s: float
    """From the call until the state could change."""
    durable: TimedCall
    """From the call until the checkpoint was committed and durable."""


@dataclass(frozen=True, slots=True)
class Computed:
    """How many pieces of work a second a rank has done, by itself and beside a save."""

    idle_per_s: float
    meanwhile_per_s: float
    seconds: float
    """From the return of the asynchronous save until the checkpoint was durable."""


class Rank:
    """Both sides save and load the very tensors of this process. Every method is called on all ranks at once."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        group = ray_dcp.current_group()
        assert group is not None, "a RankPool joins its actors to a group before it makes them"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name may resolve to no interface at all
        os.environ.setdefault("MASTER_ADDR", "localhost")  # where the processes that torch saves in find each other
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=group.rank, world_size=group.world_size)
        self._mesh = init_device_mesh("cpu", (group.world_size,))
        self._rank = group.rank
        self._state: State = Scalars(2)
        self._values: dict[str, Any] = {}
        self._probes = Probes(1)
        self._warming_up = True

    def try_out(self, side: str, folder: str) -> None:
        """Import whatever a side imports only when it is used, so that no figure has it in it."""
        state = Scalars(2)
        SIDES[side].save(state.values(Layout.ROWS, self._mesh), folder)
        SIDES[side].load(state.template(Layout.ROWS, self._mesh), folder)

    def expect(self, state: State) -> None:
        """The next loads are of ``state``; nothing is held of it, nor any more of the one before."""
        self._values = {}
        self._probes = Probes(1)
        self._state = state

    def hold(self, state: State) -> None:
        """Make ``state`` this rank's, in place of the one before; the next round is to warm up."""
        self._warming_up = True
        self.expect(state)
        self._values = state.values(Layout.ROWS, self._mesh)
        self._probes = Probes(-(-state.nbytes // self._mesh.size()))

    def end_warm_up(self) -> None:
        self._warming_up = False

    def save(self, side: str, folder: str) -> TimedCall:
        return timed(lambda: SIDES[side].save(self._values, folder), trim=self._warming_up)

    def save_unsynced(self, side: str, folder: str) -> TimedCall:
        return timed(lambda: SIDES[side].save_unsynced(self._values, folder), trim=self._warming_up)

    def load(self, side: str, folder: str, layout: Layout) -> Load:
        template = self._state.template(layout, self._mesh)
        reported: list[int | None] = []
        call = timed(lambda: reported.append(SIDES[side].load(template, folder)), trim=self._warming_up)
        needed_nbytes = sum(tensor.nbytes for tensor in local_tensors(template))
        return Load(call, self._state.differences(template, layout, self._mesh), needed_nbytes, reported[0])

    def async_save(self, side: str, folder: str, spoil: bool = True) -> AsyncSave:
        """The state is spoilt as soon as it may change: what is saved must be what it was at the call.

        Unless it is not to be: to make it anew takes memory.
        """
        use = start_together(trim=self._warming_up)
        start_s = time.monotonic()
        staged, until_durable = SIDES[side].async_save(self._values, folder)
        stalled_s = time.monotonic() - start_s
        if staged is not None:
            staged.result()
        staged_s = time.monotonic() - start_s
        for tensor in local_tensors(self._values) if spoil else ():
            tensor.fill_(torch.nan)
        until_durable.result()
        durable = TimedCall(start_s, time.monotonic(), use.so_far())
        if spoil:
            self._values = self._state.values(Layout.ROWS, self._mesh)
        return AsyncSave(stalled_s, staged_s, durable)

    def warm_up(self, side: str, folder: str) -> None:
        SIDES[side].warm_up(self._values, folder)

    def pid(self) -> int:
        return os.getpid()

    def compute_while_saving(self, side: str, folder: str, loop: str) -> Computed:
        """``loop`` of ``LOOPS`` beside nothing, then beside an asynchronous save."""
        piece = LOOPS[loop]()
        start_together(trim=False)
        idle_until_s = time.monotonic() + _IDLE_S
        idle_per_s = rate_while(piece, lambda: time.monotonic() < idle_until_s)
        start_together(trim=False)
        _, until_durable = SIDES[side].async_save(self._values, folder)
        returned_s = time.monotonic()
        meanwhile_per_s = rate_while(piece, lambda: not until_durable.done())
        seconds = time.monotonic() - returned_s
        until_durable.result()
        return Computed(idle_per_s, meanwhile_per_s, seconds)

    def differences_in(self, folder: str) -> list[str]:
        """Names of what is wrong in a checkpoint, as torch's own load reads it."""
        template = self._state.template(Layout.ROWS, self._mesh)
        torch_dcp.load(template, checkpoint_id=folder)
        return self._state.differences(template, Layout.ROWS, self._mesh)

    def probe(self, name: str, folder: str) -> TimedCall | None:
        """One of ``Probes``; None where it cannot be done."""
        path = f"{folder}/{self._rank}"
        possible: list[bool] = []
        call = timed(lambda: possible.append(getattr(self._probes, name)(path)))
        return call if all(possible) else None
