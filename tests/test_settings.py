"""Settings are refused when they are made, by name."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from ray_dcp import trace_points
from ray_dcp.errors import ConfigError
from ray_dcp.settings import (
    DEFAULT_MEMORY_KEEP_S,
    PHASES,
    RETRY_PREFIX,
    InFlight,
    Limits,
    PaceSettings,
    Phase,
    ReplicaCheck,
    RetryPolicy,
    agent_write_rate_from,
    agents_from,
    memory_keep_from,
    memory_tier_from,
    share_reads_from,
    staging_nbytes_from,
    variable_of,
)
from ray_dcp.staging.peers.peer_offers import replicas_from
from ray_dcp.store.bucket.s3_options import S3Options

SETTINGS = [field.name for field in dataclasses.fields(Limits) if field.name != "phase_stall_timeout_s"]


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), float("inf"), True, "60", None])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_limit_that_is_no_positive_number_of_seconds_is_refused(setting, value):
    with pytest.raises(ConfigError, match=setting) as refused:
        Limits(**{setting: value})
    assert refused.value.setting == setting


@pytest.mark.parametrize(("by_phase", "message"), [({"wriet": 5}, "'wriet' is not a phase; there are collect"),
                                                    ({"write": 0}, r"phase_stall_timeout_s\['write'\]")])  # fmt: skip
def test_limits_by_phase_are_checked(by_phase, message):
    with pytest.raises(ConfigError, match=message):
        Limits(phase_stall_timeout_s=by_phase)


def test_a_phase_without_a_limit_of_its_own_has_the_general_one():
    limits = Limits(stall_timeout_s=7, phase_stall_timeout_s={"collect": 100})
    assert {phase: limits.stall_limit_s(phase) for phase in PHASES} == dict.fromkeys(PHASES, 7) | {"collect": 100}


def test_every_phase_can_have_a_limit_of_its_own():
    limits = Limits(
        phase_stall_timeout_s={"plans": 5, "global plan": 6} | {phase: 7 for phase in Phase if " " in phase}
    )
    assert (limits.stall_limit_s("plans"), limits.stall_limit_s("global plan")) == (5, 7)
    assert Limits(phase_stall_timeout_s=dict.fromkeys(Phase, 3)).stall_limit_s("commit") == 3


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
    with pytest.raises(ConfigError, match="'mid wriet' is not a point; there are before plan"):
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
    ("variable", "read"),
    [
        ("RAY_DCP_SHARE_READS", share_reads_from),
        ("RAY_DCP_AGENTS", agents_from),
        ("RAY_DCP_MEMORY_TIER", memory_tier_from),
    ],
)
@pytest.mark.parametrize(("text", "is_on"), [(None, True), ("1", True), ("True", True), ("0", False), ("false", False)])
def test_reads_are_shared_and_agents_write_and_keep_unless_the_variable_says_no(variable, read, text, is_on):
    assert read({} if text is None else {variable: text}) is is_on
    with pytest.raises(ConfigError, match="'no' is none of 0, 1, false and true"):
        read({variable: "no"})


def test_how_long_memory_is_kept_is_a_number_of_seconds():
    assert memory_keep_from({}) == DEFAULT_MEMORY_KEEP_S
    assert memory_keep_from({"RAY_DCP_MEMORY_KEEP_S": "0"}) == 0
    for text in ("-1", "nan", "soon"):
        with pytest.raises(ConfigError, match="RAY_DCP_MEMORY_KEEP_S"):
            memory_keep_from({"RAY_DCP_MEMORY_KEEP_S": text})


def documented(default):
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:.9g}" if isinstance(default, int | float) else default or ""


def rows(settings, of, *, parameter_prefix=None, variable_prefix=""):
    """The rows that a dataclass has in the table: argument, parameter, variable, default."""
    for setting in dataclasses.fields(settings):
        default = "" if setting.default is dataclasses.MISSING else documented(setting.default)
        parameter = "" if parameter_prefix is None else f"`{parameter_prefix}{setting.name}`"
        yield f"`{of}({setting.name}=)`", parameter, f"`{variable_of(setting.name, variable_prefix)}`", default


def test_a_rate_of_writing_is_bytes_a_second_and_no_crawl():
    assert agent_write_rate_from({}) is agent_write_rate_from({"RAY_DCP_AGENT_WRITE_RATE": ""}) is None
    assert agent_write_rate_from({"RAY_DCP_AGENT_WRITE_RATE": "2e8"}) == 200_000_000
    for text in ("fast", "-1", "0", "1048575", "nan"):
        with pytest.raises(ConfigError, match=r"RAY_DCP_AGENT_WRITE_RATE.*is not a number of bytes a second"):
            agent_write_rate_from({"RAY_DCP_AGENT_WRITE_RATE": text})


def test_a_budget_of_staging_is_a_number_of_bytes():
    assert staging_nbytes_from({}) is staging_nbytes_from({"RAY_DCP_STAGING_NBYTES": ""}) is None
    assert staging_nbytes_from({"RAY_DCP_STAGING_NBYTES": "1073741824"}) == 2**30
    for text in ("1G", "0", "-1", "1.5"):
        with pytest.raises(ConfigError, match="RAY_DCP_STAGING_NBYTES"):
            staging_nbytes_from({"RAY_DCP_STAGING_NBYTES": text})


def test_the_documentation_has_each_setting_as_it_is():
    text = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    table = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if "|" in line][
        2:
    ]
    shown = {"`access_key`": "the URL's user", "`secret_key`": "the URL's password"}
    of_s3 = list(rows(S3Options, "S3Options", parameter_prefix="", variable_prefix="S3_"))[:-1]
    expected = [
        *rows(Limits, "Limits"),
        ("`save(replica_check=)`", "", "`RAY_DCP_REPLICA_CHECK`", ReplicaCheck().mode),
        ("`save(replica_check_nbytes=)`", "", "", documented(ReplicaCheck().max_nbytes)),
        ("", "", "`RAY_DCP_SHARE_READS`", "1"),
        ("", "", "`RAY_DCP_AGENTS`", "1"),
        ("", "", "`RAY_DCP_AGENT_WRITE_RATE`", ""),
        ("", "", "`RAY_DCP_STAGING_NBYTES`", ""),
        ("", "", "`RAY_DCP_MEMORY_TIER`", "1"),
        ("", "", "`RAY_DCP_MEMORY_KEEP_S`", documented(DEFAULT_MEMORY_KEEP_S)),
        *rows(InFlight, "async_save"),
        ("`async_save(replicas=)`", "", "`RAY_DCP_REPLICAS`", str(replicas_from({}))),
        *rows(PaceSettings, "CheckpointManager"),
        *rows(RetryPolicy, "RetryPolicy", parameter_prefix=RETRY_PREFIX, variable_prefix="RETRY_"),
        *((argument, shown.get(parameter, parameter), *rest) for argument, parameter, *rest in of_s3),
    ]
    assert [(*row[:2], row[2].partition(",")[0], row[3]) for row in table] == expected


def test_each_setting_can_be_said_by_its_variable():
    texts = {"max_attempts": "3"}
    for prefix, read in {
        "": Limits.from_variables,
        "RETRY_": lambda variables: RetryPolicy.from_texts({}, variables),
        "S3_": lambda variables: S3Options.from_url("s3://b/x", variables),
    }.items():
        for setting in dataclasses.fields(read({})):
            default = setting.default
            if setting.type in ("float", "int", "bool"):
                text = "true" if default is False else texts.get(setting.name, documented(default * 2))
                found = getattr(read({variable_of(setting.name, prefix): text}), setting.name)
                assert documented(found) == text
                variable = variable_of(setting.name, prefix)
                with pytest.raises(ConfigError, match=variable) as refused:
                    read({variable: "-1"})
                assert refused.value.setting == variable


def test_limits_by_phase_come_from_a_variable_too():
    name = "RAY_DCP_PHASE_STALL_TIMEOUT_S"
    limits = Limits.from_variables({name: "collect=1800, write=60"})
    assert limits.phase_stall_timeout_s == {"collect": 1800, "write": 60}
    for text, message in [
        ("wriet=5", "'wriet' is not a phase"),
        ("write=0", r"\['write'\]"),
        ("write", "'' is not a number"),
    ]:
        with pytest.raises(ConfigError, match=message) as refused:
            Limits.from_variables({name: text})
        assert refused.value.setting.startswith(name)


def test_a_setting_has_one_check_whoever_says_it():
    for made in (
        lambda: S3Options(part_nbytes=5),
        lambda: S3Options.from_url("s3://b/x?part_nbytes=5"),
        lambda: S3Options.from_url("s3://b/x", {"RAY_DCP_S3_PART_NBYTES": "5"}),
    ):
        with pytest.raises(ConfigError, match=r"(?i)part_nbytes: must be a whole number, 65536 or more, not 5"):
            made()
    with pytest.raises(ConfigError, match="anonymous: must be True or False, not 'yes'"):
        S3Options(anonymous="yes")
