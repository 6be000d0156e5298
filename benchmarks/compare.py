#!/usr/bin/env python
"""Compare ray_dcp with torch's distributed checkpoint, side by side, on this machine.

Two Ray actors are the ranks of both: of a gloo process group for torch, of a rank group for ray_dcp. So both have the
same processes, tensors and disk. Every result is verified to the bit: loads against known values, saves by a load
with torch. The machine's own limits are probed in the same run, and each figure is shown as a share of its limit.
At the end stands what must hold, line by line, and whether it does.

Exit codes: 0 when it has measured and every result was right; 1 when a result was wrong; 2 for wrong arguments.
Figures taken on a machine that was busy otherwise are marked as not valid, and then no target has a verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clean_up import clean_up_on_sigterm, temporary_folder

_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray ends the ranks when some other program takes the memory
    "RAY_AUTH_MODE": "disabled",  # a cluster of our own; else Ray leaves a token in the home folder
}
_WORKLOADS = (
    "large", "small", "scalars", "replicas", "async", "async_replicas", "spread", "drain", "first", "steady"
)  # fmt: skip
_QUICK_NBYTES, _QUICK_READERS = 2**24, 2
_MAX_FIRST_RUNS = 5
_NUM_STEADY, _QUICK_STEADY = 30, 2
_COLUMNS = 100
"""Of what is printed into a file or a pipe."""
_UNIT_NBYTES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # Before Ray is imported and its processes are started: they take over this environment.
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    clean_up_on_sigterm()
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _COLUMNS)
    try:
        report = _compare(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 128 + signal.SIGINT
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["verified"] else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=_WORKLOADS,
        default=_WORKLOADS,
        metavar="NAME",
        help="of: large (save, load, reshard; save without fsync; checksums off), small (4,000 tensors a rank), "
        "scalars (20,000), replicas (a model whole on each rank, compared or not), async, async_replicas, "
        "spread (saved by 2 ranks, loaded by 8), drain (computing while an asynchronous save drains), first (the first "
        "asynchronous save of new ranks), steady (memory of many) (default: all)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=8,
        help="timed runs of each side; an even number has both orders of what shares a turn equally often (default: 8)",
    )
    parser.add_argument(
        "--seed", type=int, help="of the order of the sides in each round, to have the same again (default: by chance)"
    )
    parser.add_argument(
        "--size",
        type=_nbytes,
        default=2**30,
        metavar="BYTES",
        help="of the large and async states on both ranks together, such as 256M or 4G; each rank takes three times "
        "its half of it in memory (default: 1G)",
    )
    parser.add_argument(
        "--torch-best",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare also with torch at its best: two threads, cached plans, asynchronous saves in another process "
        "(default: yes)",
    )
    parser.add_argument("--quick", action="store_true", help="small states, to see that all works: figures say nothing")
    parser.add_argument(
        "--folder", help="where the checkpoints go for a while: its disk is measured (default: the temporary folder)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the same data here, with every single run")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = secrets.randbelow(10**6)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    if options.folder is not None and not os.path.isdir(options.folder):
        parser.error(f"--folder {options.folder}: there is no such folder")
    return options


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 256M or 1.5G")
    return int(float(match[1]) * _UNIT_NBYTES.get(match[2].upper(), 1))


def _compare(options: argparse.Namespace, console: Any) -> dict[str, Any]:
    from side_by_side import machine, tables
    from side_by_side.sides import DURABILITY, RAY_DCP, TORCH, TORCH_BEST
    from side_by_side.targets import as_json, lines_of
    from side_by_side.workloads import NUM_RANKS

    sides = [TORCH, TORCH_BEST, RAY_DCP] if options.torch_best else [TORCH, RAY_DCP]
    company = machine.Company(own_load=NUM_RANKS)
    with temporary_folder(options.folder, "ray-dcp-compare-") as folder:
        where = machine.this_machine(folder)
        console.print(tables.heading(where, sides, options.runs, options.seed), highlight=False)
        console.print(tables.banner(company.objections_at_start()))
        # Asked while Ray runs: what its processes have done cannot be told from a stranger's work once they are gone.
        results, others, objections = _measure(options, sides, folder, console, company.objections)
    verified = all(result.verified for result in [*results, *others])
    valid = verified and not objections and not options.quick
    lines = lines_of(results, others)
    _show(results, others, lines, valid, console)
    console.print(tables.banner(objections))
    return {
        "valid": valid,
        "objections": objections,
        "quick": options.quick,
        "verified": verified,
        "num_runs": options.runs,
        "seed": options.seed,
        "machine": dataclasses.asdict(where),
        "load_at_start": company.load_at_start,
        "durability": {side: DURABILITY[side] for side in sides},
        "targets": [as_json(line, valid=valid) for line in lines],
        "workloads": [result.as_json() for result in results],
        **{result.name: [result.as_json()] for result in others},
    }


def _measure(
    options: argparse.Namespace,
    sides: Sequence[str],
    folder: str,
    console: Any,
    objections: Callable[[], list[str]],
) -> tuple[list[Any], list[Any], list[str]]:
    """What the chosen workloads have shown, and ``objections`` to it."""
    from side_by_side import cluster, drain, first_save, rounds, spread, steady, tables, workloads

    size = options.size if not options.quick else _QUICK_NBYTES
    counts = (4000, 20_000) if not options.quick else (40, 200)
    num_readers = workloads.NUM_READERS if not options.quick else _QUICK_READERS
    known = workloads.all_workloads(size, *counts)
    chosen = [known[name] for name in known if name in options.workloads]
    num_firsts = min(options.runs, _MAX_FIRST_RUNS)
    steady_state = workloads.steady(size, _NUM_STEADY if not options.quick else _QUICK_STEADY)
    steps_of = {
        "spread": spread.num_steps(sides),
        "drain": drain.num_steps(sides, options.runs),
        "first": first_save.num_steps(sides, num_firsts),
        "steady": steady.num_steps(steady_state),
    }
    num_steps = sum(num for name, num in steps_of.items() if name in options.workloads)
    with contextlib.ExitStack() as until_done:
        steps = tables.Steps(console, len(chosen) * rounds.num_steps(sides, options.runs) + num_steps)
        step = until_done.enter_context(steps).begin
        # Ray puts a handler of its own there, which aborts.
        until_done.enter_context(cluster.cluster(workloads.NUM_RANKS, num_readers, when_up=clean_up_on_sigterm))
        ranks = until_done.enter_context(cluster.ranks(workloads.NUM_RANKS, folder))
        for side in sides:
            ranks.run("try_out", side, f"{folder}/try-out-{side}")
        on = rounds.Place(ranks, lambda: cluster.helpers_of(ranks), folder)
        results = [rounds.measure_workload(each, sides, on, options.runs, options.seed, step) for each in chosen]
        measure_other: dict[str, Callable[[], Any]] = {
            "spread": lambda: spread.measure_spread(
                workloads.spread(size, num_readers), sides, on, cluster.readers, step
            ),
            "drain": lambda: drain.measure_drain(workloads.drain(size), sides, on, options.runs, options.seed, step),
            "first": lambda: first_save.measure_first(
                workloads.first(size), sides, on, cluster.readers, num_firsts, options.seed, step
            ),
            "steady": lambda: steady.measure_steady(steady_state, on, cluster.readers, cluster.helpers_of, step),
        }
        others = [measure() for name, measure in measure_other.items() if name in options.workloads]
        return results, others, objections()


def _show(results: Sequence[Any], others: Sequence[Any], lines: Sequence[Any], valid: bool, console: Any) -> None:
    from side_by_side import tables

    for result in results:
        console.print(tables.table_of(result), *tables.summary_lines(result), "", sep="\n", highlight=False)
    for result in others:
        console.print(tables.other_table(result), highlight=False)
    if lines:
        console.print(tables.targets_table(lines, valid=valid), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
