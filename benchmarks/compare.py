#!/usr/bin/env python
"""Compare ray_dcp with torch's distributed checkpoint, side by side, on this machine.

Two Ray actors are the ranks of both: of a gloo process group for torch, of a rank group for ray_dcp. So both have the
same processes, tensors and disk. Every result is verified to the bit: loads against known values, saves by a load
with torch. The machine's own limits are probed in the same run, and each figure is shown as a share of its limit.

Exit codes: 0 when it has measured and every result was right; 1 when a result was wrong; 2 for wrong arguments.
Figures taken on a machine that was busy otherwise are marked as not valid.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray ends the ranks when some other program takes the memory
    "RAY_AUTH_MODE": "disabled",  # a cluster of our own; else Ray leaves a token in the home folder
}
_WORKLOADS = ("large", "small", "scalars", "async")
_OBJECT_STORE_NBYTES = 200 * 2**20
_UNIT_NBYTES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # Before Ray is imported and its processes are started: they take over this environment.
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    _clean_up_on_sigterm()
    from rich.console import Console

    console = Console()
    try:
        report = _compare(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 128 + signal.SIGINT
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(result["verified"] for result in report["workloads"]) else 1


def _clean_up_on_sigterm() -> None:
    """Give a plain SIGTERM the clean-up that Ctrl-C gets."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


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
        help="of: large (save, load, reshard), small (4,000 tensors a rank), scalars (20,000), async (default: all)",
    )
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each side (default: 7)")
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
        action="store_true",
        help="compare also with torch at its best: two threads, cached plans, asynchronous saves in another process",
    )
    parser.add_argument("--quick", action="store_true", help="small states, to see that all works: figures say nothing")
    parser.add_argument(
        "--folder", help="where the checkpoints go for a while: its disk is measured (default: the temporary folder)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the same data here, with every single run")
    options = parser.parse_args(arguments)
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
    from side_by_side import machine, rounds, tables
    from side_by_side.results import as_json
    from side_by_side.sides import DURABILITY, RAY_DCP, TORCH, TORCH_BEST
    from side_by_side.workloads import NUM_RANKS, all_workloads

    known = all_workloads(options.size, 4000, 20_000) if not options.quick else all_workloads(2**24, 40, 200)
    sides = [TORCH, TORCH_BEST, RAY_DCP] if options.torch_best else [TORCH, RAY_DCP]
    chosen = [known[name] for name in _WORKLOADS if name in options.workloads]
    company = machine.Company(own_load=NUM_RANKS)
    with contextlib.ExitStack() as until_done:
        folder = until_done.enter_context(_temporary_folder(options.folder))
        where = machine.this_machine(folder)
        console.print(tables.heading(where, sides, options.runs), highlight=False)
        console.print(tables.banner(company.objections_at_start()))
        num_steps = rounds.num_steps(len(chosen), len(sides), options.runs)
        step = until_done.enter_context(tables.Steps(console, num_steps)).begin
        ranks = until_done.enter_context(_ranks(NUM_RANKS, folder))
        results = [rounds.measure_workload(workload, sides, ranks, folder, options.runs, step) for workload in chosen]
        objections = company.objections()
    for result in results:
        console.print(tables.table_of(result), *tables.summary_lines(result), "", sep="\n", highlight=False)
    console.print(tables.banner(objections))
    return {
        "valid": not objections and not options.quick,
        "objections": objections,
        "quick": options.quick,
        "num_runs": options.runs,
        "machine": dataclasses.asdict(where),
        "load_at_start": company.load_at_start,
        "durability": {side: DURABILITY[side] for side in sides},
        "workloads": [as_json(result) for result in results],
    }


@contextlib.contextmanager
def _temporary_folder(parent: str | None) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="ray-dcp-compare-", dir=parent)
    try:
        yield os.path.abspath(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ranks(num_ranks: int, folder: str) -> Iterator[Any]:
    """A Ray of our own with the ranks; nothing is left of either."""
    import ray
    from side_by_side.rank import Rank

    import ray_dcp

    with contextlib.ExitStack() as until_done:
        until_done.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=num_ranks,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_NBYTES,
            log_to_driver=False,
            logging_level="WARNING",
        )
        _clean_up_on_sigterm()  # Ray has put a handler of its own there, which aborts
        yield until_done.enter_context(ray_dcp.RankPool(Rank, folder, min_ranks=num_ranks, max_ranks=num_ranks))


if __name__ == "__main__":
    sys.exit(main())
