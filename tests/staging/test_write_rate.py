"""What is written keeps to a rate, over all threads and from the moment that somebody writes."""

from __future__ import annotations

import threading

import pytest

from ray_dcp.staging.write_rate import WriteRate


class Clock:
    """Time passes where somebody sleeps."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_what_is_written_takes_as_long_as_its_rate_says(clock):
    rate = WriteRate(lambda: clock.now, clock.sleep)
    for _ in range(4):
        rate.spend(10, 5.0)
    assert clock.slept == [2.0] * 4


def test_time_in_which_nobody_wrote_is_not_saved_up(clock):
    rate = WriteRate(lambda: clock.now, clock.sleep)
    rate.spend(10, 5.0)
    clock.now += 1000
    rate.spend(10, 5.0)
    assert clock.slept == [2.0, 2.0]


def test_a_write_that_is_slower_by_itself_waits_for_the_rest_alone(clock):
    rate = WriteRate(lambda: clock.now, clock.sleep)
    rate.spend(10, 5.0)
    clock.now += 1.5  # of the writing
    rate.spend(10, 5.0)
    assert clock.slept[0] == 2.0
    assert clock.slept[1] == pytest.approx(2.0)


def test_without_a_rate_nobody_waits(clock):
    WriteRate(lambda: clock.now, clock.sleep).spend(10**12, None)
    assert clock.slept == []


def test_threads_share_one_rate():
    """Two threads of one clock that nobody moves on: the second pays for both."""
    slept = []
    rate = WriteRate(lambda: 0.0, slept.append)
    threads = [threading.Thread(target=rate.spend, args=(10, 5.0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept) == [2.0, 4.0]
