"""What must hold: each line has its figure, and the right verdict."""

from __future__ import annotations

import pytest

GIB = 2**30


@pytest.fixture
def measured(side_by_side):
    """Make a measure of ``{side: seconds of each run}``; each run takes as much CPU time as time."""
    results, probes = side_by_side("results"), side_by_side("probes")

    def make(name, runs_of_side, *, limit_s=1.0, extra_nbytes=0):
        figures = {}
        for side, runs_s in runs_of_side.items():
            samples = [results.Sample(seconds, extra_nbytes, seconds, ()) for seconds in runs_s]
            figures[side] = results.Figure(samples, warm_up=samples[0])
        return results.Measure(name, GIB, probes.Limit.WRITE, [limit_s] * 3, figures)

    return make


@pytest.fixture
def lines(side_by_side):
    """The lines of one workload, by name."""

    def make(name, measures, **disk_nbytes):
        result = side_by_side("results").WorkloadResult(name, name, GIB, measures, disk_nbytes, orders=[])
        return {line.name: line for line in side_by_side("targets").lines_of([result], [])}

    return make


def large(measured, lines, **changes):
    runs = {
        "save": {"torch": [3, 3, 9], "torch_best": [2, 2, 2], "ray_dcp": [1, 1.5, 2], "unchecked": [1, 1, 1]},
        "load": {"torch": [3, 3, 3], "ray_dcp": [2, 2, 2], "unchecked": [2, 2, 2]},
        "reshard": {"torch": [3, 3, 3], "ray_dcp": [2, 2, 2]},
        "unsynced": {"torch": [5, 5, 5], "ray_dcp": [2, 2, 2]},
    }
    measures = [measured(name, runs_of_side, **changes) for name, runs_of_side in runs.items()]
    return lines("large", measures, torch=GIB, torch_best=GIB, ray_dcp=GIB)


def test_ratios_are_by_medians_to_torch_with_minima_and_the_best_configuration_beside_them(measured, lines):
    save = large(measured, lines)["large save: speed to torch"]
    assert save.figures == (2.0, 3.0, pytest.approx(2 / 1.5))
    assert large(measured, lines)["large load: speed to torch"].figures == (1.5, 1.5, None)


def test_shares_of_the_limit_are_by_medians_and_by_minima(measured, lines):
    share = large(measured, lines, limit_s=0.9)["large save: of raw write + fsync"]
    assert share.figures == (pytest.approx(60), pytest.approx(90), None)


def test_comparing_replicas_costs_what_a_save_takes_longer_than_without(measured, lines):
    save = measured("save", {"torch": [3, 3, 3], "ray_dcp": [1, 1.5, 2], "uncompared": [1, 1, 1]})
    assert lines("replicas", [save])["replicas save: compared / not compared"].figures == (1.5, 1.0, None)


def test_what_shares_a_turn_is_compared_round_by_round(measured, lines):
    """A disk that was twice as slow in one round was so for both."""
    save = measured("save", {"torch": [3, 3, 3], "ray_dcp": [1, 4, 1], "uncompared": [1, 2, 0.5]})
    assert lines("replicas", [save])["replicas save: compared / not compared"].measured == 2.0


def test_checksums_cost_what_a_run_takes_longer_than_without(measured, lines):
    of_large = large(measured, lines)
    assert of_large["large save: checksums on / off"].figures == (1.5, 1.0, None)
    assert of_large["large load: checksums on / off"].measured == 1.0
    assert "large reshard: checksums on / off" not in of_large


def test_cpu_time_is_a_share_of_torchs(measured, lines):
    assert large(measured, lines)["large save: CPU time / torch's"].figures == (0.5, pytest.approx(1 / 3), 0.75)


def test_extra_memory_is_the_peak_of_all_runs(measured, lines):
    assert large(measured, lines, extra_nbytes=5 * 2**20)["large save: extra memory a process"].measured == 5 * 2**20


def test_scalars_are_saved_and_loaded_in_one_figure_round_by_round(measured, lines):
    save = measured("save", {"torch": [10, 20, 60], "ray_dcp": [1, 2, 9]})
    load = measured("load", {"torch": [50, 30, 10], "ray_dcp": [3, 3, 1]})
    of_scalars = lines("scalars", [save, load], torch=30_000_000, ray_dcp=11_000_000)
    assert of_scalars["scalars save + load: speed to torch"].figures == (60 / 5, 50 / 4, None)
    assert of_scalars["scalars: size on disk"].measured == 11e6


def test_bytes_read_have_a_line_for_each_layout(side_by_side):
    spread, targets = side_by_side("spread"), side_by_side("targets")
    counted_nbytes = {"rows": 105, "columns": 800}
    loads = {layout: {"ray_dcp": spread.BytesRead(100, read, 100, ())} for layout, read in counted_nbytes.items()}
    result = spread.SpreadResult("spread", 8, 100, loads)
    rows, columns = targets.lines_of([], [result])
    assert (rows.name, rows.measured) == ("2 -> 8 ranks, rows: read / needed", 1.05)
    assert (columns.name, columns.measured) == ("2 -> 8 ranks, columns: read / needed", 8.0)
    assert [line.verdict(valid=True).value for line in (rows, columns)] == ["met", "missed"]


def test_a_stall_is_compared_with_torchs_and_with_a_copy(measured, lines):
    runs = {"torch": [4, 6, 8], "torch_best": [1, 1, 1], "ray_dcp": [2, 2, 3]}
    measures = [measured("stall", runs), measured("durable", {"torch": [9], "torch_best": [6], "ray_dcp": [2]})]
    of_async = lines("async", measures)
    assert of_async["async stall: shorter than torch's"].figures == (3.0, 2.0, 0.5)
    assert of_async["async stall / memory copy"].figures == (2.0, 2.0, None)
    assert of_async["async durable: speed to torch's best"].figures == (3.0, 3.0, 3.0)
    beside = lines("async", [measured("stall", runs | {"overlapped": [0.01, 0.02, 0.5]}), measures[1]])
    stall = beside["async stall, staged beside the training"]
    assert (stall.figures, stall.verdict(valid=True).value) == ((0.02, 0.01, None), "missed")
    assert stall.unit.show(stall.measured) == "20 ms"
    assert beside["the same / torch's best"].figures == (0.02, 0.01, 0.02)
    (replicated,) = lines("async_replicas", measures).values()
    assert (replicated.bound, replicated.measured) == (6.0, 3.0)


def test_computing_beside_a_save_is_a_share_of_idle_and_compared_with_torchs_best(side_by_side):
    drain, targets = side_by_side("drain"), side_by_side("targets")

    def samples(*meanwhile):
        return [drain.DrainSample(10.0, per_s, 1.0, ()) for per_s in meanwhile]

    of_sides = {"torch_best": samples(5, 4, 6), "ray_dcp": samples(7, 8, 2)}
    found = targets.lines_of([], [drain.DrainResult("drain", GIB, {"matmul": of_sides, "python": of_sides})])
    assert [line.measured for line in found] == [0.7, pytest.approx(1.4), 0.7]
    assert [line.verdict(valid=True).value for line in found] == ["met", "met", "missed"]


def test_the_first_save_is_compared_with_torch_at_its_best(side_by_side):
    first, targets = side_by_side("first_save"), side_by_side("targets")

    def samples(*durable_s):
        return [first.FirstSample(0.1, seconds, ()) for seconds in durable_s]

    sides = {"torch": samples(1), "torch_best": samples(6, 9, 12), "ray_dcp": samples(1, 2, 3)}
    (line,) = targets.lines_of([], [first.FirstResult("first", GIB, sides)])
    assert line.figures == (4.5, 6.0, 4.5)
    assert targets.lines_of([], [first.FirstResult("first", GIB, {"torch": samples(1), "ray_dcp": samples(1)})]) == []


def test_memory_of_many_saves_is_staging_and_what_grows(side_by_side):
    steady, targets = side_by_side("steady"), side_by_side("targets")
    kept = [steady.Kept(100, 2 * GIB), steady.Kept(300 + 10**6, 2 * GIB), steady.Kept(150, 2 * GIB)]
    result = steady.SteadyResult("steady", GIB, steady.Kept(90, 0), kept, [5, 7, 900], ())
    staging, grown, taken = (line.measured for line in targets.lines_of([], [result]))
    assert (staging, grown, taken) == (1.0, 200 + 10**6, 7)


@pytest.mark.parametrize(
    ("at_least", "figure", "verdict"),
    [(True, 2.0, "met"), (True, 1.99, "missed"), (False, 2.0, "met"), (False, 2.01, "missed")],
)
def test_a_verdict_says_whether_the_target_is_met(side_by_side, at_least, figure, verdict):
    targets = side_by_side("targets")
    line = targets.Line("a line", 2.0, at_least, targets.Unit.TIMES, figure)
    assert line.verdict(valid=True).value == verdict


def test_a_disturbed_run_gives_no_verdict(side_by_side):
    targets = side_by_side("targets")
    line = targets.Line("a line", 2.0, True, targets.Unit.TIMES, 3.0)
    assert line.verdict(valid=False).value == "not valid"
    assert targets.as_json(line, valid=False)["measured"] == 3.0


def test_a_share_above_the_limit_proves_nothing(side_by_side):
    targets = side_by_side("targets")
    shares = [targets.Line("a line", 80, True, targets.Unit.PERCENT, percent) for percent in (79, 104, 106)]
    assert [line.verdict(valid=True).value for line in shares] == ["missed", "met", "not valid"]


def test_figures_are_shown_in_the_unit_of_their_target(side_by_side):
    unit = side_by_side("targets").Unit
    assert unit.MB.show(12e6) == "12 MB"
    assert unit.MIB.show(64 * 2**20) == "64 MiB"
    assert unit.PERCENT.show(79.96) == "79.96 %"
    assert unit.TIMES.show(1.496) == "1.496x", "what is missed by little does not look as if it were met"
