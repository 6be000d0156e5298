"""Checkpoints of plain Ray actors, at any number of ranks, without torch.distributed.

Each actor owns some rows of a weight matrix. Four of them save; then 1, 2, 3 and 7 load the same checkpoint, and each
count checks that its rows are the ones it should have. Run it alone, or against a cluster:

    python jobs/elastic_actors.py
    ray job submit --working-dir . -- python jobs/elastic_actors.py --address auto --folder /shared/checkpoints
"""

from __future__ import annotations

import argparse
import tempfile

import ray
import torch

import ray_dcp as dcp

ROWS, COLUMNS = 1000, 256


def rows_of(rank: int, world_size: int) -> range:
    return range(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)


def true_values(rows: range) -> torch.Tensor:
    return torch.arange(rows.start * COLUMNS, rows.stop * COLUMNS, dtype=torch.float32).reshape(-1, COLUMNS)


class Learner:
    """One rank: it joined its group before this constructor ran, so it knows its place."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self.group = dcp.current_group()
        self.rows = rows_of(self.group.rank, self.group.world_size)
        self.weight = torch.full((len(self.rows), COLUMNS), float("nan"), device=device)
        self.step = 0

    def state(self) -> dict[str, object]:
        shards = dcp.LocalShards((ROWS, COLUMNS), {(self.rows.start, 0): self.weight})
        return {"weight": shards, "step": self.step}

    def train(self, step: int) -> None:
        self.weight.copy_(true_values(self.rows))
        self.step = step

    def save(self, checkpoint_id: str) -> None:
        dcp.save(self.state(), checkpoint_id=checkpoint_id)

    def load(self, checkpoint_id: str) -> bool:
        """Whether every value this rank holds afterwards is right."""
        state = self.state()
        dcp.load(state, checkpoint_id=checkpoint_id)
        self.step = state["step"]
        return self.step == 100 and torch.equal(self.weight.cpu(), true_values(self.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="local", help="of a running Ray cluster; 'local' starts one (default)")
    parser.add_argument("--folder", help="shared by all nodes; default: a temporary one, for a single machine")
    parser.add_argument("--cpus-per-rank", type=float, default=0.25)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a rank, the weights on it")
    options = parser.parse_args()
    if options.address == "local":
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    else:
        ray.init(address=options.address)
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint_id = f"{options.folder or temporary}/step-00000100"
        resources = {"CPU": options.cpus_per_rank} | ({"GPU": 1} if options.use_gpu else {})
        device = "cuda" if options.use_gpu else "cpu"
        pool = dcp.RankPool(Learner, device, name="learners", max_ranks=4, resources_per_rank=resources)
        print(f"{pool.start()} ranks save step 100")
        pool.run("train", 100)
        pool.run("save", checkpoint_id)
        for num_ranks in (1, 2, 3, 7):
            pool.max_ranks = num_ranks
            print(f"{pool.restart()} ranks load it", end=": ", flush=True)
            right = pool.run("load", checkpoint_id)
            print(
                "every value right" if all(right) else f"WRONG on ranks {[r for r, ok in enumerate(right) if not ok]}"
            )
            if not all(right):
                raise SystemExit(1)
        pool.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
