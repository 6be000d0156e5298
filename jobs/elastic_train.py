#!/usr/bin/env python
"""Train a small GPT with FSDP2 on Ray, kill a node on the way, and see training go on by itself.

Without arguments it starts a Ray cluster of three nodes on this machine. A byte-level GPT learns the `.py` files of
Python's standard library. One node is killed with SIGKILL: training goes on from the newest checkpoint on fewer
workers. A node is added: training grows back. With --address it does the same on a running cluster, where it kills
a worker process, or with --kill-node a node.

Exit codes: 0 when the losses after every resume are those of an uninterrupted run of the same seed; 1 when they are
not, or when something that should have happened has not; 2 for wrong arguments; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_RAY_SETTINGS = {
    # The controller looks at its workers this often: a death is noticed, and a report taken, at the next look.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "OMP_NUM_THREADS": "1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # Before Ray is imported and its processes are started: they take over this environment.
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    # A plain SIGTERM would end this program without the clean-up that Ctrl-C gets.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _train(options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def _train(options: argparse.Namespace) -> int:
    """Do all of it; return the exit code. However it ends, what it has started is gone."""
    from rich.console import Console

    console, started = Console(file=sys.stdout), time.monotonic()
    with contextlib.ExitStack() as until_done:
        if not options.ray_logs:
            # Ray prints on the driver's standard output what a raylet did before it died: pages of it.
            nowhere = until_done.enter_context(open(os.devnull, "w"))
            until_done.enter_context(contextlib.redirect_stdout(nowhere))
        storage = options.storage or until_done.enter_context(_temporary_folder())
        nodes = until_done.enter_context(_cluster(options, console))
        outcome = _run(options, storage, nodes, console)
    wall_s = time.monotonic() - started
    _show(outcome, console, wall_s, kept=options.storage is not None)
    if options.json:
        Path(options.json).write_text(json.dumps(_as_json(outcome, wall_s), indent=2) + "\n")
    return 0 if outcome.ended_well else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--address",
        help="a running cluster, or 'auto' for the one this machine belongs to (default: start one, end it again)",
    )
    cluster.add_argument(
        "--storage",
        help="folder or URL for checkpoints, which every node must see; it is kept (default: a temporary folder)",
    )
    cluster.add_argument(
        "--workers",
        nargs=2,
        type=int,
        metavar=("MIN", "MAX"),
        default=(1, 3),
        help="bounds of the number of workers; a cluster of our own has MAX nodes (default: 1 3)",
    )
    cluster.add_argument("--use-gpu", action="store_true", help="one GPU a worker, NCCL for training")
    cluster.add_argument("--ray-logs", action="store_true", help="show what Ray's processes print")
    course = parser.add_argument_group("training")
    course.add_argument("--steps", type=int, default=90, help="(default: 90)")
    course.add_argument(
        "--sequences",
        type=int,
        default=12,
        help="in one step; shared out evenly, so a multiple of each number of workers from MIN to MAX (default: 12)",
    )
    course.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS", help="(default: 5)")
    course.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        metavar="P",
        help="drop values, others on each worker: losses then depend on how many workers there are, and only steps "
        "that are repeated on as many are compared (default: 0)",
    )
    course.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    course.add_argument("--seed", type=int, default=0, help="(default: 0)")
    course.add_argument(
        "--min-step-seconds",
        type=float,
        default=0.2,
        help="let a step take at least this long: a fast machine is not to be done before nodes come and go "
        "(default: 0.2)",
    )
    course.add_argument(
        "--tolerance",
        type=float,
        help="relative, for each loss against the reference (default: 1e-5, with --use-gpu 1e-3)",
    )
    death = parser.add_argument_group("death")
    death.add_argument(
        "--kill",
        choices=("step", "save", "none"),
        default="step",
        help="when to kill: during a step, while a checkpoint is written, or not at all (default: step)",
    )
    death.add_argument(
        "--kill-node",
        action="store_true",
        help="with --address: kill a whole node (raylet and workers) other than this program's, which does not come "
        "back by itself (default there: one worker process; without --address it is always a node)",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="give up after this many seconds (default: 600)")
    parser.add_argument("--json", metavar="FILE", help="write the result here as well")
    options = parser.parse_args(arguments)
    _require_possible(parser, options)
    return options


def _require_possible(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    low, high = options.workers
    if not 1 <= low <= high:
        parser.error(f"--workers {low} {high}: MIN must be at least 1 and at most MAX")
    uneven = [workers for workers in range(low, high + 1) if options.sequences < 1 or options.sequences % workers]
    if uneven:
        parser.error(f"--sequences {options.sequences} can't be shared out evenly to {uneven[0]} workers")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout}: a share from 0 to below 1")
    if options.checkpoint_every < 1 or options.steps < 4 * options.checkpoint_every:
        parser.error("--steps must be at least four times --checkpoint-every, which must be at least 1")
    if options.address is None and options.kill != "none" and low == high:
        parser.error(f"--workers {low} {high}: when a node is killed, MIN must be less than MAX for training to go on")
    if options.address is None and options.use_gpu:
        parser.error("--use-gpu needs --address: the nodes of a local cluster have no GPUs of their own")


def _kill_step(options: argparse.Namespace) -> int:
    """A third of the way: two steps past a checkpoint, so that there is something to repeat, or at the next one."""
    checkpoint = max(1, options.steps // 3 // options.checkpoint_every) * options.checkpoint_every
    return checkpoint + min(2, options.checkpoint_every - 1) if options.kill == "step" else checkpoint


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="ray-dcp-elastic-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _cluster(options: argparse.Namespace, console: Any) -> Iterator[Any]:
    """Connect to a cluster; give what starts and ends nodes there, None when they are not ours."""
    with contextlib.ExitStack() as until_done:
        nodes = None
        if options.address is None:
            from elastic.local_nodes import local_nodes

            console.print(f"starting a Ray cluster of {options.workers[1]} nodes on this machine")
            nodes = until_done.enter_context(local_nodes(options.workers[1]))
        import ray

        ray.init(
            address=options.address if nodes is None else nodes.address,
            log_to_driver=options.ray_logs,
            logging_level="INFO" if options.ray_logs else "WARNING",
        )
        until_done.callback(ray.shutdown)
        yield nodes


def _run(options: argparse.Namespace, storage: str, nodes: Any, console: Any) -> Any:
    import elastic
    from elastic.gpt import GptShape
    from elastic.learner import Course
    from elastic.picture import Picture
    from elastic.run import RunSettings, run_elastically
    from elastic.story import Kill
    from ray import cloudpickle

    # Workers get this code from here, wherever they run and whatever they can import.
    cloudpickle.register_pickle_by_value(elastic)
    settings = RunSettings(
        course=Course(
            seed=options.seed,
            num_steps=options.steps,
            sequences_per_step=options.sequences,
            shape=GptShape(dropout=options.dropout),
        ),
        name=f"elastic-{time.strftime('%Y%m%d-%H%M%S')}",
        storage=storage,
        min_workers=options.workers[0],
        max_workers=options.workers[1],
        checkpoint_every=options.checkpoint_every,
        save_in_background=options.async_save,
        min_step_s=options.min_step_seconds,
        use_gpu=options.use_gpu,
        kill=Kill(options.kill),
        kill_step=_kill_step(options),
        whole_node=nodes is not None or options.kill_node,
        # Seen on CPUs: 3e-7. A state that is not restored whole shows from 1e-4 on.
        tolerance=options.tolerance or (math.inf if options.dropout else 1e-3 if options.use_gpu else 1e-5),
        timeout_s=options.timeout,
    )
    with Picture(console, options.steps) as picture:
        return run_elastically(settings, nodes=nodes, picture=picture)


def _show(outcome: Any, console: Any, wall_s: float, *, kept: bool) -> None:
    from elastic.picture import result_table, verdict_line

    console.print(result_table(outcome.record, outcome.reference))
    console.print(verdict_line(outcome.comparison))
    if outcome.act.name != "LAST":
        console.print(f"[red]Training ended too early, {outcome.act.value}: give more --steps.")
    where = f"last checkpoint: {outcome.checkpoint_id}" if kept else "its checkpoints are gone (--storage keeps them)"
    console.print(f"{wall_s:.0f} s in all; {where}", highlight=False)


def _as_json(outcome: Any, wall_s: float) -> dict[str, Any]:
    return {
        "matches": outcome.comparison.matches,
        "ended_well": outcome.ended_well,
        "wall_s": wall_s,
        "comparison": dataclasses.asdict(outcome.comparison),
        "resumes": [dataclasses.asdict(resume) for resume in outcome.record.resumes],
        "stretches": [dataclasses.asdict(stretch) for stretch in outcome.record.trained],
        "saves": [dataclasses.asdict(save) for save in outcome.record.saves],
        "reference": outcome.reference,
        "checkpoint_id": outcome.checkpoint_id,
    }


if __name__ == "__main__":
    sys.exit(main())
