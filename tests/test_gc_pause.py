"""The garbage collector rests while it is asked to, and is as before afterwards."""

from __future__ import annotations

import gc
import threading

import pytest

from ray_dcp.gc_pause import collector_paused, collector_resumed
from tests.slack import within


def test_it_rests_within_and_works_afterwards():
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_within_wakes_it_up():
    with pytest.raises(ValueError, match="x"), collector_paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_the_last_of_several_threads_wakes_it_up():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with collector_paused():
            entered.set()
            leave.wait(within(10))

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(within(10))
    with collector_paused():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_it_works_for_a_users_code_within_a_pause():
    with collector_paused():
        with collector_resumed():
            assert gc.isenabled()
            with collector_paused():
                assert gc.isenabled()
            assert gc.isenabled()
        assert not gc.isenabled()
    with collector_resumed():
        assert gc.isenabled()
    assert gc.isenabled()


def test_whoever_has_turned_it_off_finds_it_off():
    gc.disable()
    try:
        with collector_paused(), collector_resumed():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
