"""Kills, the hard way: an actor on the doomed node, so that it works on any cluster."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LOOK_EVERY_S = 0.001


class _Executioner:
    """Runs on the doomed node; its parent process is that node's raylet."""

    def aim(self, worker_pid: int, whole_node: bool) -> None:
        self._worker_pid = worker_pid
        self._raylet_pid = os.getppid() if whole_node else None

    def kill(self) -> None:
        if self._raylet_pid is None:
            os.kill(self._worker_pid, signal.SIGKILL)
            return
        # The raylet is held first: it would report the deaths of its workers, as a node that loses power does not.
        os.kill(self._raylet_pid, signal.SIGSTOP)
        os.kill(self._worker_pid, signal.SIGKILL)
        _kill_family(self._raylet_pid)

    def kill_while_saving(self, root: str, folder: str) -> None:
        """Wait until shard files of a checkpoint appear, then kill."""
        from ray_dcp.format.names import METADATA, parse_shard_file
        from ray_dcp.store.open import open_store

        store = open_store(root)
        while True:
            names = [stored.key.rpartition("/")[2] for stored in store.list(folder)]
            if METADATA in names or any(parse_shard_file(name) for name in names):
                break
            time.sleep(_LOOK_EVERY_S)
        self.kill()


def _kill_family(raylet_pid: int) -> None:
    """Kill a raylet and all its processes, this one last."""
    import psutil  # Ray brings it

    raylet = psutil.Process(raylet_pid)
    others = [child for child in raylet.children(recursive=True) if child.pid != os.getpid()]
    for process in (raylet, *others):
        with suppress(psutil.Error):
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


class Executioner:
    """Kills one worker process, or the whole node it runs on."""

    def __init__(self, node_id: str, *, worker_pid: int, whole_node: bool) -> None:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._actor: Any = ray.remote(num_cpus=0)(_Executioner).options(scheduling_strategy=there).remote()
        ray.get(self._actor.aim.remote(worker_pid, whole_node), timeout=60)

    def kill_now(self) -> None:
        self._actor.kill.remote()

    def kill_while_saving(self, root: str, folder: str) -> None:
        """Arm it for one save, which has not begun."""
        self._actor.kill_while_saving.remote(root, folder)
