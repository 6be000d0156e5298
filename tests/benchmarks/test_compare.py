"""The comparison with torch runs, and what it reports is whole and verified."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare.py"
MEASURES = {
    "large": ["save", "load", "reshard"],
    "small": ["save", "load"],
    "scalars": ["save", "load"],
    "async": ["stall", "staged", "durable"],
}


def compare(*options, timeout_s=200):
    return subprocess.run(
        [sys.executable, str(COMPARE), *map(str, options)], capture_output=True, text=True, timeout=timeout_s
    )


def test_a_quick_run_measures_and_verifies_every_workload_on_both_sides(tmp_path):
    folder, figures = tmp_path / "disk", tmp_path / "figures.json"
    folder.mkdir()
    ended = compare("--quick", "--runs", 1, "--json", figures, "--folder", folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(figures.read_text())
    assert not report["valid"]
    assert {result["name"]: [m["name"] for m in result["measures"]] for result in report["workloads"]} == MEASURES
    for result in report["workloads"]:
        assert result["verified"]
        assert set(result["disk_nbytes"]) == {"torch", "ray_dcp"}
        for measure in result["measures"]:
            assert set(measure["sides"]) == {"torch", "ray_dcp"}
            assert measure["limit"]["min_s"] > 0
            for figure in measure["sides"].values():
                assert figure["num_verified"] == len(figure["runs_s"]) == 1
                assert figure["differences"] == []
                assert figure["min_s"] > 0
            ratio = measure["sides"]["torch"]["min_s"] / measure["sides"]["ray_dcp"]["min_s"]
            assert measure["ratio"]["torch"]["min"] == pytest.approx(ratio)
    assert list(folder.iterdir()) == []


def test_wrong_options_are_refused_before_anything_starts():
    ended = compare("--size", "a lot")
    assert ended.returncode == 2
    assert "'a lot' is no size; write it as 256M or 1.5G" in ended.stderr


def test_it_says_what_it_measures():
    shown = compare("--help").stdout
    assert all(workload in shown for workload in MEASURES)
