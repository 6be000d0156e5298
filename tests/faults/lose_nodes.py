"""A program of its own: a cluster of several nodes on this machine, of which one is lost at each of the given points.

``lose_nodes.py fast|default POINT...``, where a point is ``mid write``, say, or ``freeze: mid write``: the node is not
killed but stopped, and continued when the group has re-formed without it and saved. Prints one JSON line a point: how
the surviving rank's call ended, after how many seconds, and what is left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

FAST = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": os.environ.get("RAY_DCP_TEST_HEALTH_CHECK_MS", "2000"),
    "RAY_health_check_failure_threshold": "3",
}


def main() -> None:
    flags, *titles = sys.argv[1:]
    if flags == "fast":
        os.environ.update(FAST)
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0")
    with tempfile.TemporaryDirectory(prefix="ln-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # a short name: Ray's sockets are in there
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_NODE})
        try:
            lose_nodes(cluster, titles, Path(folder) / "root")
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()


_NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


def lose_nodes(cluster, titles: list[str], root: Path) -> None:
    import ray

    from ray_dcp.trace_points import Point

    ray.init(address=cluster.address, log_to_driver=False)
    nodes = [cluster.add_node(num_cpus=1, resources={f"node{number}": 1}, **_NODE) for number in (0, 1)]
    cast = PinnedCast("losing-nodes", ["node0", "node1"])
    for number, given in enumerate(titles):
        freeze, _, title = given.rpartition(": ")
        point, how = Point.titled(title), signal.SIGSTOP if freeze else signal.SIGKILL
        other, place, stamp = root / f"{number}" / "step-1", root / f"{number}" / "step-2", root / f"when-{number}"
        lost, lost_pid = nodes[-1], cast.pids[1]
        raylet_pid = lost.all_processes["raylet"][0].process.pid
        print(json.dumps(lose_one(cast, point, (raylet_pid, lost_pid), how, other, place, stamp)), flush=True)
        if not freeze:
            cluster.remove_node(lost, allow_graceful=False)
        name = f"node{number + 2}"
        nodes[-1] = cluster.add_node(num_cpus=1, resources={name: 1}, **_NODE)
        cast.start_again(1, name)
        cast.save(place, 4.0)
        if freeze:
            wake_up(lost_pid, raylet_pid)
            cluster.remove_node(lost, allow_graceful=False)
        assert (value_at(str(other), 2), value_at(str(place), 2)) == (1.0, 4.0)


def wake_up(rank_pid: int, raylet_pid: int) -> None:
    """Return when the rank, which has gone on where it was stopped, is gone: its raylet learns that it is dead."""
    import psutil

    rank = psutil.Process(rank_pid)
    os.kill(rank_pid, signal.SIGCONT)
    time.sleep(1.0)  # time in which it can do harm
    os.kill(raylet_pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)


def lose_one(cast, point, pids: tuple[int, int], how: int, other: Path, place: Path, stamp: Path) -> dict:
    cast.save(other, 1.0)
    cast.save(place, 2.0)
    cast.arm_loss_of_node(point, pids, how, stamp)
    function, value = (load_at, 2.0) if point.number >= Point.AFTER_OPEN.number else (save_at, 3.0)
    outcomes = cast.outcomes(cast.start(function, str(place), value), stamp, without=(1,))
    (outcome,) = outcomes.by_rank.values()
    return {
        "point": ("freeze: " if how == signal.SIGSTOP else "") + point.title,
        "seconds": round(outcomes.seconds, 2),
        "outcome": outcome if isinstance(outcome, str) else str(outcome)[:300],
        "failed_ranks": list(getattr(outcome, "failed_ranks", ())),
        "left": [value_at(str(other), 2), value_at(str(place), 2)],
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

    from ray_dcp.trace_points import Point
    from tests.faults.scene import Cast, Rank, load_at, save_at, value_at

    class PinnedCast(Cast):
        """Ranks each on a node of its own, and no spare."""

        def __init__(self, name: str, nodes: list[str]) -> None:
            super().__init__(name, actors=[Rank.options(resources={node: 0.1}).remote() for node in nodes])

        def start_again(self, rank: int, node: str) -> None:
            self.actors[rank] = Rank.options(resources={node: 0.1}).remote()
            self.form()

        def arm_loss_of_node(self, point: Point, pids: tuple[int, int], how: int, stamp: Path) -> None:
            """Rank 1 and the raylet of its node are killed or stopped when somebody comes to the point."""

            def lose_node() -> None:
                for pid in pids:
                    os.kill(pid, how)

            self.arm_action(point, lose_node, stamp)

    main()
