"""Settings are refused when they are made, by name."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from ray_dcp import trace_points
from ray_dcp.errors import ConfigError
from ray_dcp.settings import PHASES, Limits, share_reads_from

SETTINGS = [field.name for field in dataclasses.fields(Limits) if field.name != "phase_stall_timeout_s"]


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), float("inf"), True, "60", None])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_limit_that_is_no_positive_number_of_seconds_is_refused(setting, value):
    with pytest.raises(ConfigError, match=setting) as refused:
        Limits(**{setting: value})
    assert refused.value.setting == setting


@pytest.mark.parametrize(("by_phase", "message"), [({"wriet": 5}, "'wriet' is no phase; there are collect"),
                                                    ({"write": 0}, r"phase_stall_timeout_s\['write'\]")])  # fmt: skip
def test_limits_by_phase_are_checked(by_phase, message):
    with pytest.raises(ConfigError, match=message):
        Limits(phase_stall_timeout_s=by_phase)


def test_a_phase_without_a_limit_of_its_own_has_the_general_one():
    limits = Limits(stall_timeout_s=7, phase_stall_timeout_s={"collect": 100})
    assert {phase: limits.stall_limit_s(phase) for phase in PHASES} == dict.fromkeys(PHASES, 7) | {"collect": 100}


def test_limits_come_from_the_environment():
    variables = {"RAY_DCP_STALL_TIMEOUT_S": "45.5", "RAY_DCP_ARRIVAL_TIMEOUT_S": "90", "HOME": "/"}
    assert Limits.from_variables(variables) == Limits(stall_timeout_s=45.5, arrival_timeout_s=90)
    assert Limits.from_variables({}) == Limits()


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "nan"])
def test_a_variable_that_is_no_limit_is_refused_by_its_name(text):
    with pytest.raises(ConfigError, match="RAY_DCP_STALL_TIMEOUT_S"):
        Limits.from_variables({"RAY_DCP_STALL_TIMEOUT_S": text})


def test_limits_survive_pickling():
    limits = Limits(stall_timeout_s=7, phase_stall_timeout_s={"collect": 100})
    assert pickle.loads(pickle.dumps(limits)) == limits


def test_points_are_numbered_in_order_and_found_by_name():
    assert [point.number for point in trace_points.Point] == list(range(1, len(trace_points.Point) + 1))
    assert trace_points.Point.titled("mid write") is trace_points.Point.MID_WRITE
    with pytest.raises(ConfigError, match="'mid wriet' is none; there are before plan"):
        trace_points.Point.titled("mid wriet")


def test_an_observer_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(ConfigError, match="observer"), trace_points.observed_by("print"):
        pass


def test_an_observer_sees_the_points_within_the_block_only():
    seen: list[trace_points.Point] = []
    with trace_points.observed_by(seen.append):
        trace_points.reached(trace_points.Point.MID_READ)
    trace_points.reached(trace_points.Point.MID_WRITE)
    assert seen == [trace_points.Point.MID_READ]


@pytest.mark.parametrize(
    ("text", "shares"), [(None, True), ("1", True), ("True", True), ("0", False), ("false", False)]
)
def test_reads_are_shared_unless_the_variable_says_no(text, shares):
    assert share_reads_from({} if text is None else {"RAY_DCP_SHARE_READS": text}) is shares
    with pytest.raises(ConfigError, match="'no' is none of 0, 1, false and true"):
        share_reads_from({"RAY_DCP_SHARE_READS": "no"})
