#!/usr/bin/env python
"""Measure what an asynchronous save does before it returns, by itself: a state's way into a staging buffer.

No Ray and no second process: it is for a machine with a GPU, where the copy crosses the bus. There, tensors are on the
first GPU and the buffer is pinned; without a GPU they are in host memory. Each staged file is sealed and compared, to
the bit, with the file that a save writes of the same state.

The limit beside it is one copy of as many bytes between the same two kinds of memory, right before or after. Exit
codes: 0 when it has measured and every file was right, 1 when one was wrong, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ray_dcp.planning.save_plan.state_planner import StatePlanner
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.staging.pinned import pin
from ray_dcp.staging.sealing import sealed_pieces
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.store.local import LocalStore
from ray_dcp.write.shard_file import write_shard_file
from ray_dcp.write.staged_file import FileToStage, StagedFile

_KEY = "__0_0_00ab.distcp"
_ROWS = 2048
_NUM_SMALL = 4000
_SMALL_NBYTES = 16 << 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib", type=int, default=1024, help="of the large state, in tensors of 16 MiB (default: 1024)"
    )
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each (default: 9)")
    parser.add_argument("--json", metavar="FILE", help="write all figures here as well")
    options = parser.parse_args(arguments)
    if options.mib < 16 or options.runs < 1:
        parser.error("--mib must be at least 16 and --runs at least 1")

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: tensors are in host memory"
    print(f"torch {torch.__version__}, {name}")
    states = {
        "large": {f"layer.{n}": torch.randn(_ROWS, _ROWS, device=device) for n in range(options.mib // 16)},
        "small": {f"layer.{n}": torch.randn(_SMALL_NBYTES // 4, device=device) for n in range(_NUM_SMALL)},
    }
    report = {"device": name, "states": {kind: measure(state, options.runs) for kind, state in states.items()}}
    for kind, figures in report["states"].items():
        print(as_text(kind, figures))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(figures["right"] for figures in report["states"].values()) else 1


def measure(state: dict[str, torch.Tensor], num_runs: int) -> dict[str, Any]:
    """Stage ``state`` again and again into the two buffers of a pool, with a plain copy before or after in turns."""
    planner = StatePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    items = planner.create_local_plan().items
    on_gpu = next(iter(state.values())).is_cuda
    pool = BufferPool(on_new=pin)
    nbytes = FileToStage(_KEY, 0, items, planner).nbytes
    prepared_s = timed(lambda: pool.prepare(nbytes))
    copy = _plain_copy(sum(tensor.nbytes for tensor in state.values()), on_gpu)
    staged: list[tuple[StagedFile, SharedBuffer]] = []

    def stage() -> None:
        file = FileToStage(_KEY, 0, items, planner)
        buffer = pool.take(file.nbytes)
        staged[:] = [(file.copy_to(buffer.memory), buffer)]

    runs_s: dict[str, list[float]] = {"stage": [], "copy": []}
    right = True
    for number in range(num_runs + 1):
        for what in ("stage", "copy") if number % 2 else ("copy", "stage"):
            if on_gpu:
                torch.cuda.synchronize()
            seconds = timed(stage if what == "stage" else copy)
            if number:  # the first one warms up
                runs_s[what].append(seconds)
        file, buffer = staged.pop()
        right = right and _sealed(file, buffer) == _saved(items, planner)
        pool.give_back(buffer)
    pool.close()
    return {
        "nbytes": nbytes,
        "num_tensors": len(state),
        "right": right,
        "pinned": on_gpu,
        "prepare_s": prepared_s,
        **{f"{what}_runs_s": seconds for what, seconds in runs_s.items()},
    }


def as_text(kind: str, figures: dict[str, Any]) -> str:
    stage, copy = figures["stage_runs_s"], figures["copy_runs_s"]
    gib = figures["nbytes"] / 2**30
    return (
        f"{kind}: {figures['num_tensors']:,} tensors, {gib:.3g} GiB; buffers ready in {figures['prepare_s']:.2f} s, "
        f"staged in {min(stage) * 1e3:.1f} ms (median {median(stage) * 1e3:.1f}), copied in {min(copy) * 1e3:.1f} ms "
        f"(median {median(copy) * 1e3:.1f}): {min(stage) / min(copy):.2f}x by minima, "
        f"{median(stage) / median(copy):.2f}x by medians; {gib / min(stage):.1f} GiB/s; "
        f"{'right to the bit' if figures['right'] else 'WRONG'}"
    )


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _plain_copy(nbytes: int, on_gpu: bool) -> Callable[[], object]:
    """One copy of so many bytes, into memory that is there, pinned where the source is a GPU's."""
    source = torch.ones(nbytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    target = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    return lambda: target.copy_(source)


def _sealed(file: StagedFile, buffer: SharedBuffer) -> bytes:
    return b"".join(sealed_pieces(buffer.memory, file.nbytes, file.open_ends, array("I")))


def _saved(items: Sequence[Any], planner: StatePlanner) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ray-dcp-staging-") as folder:
        store = LocalStore(folder, sync_files=False)
        write_shard_file(store, _KEY, 0, items, planner)
        return store.get(_KEY)


if __name__ == "__main__":
    sys.exit(main())
