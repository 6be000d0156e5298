"""A program of its own: ranks on three nodes of this machine, whose agents copy what is staged, lose two of them.

Prints one JSON line a part: where each rank's bytes came from, after how many seconds, and what else there is to see.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

_NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
_ZONES = ("west", "west", "east")
_COLUMNS = 1_500_000
"""So many that a rank's file takes two chunks."""
_ONE_SLOW_COPY = {"RAY_DCP_AGENT_WRITE_RATE": str(2**20), "RAY_DCP_REPLICAS": "1"}


def main() -> None:
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0", RAY_DCP_REPLICAS="1")
    with tempfile.TemporaryDirectory(prefix="lc-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # a short name: Ray's sockets are in there
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_NODE})
        try:
            lose_copies(cluster, Path(folder) / "root")
        finally:
            import ray

            ray.shutdown()
            cluster.shutdown()


def lose_copies(cluster, root: Path) -> None:
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    nodes = [
        cluster.add_node(num_cpus=1, resources={f"node{number}": 1}, labels={"ray.io/availability-zone": zone}, **_NODE)
        for number, zone in enumerate(_ZONES)
    ]
    cast = Group3()
    for step in (0, 1):
        cast.save(root / f"{step}", float(step))
        copies = cast.copies(root / f"{step}")
    place = root / "1"
    hide_shards(place)
    print(json.dumps({"part": "copies", "held": copies, "zones": _ZONES}), flush=True)
    told("all live", cast.load(place, 1.0, 3))

    lose_node(cluster, nodes[1], cast, 1)
    cast.form()
    told("a node is lost", cast.load(place, 1.0, 3))

    for actor in cast.actors:
        ray.get(actor.call.remote(os.environ.update, _ONE_SLOW_COPY), timeout=within(60))
    cast.save(root / "2", 2.0)
    began = time.monotonic()
    held = cast.held(root / "2")
    lose_node(cluster, nodes[2], cast, 1)
    cast.form()
    told("a node is lost before its copy is made", cast.load(root / "2", 2.0, 2), held=held)
    told("what was copied before is not wanted", cast.load(root / "0", 0.0, 3), seconds=time.monotonic() - began)
    cast.save(root / "3", 3.0)
    hide_shards(root / "3")
    told("one node is left", cast.load(root / "3", 3.0, 1))
    print(json.dumps({"part": "descriptors", "of_agents": cast.buffers()}), flush=True)


def told(part: str, loads, **more) -> None:
    print(json.dumps({"part": part, "by_place": [by for by, _ in loads], "took_s": [s for _, s in loads], **more}),
          flush=True)  # fmt: skip


def lose_node(cluster, node, cast, rank: int) -> None:
    """Kill all of a node at once: its raylet, its rank and its agent."""
    pids = [node.all_processes["raylet"][0].process.pid, cast.pids[rank], cast.agent_pids()[rank]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    del cast.actors[rank]


def hide_shards(place: Path) -> None:
    for path in place.glob("*.distcp"):
        path.rename(f"{path}.hidden")


def save_rank(rank, world_size, place, value):
    rows = torch.arange(float(_COLUMNS)) + value + 10 * rank
    shards = dcp.LocalShards((world_size, _COLUMNS), {(rank, 0): rows[None]})
    dcp.async_save({"rows": shards, "n": value, "all": torch.full((5,), value)}, checkpoint_id=place).result(within(90))


def load_rank(rank, world_size, place, value, saved_by):
    """Where the bytes of all rows came from, on every rank, and how long it took."""
    rows = torch.full((saved_by, _COLUMNS), float("nan"))
    state = {"rows": dcp.LocalShards(tuple(rows.shape), {(0, 0): rows}), "n": None, "all": torch.zeros(5)}
    began = time.monotonic()
    report = dcp.load(state, checkpoint_id=place)
    took_s = time.monotonic() - began
    for number, row in enumerate(rows):
        assert torch.equal(row, torch.arange(float(_COLUMNS)) + value + 10 * number)
    assert (state["n"], state["all"].tolist()) == (value, [value] * 5)
    return dict(report.nbytes_by_place), took_s


def node_of(rank, world_size):
    return ray.get_runtime_context().get_node_id()


def held_in(agent, place):
    return sorted(parse_shard_file(file.key).rank for file in agent._agent.memory.held(place))


def pid_of(agent):
    return os.getpid()


def buffers_of(agent):
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        if os.path.islink(path) and "ray_dcp_staging" in os.readlink(path):
            links.append(os.stat(path).st_ino)
    return len(set(links))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

    import ray
    import torch

    import ray_dcp as dcp
    from ray_dcp.cluster.agent.peer_agents import agent_name
    from ray_dcp.format.names import parse_shard_file
    from ray_dcp.settings import Limits
    from tests.faults.scene import Rank, wait_until
    from tests.slack import within

    class Group3:
        """A rank on each node."""

        def __init__(self) -> None:
            self.actors = [Rank.options(resources={f"node{number}": 0.1}).remote() for number in range(3)]
            self.form()

        def form(self) -> None:
            size = len(self.actors)
            joins = [actor.join.remote("copied", rank, size, Limits()) for rank, actor in enumerate(self.actors)]
            self.pids = ray.get(joins, timeout=within(120))
            self.nodes = self.do(node_of)

        def do(self, function, *args) -> list:
            return ray.get([actor.do.remote(function, *args) for actor in self.actors], timeout=within(120))

        def save(self, place: Path, value: float) -> None:
            self.do(save_rank, str(place), value)

        def load(self, place: Path, value: float, saved_by: int) -> list:
            return self.do(load_rank, str(place), value, saved_by)

        def of_agents(self, function, *args) -> list:
            agents = [ray.get_actor(agent_name("copied", node), namespace="ray_dcp") for node in self.nodes]
            return ray.get([agent.__ray_call__.remote(function, *args) for agent in agents], timeout=within(60))

        def held(self, place: Path) -> list[list[int]]:
            return self.of_agents(held_in, str(place))

        def copies(self, place: Path) -> list[list[int]]:
            """What each node has in memory, once every file is there twice."""
            wait_until(lambda: sum(map(len, self.held(place))) == 2 * len(self.actors))
            return self.held(place)

        def agent_pids(self) -> list[int]:
            return self.of_agents(pid_of)

        def buffers(self) -> list[int]:
            return self.of_agents(buffers_of)

    main()
