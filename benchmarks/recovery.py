#!/usr/bin/env python
"""Measure how soon training goes on after a death: with ray_dcp, and with torch's DCP under Ray's defaults.

Trains a small model with FSDP2 on two workers of an elastic TorchTrainer, on a Ray cluster of three nodes that it
starts on this machine, and kills a rank's process, or a whole node, with SIGKILL. Processes write down what they do;
from that come the time until all survivors have the error, the time until the next optimizer step, and its parts.
With --fetch it measures one part alone: a load after the SIGKILL of one rank, from memory and from storage; with
--kill node of all that is on its node, so that a new node loads from the copy that another one keeps in memory.

Exit codes: 0 when all runs were measured, whatever they show; 1 when training did not go on in one of them; 2 for wrong
arguments. Figures taken on a machine that was busy otherwise are marked as not valid.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clean_up import clean_up_on_sigterm, temporary_folder

_SIDES = ("torch", "ray_dcp")
_BOTH = "both"
_OWN_LOAD = 2.0
"""One for each worker."""
_JOBS = Path(__file__).resolve().parents[1] / "jobs"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    sys.path.append(str(_JOBS))  # the elastic job knows how to end every process of a cluster
    from recovery_parts.cluster import SETTINGS

    # Before Ray is imported and its processes are started: they take over this environment.
    os.environ.update(SETTINGS)
    clean_up_on_sigterm()
    from rich.console import Console

    console = Console(file=sys.stdout)
    try:
        report, failed = (_measure_fetch if options.fetch else _measure_all)(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 128 + signal.SIGINT
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=5, help="of each side and each kind of death (default: 5)")
    parser.add_argument("--kill", choices=("rank", "node", _BOTH), default=_BOTH, help="(default: both)")
    parser.add_argument(
        "--sides", nargs="+", choices=_SIDES, default=_SIDES, metavar="SIDE", help="of: torch, ray_dcp (default: both)"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="of training before the kill, up to two more by chance (default: 15)",
    )
    parser.add_argument(
        "--timeout", type=float, default=240.0, metavar="SECONDS", help="after which a run has failed (default: 240)"
    )
    parser.add_argument("--folder", help="where the checkpoints go for a while (default: the temporary folder)")
    parser.add_argument("--fetch", action="store_true", help="measure only a load, from memory and from storage")
    parser.add_argument("--store", metavar="URL", help="where the checkpoint of --fetch goes, in place of a folder")
    parser.add_argument(
        "--nbytes", type=int, default=1 << 30, help="size of the checkpoint of --fetch, in bytes (default: 1 GiB)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the same data here, with every single run")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    if options.nbytes < 1:
        parser.error("--nbytes must be at least 1")
    if options.store is not None and not options.fetch:
        parser.error("--store is for --fetch")
    if options.settle < 0 or options.timeout <= 0:
        parser.error("--settle and --timeout are seconds")
    if options.folder is not None and not os.path.isdir(options.folder):
        parser.error(f"--folder {options.folder}: there is no such folder")
    return options


def _measure_all(options: argparse.Namespace, console: Any) -> tuple[dict[str, Any], list[str]]:
    from recovery_parts import rounds, tables
    from recovery_parts.cluster import SETTINGS
    from side_by_side import machine
    from side_by_side.tables import banner

    victims = rounds.VICTIMS if options.kill == _BOTH else (options.kill,)
    company, failed = machine.Company(own_load=_OWN_LOAD), []
    found: dict[str, dict[str, list[Any]]] = {victim: {side: [] for side in options.sides} for victim in victims}
    console.print(tables.notes(SETTINGS), highlight=False)
    console.print(banner(company.objections_at_start()))
    limits = {"settle_s": options.settle, "timeout_s": options.timeout}
    machine.adopt_orphans()
    for run in rounds.runs_in_order(options.sides, victims, options.runs, **limits):
        what = f"{run.victim} killed, {run.side}, run {run.number + 1} of {options.runs}"
        with temporary_folder(options.folder, "ray-dcp-recovery-") as folder:
            where = machine.this_machine(folder)
            try:
                recovery = rounds.measure(run, folder)
            except (RuntimeError, rounds.timeline.IncompleteError) as error:
                failed.append(f"{what}: {error}")
                console.print(f"[red]{failed[-1]}")
                continue
            finally:
                machine.reap_orphans()
        found[run.victim][run.side].append(recovery)
        console.print(f"{what}: {recovery.step_s:.2f} s", highlight=False)
    objections = company.objections()
    _show(found, failed, objections, console)
    report = {
        "valid": not objections and not failed,
        "objections": objections,
        "failed": failed,
        "machine": dataclasses.asdict(where),
        "runs": {
            victim: {side: [dataclasses.asdict(recovery) for recovery in runs] for side, runs in of_victim.items()}
            for victim, of_victim in found.items()
        },
    }
    return report, failed


def _measure_fetch(options: argparse.Namespace, console: Any) -> tuple[dict[str, Any], list[str]]:
    from recovery_parts import cluster, fetch, tables
    from side_by_side import machine
    from side_by_side.tables import banner

    company, failed, fetches = machine.Company(own_load=_OWN_LOAD), [], []
    victim = "node" if options.kill == "node" else "rank"
    console.print(banner(company.objections_at_start()))
    with temporary_folder(options.folder, "ray-dcp-fetch-") as folder, cluster.cluster_folder() as ray_folder:
        where = machine.this_machine(folder)
        place = f"{options.store.rstrip('/')}/fetch" if options.store else os.path.join(folder, "fetch")
        if victim == "node":  # one more, which takes the place of the lost one
            in_cluster = cluster.local_cluster(ray_folder, fetch.NUM_RANKS + 1)
        else:
            in_cluster = cluster.one_node(ray_folder, fetch.NUM_RANKS)
        with in_cluster:
            try:
                fetches = fetch.measure_fetches(place, options.nbytes, options.runs, kills_node=victim == "node")
            except RuntimeError as error:
                failed.append(str(error))
    objections = company.objections()
    console.print(
        tables.fetch_lines(fetches, options.nbytes, in_bucket=bool(options.store), victim=victim), highlight=False
    )
    console.print(tables.failures(failed), banner(objections), sep="\n", highlight=False)
    report = {
        "valid": not objections and not failed,
        "objections": objections,
        "failed": failed,
        "machine": dataclasses.asdict(where),
        "fetches": [dataclasses.asdict(one) for one in fetches],
    }
    return report, failed


def _show(
    found: dict[str, dict[str, list[Any]]], failed: Sequence[str], objections: Sequence[str], console: Any
) -> None:
    from recovery_parts import tables
    from recovery_parts.timeline import Summary
    from side_by_side.tables import banner

    for victim, sides in found.items():
        summaries = {side: Summary(runs) for side, runs in sides.items() if runs}
        if summaries:
            console.print("", tables.table_of(victim, summaries), sep="\n", highlight=False)
        if len(summaries) == len(_SIDES):
            console.print(tables.verdict(victim, summaries["ray_dcp"], summaries["torch"]), highlight=False)
    console.print("", tables.parts_explained(), tables.failures(failed), sep="\n", highlight=False)
    console.print(banner(objections))


if __name__ == "__main__":
    sys.exit(main())
