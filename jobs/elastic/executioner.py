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

    def aim(self) -> bool:
        import psutil

        self._raylet = psutil.Process(os.getppid())
        return True

    def kill_process(self, pid: int) -> float:
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def kill_node(self) -> None:
        import psutil

        mine = os.getpid()
        # The raylet first: it would report the deaths of its workers, which a node that loses power does not do.
        others = [child for child in self._raylet.children(recursive=True) if child.pid != mine]
        for process in (self._raylet, *others):
            with suppress(psutil.Error):
                process.kill()
        os.kill(mine, signal.SIGKILL)

    def kill_while_saving(self, root: str, folder: str, pid: int | None) -> None:
        """Wait until shard files of a checkpoint appear, then kill: the process ``pid``, or the node when None."""
        from ray_dcp.layout import METADATA, parse_shard_file
        from ray_dcp.storage.open import open_store

        store = open_store(root)
        while True:
            names = [stored.key.rpartition("/")[2] for stored in store.list(folder)]
            if METADATA in names or any(parse_shard_file(name) for name in names):
                break
            time.sleep(_LOOK_EVERY_S)
        if pid is None:
            self.kill_node()
        else:
            self.kill_process(pid)


class Executioner:
    """Kills one worker process, or the whole node it runs on."""

    def __init__(self, node_id: str, *, worker_pid: int, whole_node: bool) -> None:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self.node_id = node_id
        self.worker_pid = worker_pid
        self.whole_node = whole_node
        # Two calls at once: to wait for a save must not keep it from killing at once.
        self._actor: Any = (
            ray.remote(num_cpus=0)(_Executioner).options(scheduling_strategy=there, max_concurrency=2).remote()
        )
        ray.get(self._actor.aim.remote(), timeout=60)

    def kill_now(self) -> None:
        if self.whole_node:
            self._actor.kill_node.remote()
        else:
            self._actor.kill_process.remote(self.worker_pid)

    def kill_while_saving(self, root: str, folder: str) -> None:
        """Arm it for one save, which has not begun."""
        self._actor.kill_while_saving.remote(root, folder, None if self.whole_node else self.worker_pid)
