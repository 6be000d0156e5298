"""What one rank measures, by a clock that the test moves, and that its answers depend on steps alone."""

from __future__ import annotations

import dataclasses
import time

import pytest

from ray_dcp.pace.interval import FIRST_AFTER_STEPS, Interval, agreed_interval
from ray_dcp.pace.pacer import Pacer
from ray_dcp.settings import PaceSettings

GROUP = ("g", 1)


class Clock:
    def __init__(self, at=1000.0):
        self.at = at

    def __call__(self):
        return self.at

    def pass_s(self, seconds):
        self.at += seconds


class Run:
    """A rank that trains and saves, alone, and whose clock goes as it is told."""

    def __init__(self, *, forming=GROUP, settings=None, **more):
        self.clock = Clock()
        self.pacer = Pacer(settings or PaceSettings(**more), self.clock)
        self.forming = forming
        self.step = 0
        self.saved = []

    def train(self, steps, step_s=1.0):
        """Steps of a second, say, with a question after each; returns the last answer."""
        answer = None
        for _ in range(steps):
            self.clock.pass_s(step_s)
            self.step += 1
            answer = self.pacer.due(self.step, self.forming)
        return answer

    def save(self, stall_s=2.0, *, succeeds=True, answered=True):
        began = self.pacer.now()
        self.figures = self.pacer.figures(self.step, self.forming)
        self.clock.pass_s(stall_s)
        self.changed = self.pacer.take(agreed_interval([self.figures]) if answered else None, self.forming)
        self.pacer.saved(self.step, began, succeeded=succeeds)
        self.saved.append(self.step)

    def train_and_save(self, steps, step_s=1.0, stall_s=2.0):
        for _ in range(steps):
            if self.train(1, step_s):
                self.save(stall_s)


def test_the_first_save_is_due_after_ten_steps_then_after_five_minutes_then_by_its_cost():
    run = Run(overhead=0.01)
    run.pacer.due(0, GROUP)
    run.train_and_save(600, step_s=1.0, stall_s=2.0)
    # 2 s are 1 % of 200 s, but sqrt(2 * 2 * 86400) = 588 s is the optimum
    assert run.saved == [10, 310]
    run.train_and_save(1000)
    assert run.saved == [10, 310, 310 + 588, 310 + 2 * 588]
    assert not run.changed
    assert "save every 588 steps (9.8 min at 1 s a step): a save costs 2 s" in run.pacer.due(1500, GROUP).why


def test_why_says_what_is_due_and_when():
    run = Run()
    first = run.pacer.due(5, GROUP)
    assert (bool(first), first.next_step, first.interval) == (False, 15, None)
    assert first.why == (
        "step 5: the next save is due at step 15; the first comes after 10 steps, to see what a step and a save take"
    )
    assert run.pacer.due(16, GROUP).why.startswith("step 16: a save is due; the first")


def test_a_run_that_begins_at_a_later_step_counts_from_there():
    run = Run()
    run.step = 1233
    run.train(1)
    assert not run.train(9)
    assert run.train(1)
    assert run.step == 1234 + FIRST_AFTER_STEPS


def test_the_first_steps_and_the_time_of_saves_are_not_counted_as_steps():
    run = Run()
    run.pacer.due(0, GROUP)
    run.train(3, step_s=60.0)
    run.train(7, step_s=0.5)
    run.save(stall_s=100.0)
    assert run.figures.step_s == pytest.approx(0.5)
    run.train(5, step_s=0.25)
    run.save()
    assert run.figures.step_s == pytest.approx(0.25)
    assert run.figures.tiers[0].stall_s == 100.0


def test_a_question_asked_twice_or_only_now_and_then_measures_the_same():
    run = Run()
    run.pacer.due(0, GROUP)
    for step in range(5, 55, 5):
        run.clock.pass_s(2.5)
        assert run.pacer.due(step, GROUP) == run.pacer.due(step, GROUP)
    run.step = 50
    run.save()
    assert run.figures.step_s == pytest.approx(0.5)


def test_the_cost_of_a_save_is_the_median_of_the_last_ones_and_failed_ones_do_not_count():
    run = Run()
    for stall_s in (9.0, 1.0, 1.0, 3.0, 2.0, 3.0):
        run.save(stall_s)
    run.save(500.0, succeeds=False)
    run.save()
    assert run.figures.tiers[0].stall_s == 2.0


def test_steps_that_a_drain_makes_slower_are_a_part_of_its_cost():
    run = Run()
    run.pacer.due(0, GROUP)
    run.train(FIRST_AFTER_STEPS)
    run.save(stall_s=0.5)
    drain = run.pacer.drain_begins()
    run.train(20, step_s=1.5)
    drain.end()
    run.train(30, step_s=1.0)
    run.save(stall_s=0.5)
    tier = run.figures.tiers[0]
    assert (tier.stall_s, tier.drain_s, run.figures.step_s) == (0.5, 30.0, pytest.approx(1.0))
    assert tier.slow_down_s == pytest.approx(10.0)
    assert tier.cost_s == pytest.approx(10.5)


def test_a_drain_that_goes_on_counts_as_long_as_it_has_taken_and_costs_no_more_than_that():
    run = Run()
    run.pacer.due(0, GROUP)
    run.train(FIRST_AFTER_STEPS)
    run.save()
    run.train(10, step_s=1.0)
    run.pacer.drain_begins()
    run.train(1, step_s=40.0)
    run.save()
    assert (run.figures.tiers[0].drain_s, run.figures.tiers[0].slow_down_s) == (40.0, pytest.approx(39.0))


def test_ranks_with_clocks_that_differ_answer_alike_at_every_step():
    runs = [Run(), Run(overhead=0.02), Run(mtbf_s=40_000.0)]
    for skew, run in enumerate(runs):
        run.clock.at = 1e6 * skew
        run.pacer.due(0, GROUP)
    saves = 0
    for _ in range(3000):
        answers = [run.train(1, step_s=1.0 + 0.3 * number) for number, run in enumerate(runs)]
        assert len({(bool(answer), answer.next_step) for answer in answers}) == 1
        if not answers[0]:
            continue
        saves += 1
        agreed = agreed_interval([run.pacer.figures(run.step, GROUP) for run in runs])
        for number, run in enumerate(runs):
            began = run.pacer.now()
            run.clock.pass_s(0.1 + number)
            run.pacer.take(agreed, GROUP)
            run.pacer.saved(run.step, began, succeeded=number != 1)
            run.pacer.drain_begins()
    assert saves > 4


def test_a_save_whose_plan_nobody_answered_is_still_due_and_one_that_was_answered_counts():
    run = Run()
    run.pacer.due(0, GROUP)
    run.train(FIRST_AFTER_STEPS)
    run.save(succeeds=False, answered=False)
    assert run.train(1)
    run.save(succeeds=False)
    assert not run.train(1)


def test_the_others_hear_of_a_change_once_and_only_where_somebody_asks():
    run = Run()
    run.save()
    assert not run.changed
    run.pacer.due(0, GROUP)
    run.train(FIRST_AFTER_STEPS)
    run.save()
    assert run.changed


def agreed_once(forming=GROUP):
    run = Run(forming=forming)
    run.pacer.due(0, forming)
    run.train_and_save(400)
    assert run.pacer.interval is not None
    return run


def test_a_group_that_forms_anew_begins_anew_on_all_ranks_and_has_been_interrupted():
    survivor, fresh = agreed_once(), Run(forming=("g", 3))
    survivor.forming, fresh.step = ("g", 3), survivor.step
    for _ in range(FIRST_AFTER_STEPS + 1):
        old, new = survivor.train(1), fresh.train(1, step_s=5.0)
        assert (bool(old), old.next_step, old.interval) == (bool(new), new.next_step, None)
    assert old
    before = survivor.pacer.interval
    survivor.save()
    assert before is None
    assert survivor.figures.tiers[0].interruptions == 2  # generations 2 and 3
    assert survivor.figures.observed_s == pytest.approx(survivor.clock.at - 1000.0 - 2.0, abs=3.0)


def test_an_interruption_makes_the_interval_shorter():
    calm, hit = agreed_once(), agreed_once()
    hit.forming = ("g", 2)
    for run in (calm, hit):
        run.train(1)
        run.train(FIRST_AFTER_STEPS)
        run.save()
    assert hit.pacer.interval.steps < calm.pacer.interval.steps
    assert "1 interruption seen in 6." in hit.pacer.interval.why


def test_joining_the_group_at_the_first_save_is_no_interruption():
    run = Run(forming=None)
    run.pacer.due(0, None)
    run.train(FIRST_AFTER_STEPS)
    run.forming = GROUP
    run.save()
    run.forming = None  # outside of its with-block
    assert not run.train(1)
    assert run.pacer.interval is not None
    run.save()
    assert run.figures.tiers[0].interruptions == 0


def test_what_a_checkpoint_has_kept_is_gone_on_from_with_one_interruption_more():
    run = agreed_once()
    run.train(200)
    run.save()
    kept = dataclasses.replace(run.figures, num_ranks=4).as_json()
    resumed = [Run(forming=("g", 2)), Run(forming=("g", 2), overhead=0.3)]
    for skew, other in enumerate(resumed):
        other.clock.at = 7e7 * skew
        other.pacer.loaded(run.step, kept, ("g", 2))
        other.step = run.step
    intervals = [other.pacer.interval for other in resumed]
    assert intervals[0] == intervals[1]
    assert intervals[0].from_step == run.step
    assert intervals[0].steps < run.pacer.interval.steps
    assert "1 interruption seen" in intervals[0].why
    first = resumed[0]
    assert not first.train(10)
    first.train_and_save(100, stall_s=5.0)
    first.save()
    assert first.figures.tiers[0].interruptions == 1
    assert first.figures.observed_s > run.figures.observed_s


def test_a_survivor_that_loads_goes_on_as_a_fresh_rank_does_and_counts_its_loss_once():
    run = agreed_once()
    kept = run.figures.as_json()
    fresh = Run(forming=("g", 2))
    run.forming = ("g", 2)
    for each in (run, fresh):
        each.pacer.loaded(10, kept, ("g", 2))
        each.step = 10
    assert run.pacer.interval == fresh.pacer.interval
    for _ in range(20):
        assert run.train(1, step_s=3.0).next_step == fresh.train(1).next_step
    run.save()
    assert run.figures.tiers[0].interruptions == 1


def test_going_back_in_the_same_group_is_an_interruption_and_counts_from_there():
    run = agreed_once()
    steps = run.pacer.interval.steps
    run.pacer.loaded(10, None, GROUP)
    run.step = 10
    answer = run.train(1)
    assert (answer.next_step, answer.interval.steps) == (10 + steps, steps)
    run.save()
    assert run.figures.tiers[0].interruptions == 1


def test_steps_that_go_back_without_a_load_are_counted_anew():
    run = agreed_once()
    assert run.pacer.due(3, GROUP).next_step == 3 + run.pacer.interval.steps


def test_a_question_takes_microseconds():
    pacer = Pacer(PaceSettings())
    pacer.take(Interval("storage", 0, 1 << 30, "because"), GROUP)
    best = min(_seconds_a_question(pacer) for _ in range(20))
    assert best < 50e-6


def _seconds_a_question(pacer, number=200):
    began = time.perf_counter()
    for step in range(number):
        pacer.due(step, GROUP)
    return (time.perf_counter() - began) / number
