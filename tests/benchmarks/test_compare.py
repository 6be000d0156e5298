"""The comparison with torch runs, and what it reports is whole and verified."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slack import within

pytestmark = [pytest.mark.ray, pytest.mark.slow]

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare.py"
MEASURES = {
    "large": ["save", "load", "reshard", "unsynced"],
    "small": ["save", "load"],
    "scalars": ["save", "load"],
    "replicas": ["save"],
    "async": ["stall", "staged", "durable"],
    "async_replicas": ["stall", "staged", "durable"],
}

VARIANTS = {
    ("large", "save"): {"unchecked"},
    ("large", "load"): {"unchecked"},
    ("replicas", "save"): {"uncompared"},
    ("async", "stall"): {"overlapped"},
    ("async", "staged"): {"overlapped"},
    ("async", "durable"): {"overlapped"},
}


def compare(*options, timeout_s=400):
    return subprocess.run(
        [sys.executable, str(COMPARE), *map(str, options)], capture_output=True, text=True, timeout=within(timeout_s)
    )


def quick_run(tmp_path, *options):
    folder, figures = tmp_path / "disk", tmp_path / "figures.json"
    folder.mkdir()
    everything = ("--quick", "--runs", 1, "--seed", 5, "--no-torch-best", "--json", figures, "--folder", folder)
    ended = compare(*everything, *options)
    assert "--seed 5" in ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(figures.read_text())
    assert not report["valid"]
    assert report["verified"]
    assert report["seed"] == 5
    for result in report["workloads"]:
        assert set(result["disk_nbytes"]) == {"torch", "ray_dcp"}
        (order,) = result["orders"]
        assert ["torch"] in order
        assert len(order) == 2
        for measure in result["measures"]:
            check_measure(measure, VARIANTS.get((result["name"], measure["name"]), set()))
    assert {target["verdict"] for target in report["targets"]} == {"not valid"}
    assert all(target["measured"] > 0 for target in report["targets"] if not may_be_zero(target["line"]))
    assert list(folder.iterdir()) == []
    return report


def measures_of(report):
    return {result["name"]: [measure["name"] for measure in result["measures"]] for result in report["workloads"]}


# One of each kind by day: synchronous and asynchronous, with and without variants. Ranks are started for most others.
def test_a_quick_run_measures_and_verifies_the_workloads_it_is_told_on_both_sides(tmp_path):
    chosen = ("large", "replicas", "async")
    report = quick_run(tmp_path, "--workloads", *chosen)
    assert measures_of(report) == {name: MEASURES[name] for name in chosen}


@pytest.mark.soak
def test_a_quick_run_measures_and_verifies_every_workload_on_both_sides(tmp_path):
    report = quick_run(tmp_path)
    assert measures_of(report) == MEASURES
    (spread,) = report["spread"]
    assert spread["verified"]
    for loads in spread["loads"].values():
        assert loads["torch"]["reported_nbytes"] is None
        assert 0 < loads["ray_dcp"]["reported_nbytes"] <= 1.1 * loads["ray_dcp"]["counted_nbytes"]
    for name in ("drain", "first", "steady"):
        (other,) = report[name]
        assert other["verified"]
    assert {*report["first"][0]["sides"]} == {*report["drain"][0]["loops"]["matmul"]} == {"torch", "ray_dcp"}
    assert len(report["targets"]) == 26


def may_be_zero(line):
    return "memory" in line or "grown" in line


def check_measure(measure, variants):
    assert set(measure["sides"]) == {"torch", "ray_dcp"} | variants
    assert measure["limit"]["min_s"] > 0
    for figure in measure["sides"].values():
        assert figure["num_verified"] == len(figure["runs_s"]) == 1
        assert figure["differences"] == []
        assert figure["min_s"] > 0
        assert figure["cpu_runs_s"][0] > 0
    ratio = measure["sides"]["torch"]["min_s"] / measure["sides"]["ray_dcp"]["min_s"]
    assert measure["ratio"]["torch"]["min"] == pytest.approx(ratio)


def test_wrong_options_are_refused_before_anything_starts():
    ended = compare("--size", "a lot")
    assert ended.returncode == 2
    assert "'a lot' is no size; write it as 256M or 1.5G" in ended.stderr


def test_it_says_what_it_measures():
    shown = compare("--help").stdout
    assert all(workload in shown for workload in [*MEASURES, "spread", "drain", "first", "steady"])
