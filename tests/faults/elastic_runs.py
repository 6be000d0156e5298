"""A program of its own: a training that loses nodes and gains nodes, several times, as a RankPool or a TorchTrainer.

``elastic_runs.py pool|small-pool|trainer FOLDER LOSS...`` keeps its checkpoints in FOLDER/run and prints one JSON
object: who was lost when, the world sizes over time, how many steps were done more than once, and whether the result is
as if nothing had happened. After every load each rank compares all that it has with a training of its own, up to that
step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import ray_dcp as dcp
from ray_dcp import LocalShards, PerRank, RankPool, trace_points
from ray_dcp.errors import RankLostError
from ray_dcp.trace_points import Point

ROWS, COLUMNS = 7, 64
"""Columns fill whole vector registers: each element is computed alike however the rows are split, to the last bit."""
NUM_STEPS = 36
SAVE_EVERY = 3
REDUCED_STEPS = 4
LOSSES = ("async save", "load", "step", "save")
"""All of them, in this order, each once. The load is the one that the loss before it makes necessary."""
HOLD_S = 120.0
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": os.environ.get("RAY_DCP_TEST_HEALTH_CHECK_MS", "2000"),
    "RAY_health_check_failure_threshold": "3",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


class Learner:
    """A rank's rows of a parameter, with all that a step changes. A DCP ``Stateful``."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.first, self.last = ROWS * rank // world_size, ROWS * (rank + 1) // world_size
        self.step, self.cursor = 0, 1
        self.weight = torch.nn.Parameter(self._mine(0))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.05)
        self.moments: dict[str, torch.Tensor] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(self.weight.detach()),
            "exp_avg_sq": torch.zeros_like(self.weight.detach()),
        }
        self.optimizer.state[self.weight] = self.moments
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=2 * NUM_STEPS)

    def _mine(self, seed: int) -> torch.Tensor:
        whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
        return whole[self.first : self.last].clone()

    def train_one_step(self, midway: Callable[[], None] = lambda: None) -> None:
        """``midway`` is called when the model has changed and the rest has not."""
        self.weight.grad = self.weight.detach() - self._mine(self.cursor)
        self.optimizer.step()
        midway()
        self.schedule.step()
        self.cursor = (self.cursor * 1103515245 + 12345) % 2**31
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        def shards(rows: torch.Tensor) -> LocalShards:
            return LocalShards((ROWS, COLUMNS), {(self.first, 0): rows})

        return {
            "model": {"weight": shards(self.weight.detach())},
            "optimizer": {
                "exp_avg": shards(self.moments["exp_avg"]),
                "exp_avg_sq": shards(self.moments["exp_avg_sq"]),
                "step": self.moments["step"],
                "groups": self.optimizer.state_dict()["param_groups"],
            },
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "position": {"cursor": self.cursor},
            "own": PerRank({"rank": self.rank, "step": self.step, "cursor": self.cursor}, reshard=pick_own),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The rows and moments were filled in place. The optimizer's groups bring the learning rate.
        groups = state["optimizer"]["groups"]
        self.optimizer.load_state_dict({"state": {0: self.moments}, "param_groups": groups})
        self.moments = self.optimizer.state[self.weight]
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        self.cursor = state["position"]["cursor"]
        own = state["own"].value
        if own != {"rank": own["rank"], "step": self.step, "cursor": self.cursor}:
            raise AssertionError(f"at step {self.step} with cursor {self.cursor}, the rank's own values are {own}")

    def require_whole(self) -> None:
        """Raises unless everything is what a training in one process has after ``self.step`` steps."""
        other = Learner()
        while other.step < self.step:
            other.train_one_step()
        mine = slice(self.first, self.last)
        same = {
            "model": torch.equal(self.weight, other.weight[mine]),
            "exp_avg": torch.equal(self.moments["exp_avg"], other.moments["exp_avg"][mine]),
            "exp_avg_sq": torch.equal(self.moments["exp_avg_sq"], other.moments["exp_avg_sq"][mine]),
            "optimizer step": self.moments["step"].item() == self.step,
            "groups": self.optimizer.state_dict()["param_groups"] == other.optimizer.state_dict()["param_groups"],
            "schedule": self.schedule.state_dict() == other.schedule.state_dict(),
            "cursor": self.cursor == other.cursor,
        }
        if not all(same.values()):
            wrong = [name for name, is_same in same.items() if not is_same]
            raise AssertionError(f"rank {self.rank} of {self.world_size}: not of step {self.step}: {wrong}")


def pick_own(values: list[Any], rank: int, world_size: int) -> Any:
    """What another number of ranks saved: all of one step, in rank order."""
    first = values[0]
    if values != [{**first, "rank": saver} for saver in range(len(values))]:
        raise AssertionError(f"ranks saved values of several steps: {values}")
    return values[rank % len(values)]


class Story:
    """What has happened to the run: in files, so that any process can add to it and dead ones have."""

    def __init__(self, folder: Path, full_size: int, losses: list[str]) -> None:
        self._folder = folder
        self._losses = losses
        self._events = folder / "events"
        self.full_size = full_size

    def note(self, event: str, **details: Any) -> None:
        line = json.dumps({"event": event, "at": time.time(), **details}) + "\n"
        opened = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(opened, line.encode())
        os.close(opened)

    def events(self, *wanted: str) -> list[dict[str, Any]]:
        """In the order in which they were noted."""
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [noted for line in lines if (noted := json.loads(line))["event"] in wanted]

    def next_loss(self) -> str | None:
        return next((loss for loss in self._losses if not self._marker(loss).exists()), None)

    def claim(self, loss: str) -> None:
        """Raises ``FileExistsError`` unless this process is the first: each loss happens once."""
        self._marker(loss).touch(exist_ok=False)

    def _marker(self, loss: str) -> Path:
        return self._folder / f"lost in {loss}"


class Rank:
    """One rank of the training, in its process; it may take its node along."""

    def __init__(self, story: Story, checkpoints: dcp.CheckpointManager, report: Callable[[Any], None]) -> None:
        torch.set_num_threads(1)
        group = dcp.current_group()
        self._story = story
        self._checkpoints = checkpoints
        self._report = report
        self._thread = threading.get_ident()
        self._generation = group.generation
        self._learner = Learner(group.rank, group.world_size)
        self._is_full = group.world_size == story.full_size
        self._resumed_at = 0
        trace_points.observe(self._observe)  # to the end of this process

    def resume(self) -> None:
        self._note("formed")
        found = self._checkpoints.load({"learner": self._learner})
        self._resumed_at = self._learner.step
        if self._resumed_at != (found or 0):
            raise AssertionError(f"loaded step {found}, now at step {self._resumed_at}")
        self._learner.require_whole()
        self._note("resumed")

    def train(self) -> bool:
        """Whether the end was reached. With nodes missing it stops after a few steps, a save still under way."""
        learner = self._learner
        while learner.step < NUM_STEPS:
            learner.train_one_step(self._midway)
            if learner.rank == 0:
                self._note("step")
            if learner.step % SAVE_EVERY:
                continue
            if learner.step // SAVE_EVERY % 2:
                info = self._checkpoints.save(learner.step, {"learner": learner})
                self._note("saved")
                self._report(info)
                continue
            self._checkpoints.async_save(learner.step, {"learner": learner})
            # The node's agent has it by now, and dies with the node.
            self._lose_node_in("async save", victim=learner.world_size - 1)
            if not self._is_full and learner.step >= self._resumed_at + REDUCED_STEPS:
                self._note("reduced")
                return False
        self._checkpoints.close()
        learner.require_whole()
        if self._story.next_loss() is not None:
            raise AssertionError(f"at the end, and nothing was lost in {self._story.next_loss()}")
        return True

    def save_until_stopped(self) -> None:
        """Save this step again and again, so that whoever stops this process is likely to do it in a save."""
        deadline = time.monotonic() + HOLD_S
        while time.monotonic() < deadline:
            self._checkpoints.async_save(self._learner.step, {"learner": self._learner})
            time.sleep(0.05)
        raise AssertionError(f"the run did not grow within {HOLD_S:g} s")

    def weight(self) -> torch.Tensor:
        return self._learner.weight.detach()

    def _note(self, event: str, **details: Any) -> None:
        learner = self._learner
        place = {"generation": self._generation, "rank": learner.rank, "world_size": learner.world_size}
        self._story.note(event, step=learner.step, **place, **details)

    def _midway(self) -> None:
        if self._learner.step >= self._resumed_at + 1 and self._learner.step % SAVE_EVERY == 1:
            self._lose_node_in("step", victim=0)

    def _observe(self, point: Point) -> None:
        in_background = threading.get_ident() != self._thread
        if point is Point.MID_READ:
            self._lose_node_in("load", victim=0)
        elif point is Point.MID_WRITE and not in_background and self._learner.step > SAVE_EVERY:
            self._lose_node_in("save", victim=self._learner.world_size - 1)

    def _lose_node_in(self, loss: str, victim: int) -> None:
        """If it is this one's turn, and this rank is the victim: its whole node dies, at once."""
        is_due = self._learner.rank == victim and (self._is_full or loss == "load")
        if not is_due or self._story.next_loss() != loss:
            return
        import psutil  # Ray brings it

        self._story.claim(loss)
        self._note("lost", loss=loss)
        raylet = psutil.Process(os.getppid())
        if raylet.name() != "raylet":
            raise AssertionError(f"the parent of a worker is {raylet.name()}")
        # The raylet is held first: it would report the deaths of its workers, as a node that loses power does not.
        raylet.suspend()
        for process in [p for p in raylet.children(recursive=True) if p.pid != os.getpid()]:
            process.kill()
        raylet.kill()
        os.kill(os.getpid(), signal.SIGKILL)


class PoolRank:
    """A rank of the pool; it resumes in its constructor."""

    def __init__(self, story: Story, root: str) -> None:
        self._rank = Rank(story, dcp.CheckpointManager(root), report=lambda info: None)
        self._rank.resume()

    def train(self) -> bool:
        return self._rank.train()

    def weight(self) -> torch.Tensor:
        return self._rank.weight()


def train_in_pool(nodes: Nodes, story: Story, root: Path) -> torch.Tensor:
    """Whenever ranks are lost the pool re-forms on what is there; a few steps later it grows, while it saves."""
    pool = RankPool(PoolRank, story, str(root), name="elastic-runs", min_ranks=1, max_ranks=story.full_size)
    form: Callable[[], int] = pool.start
    while True:
        try:
            if form() < story.full_size:
                nodes.fill_up(story.full_size)
            if all(pool.run("train")):
                break
        except RankLostError as error:
            story.note("rank lost error", lost=error.lost)
        form = pool.restart
    weight = torch.cat(pool.run("weight"))
    pool.shutdown()
    return weight


def train_as_worker(config: dict[str, Any]) -> None:
    import ray.train

    from ray_dcp.train import report

    # Without a root it works in the run's experiment folder.
    rank = Rank(config["story"], dcp.CheckpointManager(), report=lambda info: report({"step": info.step}, info))
    rank.resume()
    if not rank.train():
        rank.save_until_stopped()
    torch.save(rank.weight(), config["folder"] / f"weight-{ray.train.get_context().get_world_rank()}")


def train_in_trainer(nodes: Nodes, story: Story, root: Path) -> torch.Tensor:
    """Ray Train restarts the workers with what is there; a few steps later there is another node."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ray_dcp.train import CheckpointCallback

    trainer = TorchTrainer(
        train_as_worker,
        train_loop_config={"story": story, "folder": root.parent},
        scaling_config=ScalingConfig(num_workers=(1, story.full_size), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            name=root.name,
            storage_path=str(root.parent),
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[CheckpointCallback()],
        ),
    )
    raised: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            raised.append(error)

    fitting = threading.Thread(target=fit, daemon=True)
    fitting.start()
    num_grown = 0
    while fitting.is_alive():
        fitting.join(0.2)
        # Nodes can be added in the main thread only.
        if len(story.events("reduced")) > num_grown:
            num_grown += 1
            nodes.fill_up(story.full_size)
    if raised:
        raise raised[0]
    weights = sorted(root.parent.glob("weight-*"))
    return torch.cat([torch.load(weight) for weight in weights])


class Nodes:
    """A cluster on this machine: a head that takes no ranks, and nodes for one rank each."""

    def __init__(self, num_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
        self.address = self._cluster.address
        self.fill_up(num_nodes)

    def fill_up(self, num_nodes: int) -> None:
        """Add nodes until there are ``num_nodes``; those that were killed do not count."""
        for node in list(self._cluster.worker_nodes):
            if node.dead_processes():
                self._cluster.remove_node(node, allow_graceful=False)
        while len(self._cluster.worker_nodes) < num_nodes:
            self._cluster.add_node(num_cpus=1, **NODE)

    def shut_down(self) -> list[str]:
        """The names of processes that did not end, and have been killed now."""
        import psutil  # Ray brings it

        processes = psutil.Process().children(recursive=True)
        self._cluster.shutdown()
        _, alive = psutil.wait_procs(processes, timeout=20)
        names = [process.name() for process in alive]
        for process in alive:
            process.kill()
        return names


def run(mode: str, folder: Path, losses: list[str]) -> dict[str, Any]:
    import ray

    started = time.monotonic()
    train, full_size, num_nodes = {
        "pool": (train_in_pool, 3, 3),
        "small-pool": (train_in_pool, 2, 2),
        "trainer": (train_in_trainer, 2, 3),
    }[mode]
    # One more than the trainer takes: it loses a node and goes on with two, then loses one while these load.
    nodes, story = Nodes(num_nodes), Story(folder, full_size, losses)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        weight = train(nodes, story, folder / "run")
    finally:
        ray.shutdown()
        left = nodes.shut_down()
    reference = Learner()
    while reference.step < NUM_STEPS:
        reference.train_one_step()
    return {
        **what_happened(story),
        "is_equal": torch.equal(weight, reference.weight.detach()),
        "processes_left": left,
        "seconds": round(time.monotonic() - started, 1),
    }


def by_forming(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Those of each forming of the group. Generations count from 1 again where a coordinator has ended in between."""
    return [list(one) for _, one in groupby(events, key=lambda noted: (noted["generation"], noted["world_size"]))]


def what_happened(story: Story) -> dict[str, Any]:
    saved, forgotten = 0, []
    for noted in story.events("saved", "resumed"):
        if noted["event"] == "saved":
            saved = noted["step"]
        elif noted["step"] < saved:
            forgotten.append([saved, noted["step"]])
    steps = [noted["step"] for noted in story.events("step")]
    return {
        "world_sizes": [one[0]["world_size"] for one in by_forming(story.events("formed"))],
        "resumed_at": [sorted({noted["step"] for noted in one}) for one in by_forming(story.events("resumed"))],
        "losses": [[noted["loss"], noted["world_size"], noted["step"]] for noted in story.events("lost")],
        "forgotten": forgotten,
        "steps_repeated": len(steps) - len(set(steps)),
        "steps_missing": sorted(set(range(1, NUM_STEPS + 1)) - set(steps)),
    }


def main() -> None:
    mode, folder, *losses = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory(prefix="er-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        os.environ["RAY_TMPDIR"] = temporary  # a short name: Ray's sockets are in there
        print(json.dumps(run(mode, Path(folder), losses)))


if __name__ == "__main__":
    main()
