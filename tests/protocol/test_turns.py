"""Turns: what a later save of a rank waits for."""

from __future__ import annotations

import threading

import pytest

from ray_dcp.protocol.turns import Turn
from tests.slack import within


def waiting(wait):
    """A thread in ``wait`` that has not come back."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    return thread


def require_back(thread):
    thread.join(within(30))
    assert not thread.is_alive()


def test_a_later_save_is_handed_over_when_each_earlier_one_is_with_a_deputy_or_over():
    first, second = Turn(), Turn()
    third = Turn([first, second])
    assert first.may_hand_over
    assert not third.may_hand_over
    thread = waiting(third.wait_to_hand_over)
    second.end()
    assert not third.may_hand_over
    first.handed_over()
    require_back(thread)
    assert third.may_hand_over


def test_what_a_deputy_has_given_back_is_waited_for_again():
    first = Turn()
    first.handed_over()
    second = Turn([first])
    assert second.may_hand_over
    first.wait_to_write()
    assert not second.may_hand_over
    thread = waiting(second.wait_to_hand_over)
    first.end()
    require_back(thread)


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_later_save_is_written_when_the_earlier_ones_are_over(handed_over):
    first, second = Turn(), Turn()
    third = Turn([first, second])
    if handed_over:
        first.handed_over()
    thread = waiting(third.wait_to_write)
    second.end()
    thread.join(0.02)
    assert thread.is_alive()
    first.end()
    require_back(thread)


def test_a_save_that_is_over_holds_on_to_nothing():
    first = Turn(uses=[object()])
    second = Turn([first])
    second.end()
    first.end()
    assert (first.uses, second._earlier) == ((), ())
