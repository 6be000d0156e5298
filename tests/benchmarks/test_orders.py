"""In which order the sides take turns, and what is measured right beside what."""

from __future__ import annotations

import os
from collections import Counter

import pytest

LIMITS, TORCH, TORCH_BEST, RAY_DCP, UNCHECKED = "limits", "torch", "torch_best", "ray_dcp", "unchecked"


@pytest.fixture
def drawn(side_by_side):
    def orders(num_rounds, seed="7", together=(RAY_DCP, UNCHECKED)):
        return side_by_side("orders").drawn_orders([TORCH, TORCH_BEST], together, num_rounds, seed)

    return orders


def test_each_round_has_every_side_once_and_the_limits_beside_ray_dcp(drawn):
    for order in drawn(20):
        assert sorted(who for turn in order for who in turn) == sorted([LIMITS, TORCH, TORCH_BEST, RAY_DCP, UNCHECKED])
        assert {len(turn) for turn in order} == {1, 3}


@pytest.mark.parametrize("num_rounds", [2, 6, 8])
@pytest.mark.parametrize("seed", list("0123456789"))
def test_of_two_that_share_a_turn_each_is_first_as_often_and_nothing_comes_between(drawn, num_rounds, seed):
    together = [next(turn for turn in order if RAY_DCP in turn) for order in drawn(num_rounds, seed)]
    firsts = Counter(next(side for side in turn if side != LIMITS) for turn in together)
    assert firsts[RAY_DCP] == firsts[UNCHECKED] == num_rounds / 2
    assert Counter(turn.index(LIMITS) for turn in together) == {0: num_rounds / 2, 2: num_rounds / 2}


def test_no_side_comes_always_after_the_same(drawn):
    before = {order[place - 1] for order in drawn(30) for place in (1, 2) if order[place] == (TORCH,)}
    assert len(before) > 2


def test_a_seed_gives_the_same_orders_again(drawn):
    assert drawn(8) == drawn(8)
    assert drawn(8) != drawn(8, seed="8")


class RecordingRanks:
    """Notes what each rank is asked to do, and does as if it had."""

    def __init__(self, timed_call, use):
        self.calls = []
        self._timed = timed_call.TimedCall(0.0, 1.0, use.Used(extra_nbytes=0, cpu_s=0.0, read_nbytes=0))

    def run(self, method, *args):
        self.calls.append(" ".join([method, *(str(arg) for arg in args[:-1])]))
        if method == "differences_in":
            return [["wrong"], []]
        return [self._timed, self._timed]


def test_each_measure_is_done_on_all_that_share_a_turn_before_the_next_one(side_by_side, tmp_path):
    rounds, workloads = side_by_side("rounds"), side_by_side("workloads")
    ranks = RecordingRanks(side_by_side("timed_call"), side_by_side("process_use"))
    workload = workloads.all_workloads(2**20, 4, 4)["replicas"]
    taken = rounds.Round(workload, rounds.Place(ranks, helpers=lambda: [os.getpid()], folder=str(tmp_path)))
    taken.take(("uncompared", "ray_dcp", "limits"))
    assert ranks.calls == [
        "save uncompared",
        "save ray_dcp",
        "probe write",
        "probe write_pieces",
        "probe write_direct",
        "differences_in",
        "differences_in",
    ]
    assert taken.samples["save", "ray_dcp"].differences == ("wrong",)
    assert taken.limits_s == {"save": 1.0}
