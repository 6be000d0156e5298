"""The interval between saves: by hand, by its bounds, and the same whatever order ranks come in."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.pace.interval import (
    FIRST_AFTER_STEPS,
    LONGEST_INTERVAL_S,
    RANK_MTBF_S,
    STORAGE,
    UNMEASURED_INTERVAL_S,
    Figures,
    TierFigures,
    agreed_interval,
    interval_from,
    optimum_s,
    together,
    unseen_mtbf_s,
)


def figures(
    *,
    stall_s=None,
    slow_down_s=0.0,
    drain_s=0.0,
    interruptions=0,
    step=100,
    step_s=1.0,
    overhead=0.5,
    **others,
):
    tier = TierFigures(STORAGE, stall_s, slow_down_s, drain_s, interruptions)
    return Figures(step=step, step_s=step_s, tiers=(tier,), overhead=overhead, **others)


BY_HAND = {
    # sqrt(2 * 2 s * 5000 s) = sqrt(20000) = 141.42 s: 142 steps of a second, 1.41 % of the time
    "the optimum": (figures(stall_s=2.0, mtbf_s=5000.0), 142, "for which the optimum of Young and Daly is 2.36 min"),
    # Daly's own example: 5 min a save, 24 h between failures: sqrt(2 * 300 * 86400) = 7200 s, less than 300 / 0.04
    "overhead=": (
        figures(stall_s=300.0, mtbf_s=86400.0, overhead=0.04),
        7500,
        "the optimum of Young and Daly, 2 h, would take more than the 4% of overhead=",
    ),
    # sqrt(2 * 0.5 * 3600) = 60 s, and 90 s of drain at 0.5 s a step are 180 steps
    "the drain": (
        figures(stall_s=0.5, mtbf_s=3600.0, drain_s=90.0, step_s=0.5),
        180,
        "the optimum of Young and Daly, 60 s, is shorter than a save drains",
    ),
    # sqrt(2 * 100 * 86400) = 4157 s
    "an hour": (figures(stall_s=100.0, mtbf_s=86400.0), 3600, "69.3 min, is longer than the 60 min that may pass"),
    # The cost is stall and slower steps: sqrt(2 * (1 + 1) * 5000)
    "slower steps": (
        figures(stall_s=1.0, slow_down_s=1.0, drain_s=9.0, mtbf_s=5000.0),
        142,
        "a save costs 2 s (1 s of stall, 1 s of slower steps) and drains for 9 s",
    ),
    # 2 interruptions in 10000 s
    "interruptions": (
        figures(stall_s=2.0, interruptions=2, observed_s=10000.0),
        142,
        "expected every 83.3 min (2 interruptions seen in 2.78 h)",
    ),
    "nothing seen": (
        figures(stall_s=2.0, num_ranks=16384),
        math.ceil(math.sqrt(2 * 2 * 54 * 86400 / 419)),
        "expected every 3.09 h (none seen yet, assumed of 16384 ranks)",
    ),
    "nothing seen for long": (
        figures(stall_s=2.0, observed_s=200000.0),
        895,
        "expected every 2.31 days (none seen in 2.31 days)",
    ),
    "a step longer than all": (figures(stall_s=1.0, mtbf_s=50.0, step_s=60.0), 1, "save every 1 step (60 s"),
    "no cost yet": (figures(step_s=0.5), 600, "known only after the first"),
    "no step yet": (figures(step_s=None, stall_s=3.0), FIRST_AFTER_STEPS, "no step has been timed"),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_the_interval_is_what_a_calculation_by_hand_gives(case):
    given_figures, steps, reason = BY_HAND[case]
    found = interval_from(given_figures)
    assert (found.tier, found.from_step, found.steps) == (STORAGE, 100, steps)
    assert reason in found.why


def test_why_is_one_sentence_with_all_figures():
    found = interval_from(figures(stall_s=2.0, slow_down_s=0.1, drain_s=31.0, step_s=0.5, mtbf_s=11135.0))
    assert found.why == (
        "save every 433 steps (3.61 min at 500 ms a step): a save costs 2.1 s (2 s of stall, 100 ms of slower steps) "
        "and drains for 31 s, an interruption is expected every 3.09 h (mtbf_s=), for which the optimum of Young and "
        "Daly is 3.6 min; saving takes 0.97% of the time of training"
    )


def test_what_is_assumed_of_a_rank_is_what_was_seen_on_16384():
    assert pytest.approx(11135.08, abs=0.01) == RANK_MTBF_S / 16384  # 3.1 hours
    assert unseen_mtbf_s(16384) == RANK_MTBF_S / 16384
    assert unseen_mtbf_s(1) == unseen_mtbf_s(8) == 86400


seconds = st.floats(1e-3, 1e5)
anything = st.builds(
    figures,
    stall_s=st.none() | st.floats(0, 1e4),
    slow_down_s=st.floats(0, 1e3),
    drain_s=st.floats(0, 1e4),
    interruptions=st.integers(0, 50),
    step_s=st.none() | seconds,
    overhead=st.floats(1e-4, 0.99),
    observed_s=st.floats(0, 1e8),
    mtbf_s=st.none() | st.floats(1, 1e8),
    num_ranks=st.integers(1, 100_000),
)
measured = anything.filter(lambda one: one.step_s is not None and one.tiers[0].stall_s is not None)


def between_s(one):
    return interval_from(one).steps * one.step_s


@given(measured)
def test_saving_never_takes_more_than_the_overhead_and_drains_in_time(one):
    assert one.tiers[0].cost_s / between_s(one) <= one.overhead * (1 + 1e-9)
    assert between_s(one) >= one.tiers[0].drain_s * (1 - 1e-9)


@given(measured)
def test_no_more_passes_than_an_hour_or_what_overhead_and_drain_ask_for(one):
    most = max(LONGEST_INTERVAL_S, one.tiers[0].cost_s / one.overhead, one.tiers[0].drain_s)
    assert between_s(one) <= most + one.step_s * (1 + 1e-9)


@given(measured, st.floats(1, 100))
def test_what_costs_more_is_done_less_often(one, factor):
    tier = one.tiers[0]
    dearer = dataclasses.replace(one, tiers=(dataclasses.replace(tier, stall_s=tier.stall_s * factor),))
    assert interval_from(dearer).steps >= interval_from(one).steps


@given(measured.filter(lambda one: one.mtbf_s is not None), st.floats(1, 100))
def test_what_fails_less_often_is_saved_less_often(one, factor):
    safer = dataclasses.replace(one, mtbf_s=one.mtbf_s * factor)
    assert interval_from(safer).steps >= interval_from(one).steps


@given(measured.filter(lambda one: one.tiers[0].interruptions))
def test_one_interruption_more_never_makes_it_longer(one):
    assert interval_from(one.interrupted()).steps <= interval_from(one).steps


@given(st.lists(st.none() | anything, min_size=1, max_size=5), st.randoms())
def test_the_agreed_interval_does_not_depend_on_the_order_of_ranks_and_travels(of_ranks, random):
    shuffled = random.sample(of_ranks, len(of_ranks))
    found = agreed_interval(of_ranks)
    assert agreed_interval(pickle.loads(pickle.dumps(shuffled))) == found
    assert pickle.loads(pickle.dumps(found)) == found
    assert (found is None) == (of_ranks == [None] * len(of_ranks))
    assert found is None or found.steps >= 1


def test_the_slowest_rank_counts_and_who_has_watched_for_longest():
    merged = together(
        [
            figures(stall_s=1.0, drain_s=9.0, step_s=2.0, observed_s=50.0, interruptions=9, overhead=0.02),
            None,
            figures(stall_s=4.0, slow_down_s=0.5, step_s=None, observed_s=100.0, interruptions=3, mtbf_s=70.0),
            figures(stall_s=None, drain_s=3.0, step_s=1.0, observed_s=60.0, mtbf_s=90.0),
        ]
    )
    assert merged == figures(
        stall_s=4.0, slow_down_s=0.5, drain_s=9.0, step_s=2.0, observed_s=100.0, interruptions=3, overhead=0.02,
        mtbf_s=70.0, num_ranks=4,
    )  # fmt: skip


@given(anything)
def test_figures_come_back_from_a_checkpoint_as_they_were(one):
    assert Figures.from_json(json.loads(json.dumps(one.as_json()))) == one


GOOD = figures(stall_s=1.0).as_json()
BAD = [
    None,
    {},
    {**GOOD, "overhead": 0},
    {**GOOD, "overhead": "0.1"},
    {**GOOD, "num_ranks": 0},
    {**GOOD, "step_s": float("nan")},
    {**GOOD, "observed_s": -1},
    {**GOOD, "tiers": 3},
    {**GOOD, "tiers": [{"name": "storage"}]},
    {**GOOD, "tiers": [{**GOOD["tiers"][0], "stall_s": True}]},
    {**GOOD, "mtbf_s": float("inf")},
]


@pytest.mark.parametrize("kept", BAD, ids=map(str, range(len(BAD))))
def test_figures_that_make_no_sense_are_none(kept):
    assert Figures.from_json(kept) is None


@pytest.mark.parametrize("extreme", [1e-300, 1e300])
@pytest.mark.parametrize("name", ["overhead", "step_s", "observed_s", "mtbf_s"])
def test_whatever_figures_a_file_has_there_is_an_interval(name, extreme):
    kept = Figures.from_json({**GOOD, name: extreme})
    assert kept is None if name == "overhead" and extreme > 1 else interval_from(kept).steps >= 1


def test_the_unmeasured_interval_is_a_time_and_not_a_number_of_steps():
    assert between_s(figures(step_s=7.0)) == pytest.approx(UNMEASURED_INTERVAL_S, abs=7.0)
    assert optimum_s(2.0, 5000.0) == pytest.approx(141.42, abs=0.01)
