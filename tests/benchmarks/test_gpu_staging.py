"""Staging is measured by itself, on whatever device there is, and what is staged is compared with what is saved."""

from __future__ import annotations

import importlib
import json

import pytest

from tests.benchmarks.conftest import BENCHMARKS


@pytest.fixture
def gpu_staging(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("gpu_staging._NUM_SMALL", 20, raising=True)
    return importlib.import_module("gpu_staging")


def test_it_measures_and_verifies(gpu_staging, tmp_path, capsys):
    assert gpu_staging.main(["--mib", "16", "--runs", "2", "--json", str(tmp_path / "figures.json")]) == 0
    report = json.loads((tmp_path / "figures.json").read_text())
    for kind, num_tensors in (("large", 1), ("small", 20)):
        figures = report["states"][kind]
        assert (figures["right"], figures["num_tensors"]) == (True, num_tensors)
        assert len(figures["stage_runs_s"]) == len(figures["copy_runs_s"]) == 2
        assert min(figures["stage_runs_s"]) > 0
    assert capsys.readouterr().out.count("right to the bit") == 2


def test_what_is_staged_wrong_is_found(gpu_staging, monkeypatch, capsys):
    right = gpu_staging._sealed
    monkeypatch.setattr(gpu_staging, "_sealed", lambda file, buffer: right(file, buffer)[:-1] + b"?")
    assert gpu_staging.main(["--mib", "16", "--runs", "1"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--mib", "1"], ["--runs", "0"]])
def test_wrong_options_are_refused(gpu_staging, options):
    with pytest.raises(SystemExit) as refused:
        gpu_staging.main(options)
    assert refused.value.code == 2
