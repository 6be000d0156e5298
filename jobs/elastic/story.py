"""The course of events: training, a death, training on, a node more, training to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

import ray

from elastic.board import WorkerStarted
from elastic.executioner import Executioner
from elastic.local_nodes import LocalNodes
from elastic.record import RunRecord
from ray_dcp.format.names import step_folder

_SETTLED_AFTER_STEPS = 3


class Kill(Enum):
    """When the death comes."""

    STEP = "step"
    SAVE = "save"
    NONE = "none"


class Act(Enum):
    """How far the story has come."""

    BEFORE_DEATH = "training"
    DYING = "a death is due"
    AFTER_DEATH = "waiting for the run to resume"
    ONE_MORE_NODE = "waiting for the run to grow"
    LAST = "training to the end"


class Story:
    """Turns what was noted so far into what is done next. ``say`` gets one line for each thing done."""

    def __init__(
        self,
        record: RunRecord,
        *,
        kill: Kill,
        kill_step: int,
        whole_node: bool,
        root: str,
        nodes: LocalNodes | None,
        say: Callable[[str], None],
    ) -> None:
        self.act = Act.LAST if kill is Kill.NONE else Act.BEFORE_DEATH
        self.killed_at: float | None = None
        self._record = record
        self._kill = kill
        self._kill_step = kill_step
        self._whole_node = whole_node
        self._root = root
        self._nodes = nodes
        self._say = say
        self._executioner: Executioner | None = None
        self._num_before_death = 0

    def go_on(self) -> None:
        """Do what is due; call it often, from the main thread."""
        if self.act is Act.BEFORE_DEATH:
            self._send_executioner()
        elif self.act is Act.DYING:
            self._kill_when_due()
        elif self.act is Act.AFTER_DEATH:
            self._add_node_when_resumed()
        elif self.act is Act.ONE_MORE_NODE and self._trained_since_death(self._num_before_death):
            self._say(f"grown back to {self._record.trained[-1].world_size} workers")
            self.act = Act.LAST

    def _send_executioner(self) -> None:
        if not self._record.stretches or not self._record.stretches[0].is_complete:
            return
        first = self._record.stretches[0]
        victim = choose_victim(first.started, spare_node_id=ray.get_runtime_context().get_node_id())
        if self._whole_node and victim.node_id == ray.get_runtime_context().get_node_id():
            raise RuntimeError("every worker is on this program's own node: there is no other node to kill")
        self._executioner = Executioner(victim.node_id, worker_pid=victim.pid, whole_node=self._whole_node)
        self._num_before_death = first.world_size
        if self._kill is Kill.SAVE:
            self._executioner.kill_while_saving(self._root, step_folder(self._kill_step))
        self.act = Act.DYING

    def _kill_when_due(self) -> None:
        assert self._executioner is not None
        last = self._record.last_step
        if last is None or last.step < self._kill_step:
            return
        if self._kill is Kill.STEP:
            self._executioner.kill_now()
        self.killed_at = time.time()
        victim = "a node" if self._whole_node else "a worker"
        moment = f"during step {last.step + 1}" if self._kill is Kill.STEP else f"while it saves step {self._kill_step}"
        self._say(f"killed {victim} with SIGKILL {moment}")
        self.act = Act.AFTER_DEATH

    def _add_node_when_resumed(self) -> None:
        if self._nodes is not None:
            self._nodes.forget_killed_nodes()
        if not self._trained_since_death(1):
            return
        self._say(f"training goes on with {self._record.trained[-1].world_size} workers")
        if self._nodes is None or not self._whole_node:
            # Who runs that cluster adds nodes; what is killed alone is started again by itself.
            self.act = Act.LAST
            return
        self._nodes.add_node()
        self._say("added a node")
        self.act = Act.ONE_MORE_NODE

    def _trained_since_death(self, min_workers: int) -> bool:
        trained = self._record.trained
        if len(trained) < 2 or trained[-1].world_size < min_workers:
            return False
        return len(trained[-1].steps) >= _SETTLED_AFTER_STEPS


def choose_victim(workers: list[WorkerStarted], *, spare_node_id: str) -> WorkerStarted:
    """Choose the worker of the highest rank, if there is one on another node than ``spare_node_id``: there."""
    return max(workers, key=lambda worker: (worker.node_id != spare_node_id, worker.rank))
