"""How long a rank waits for a coordinator that Ray starts again."""

from __future__ import annotations

import time

import pytest
from ray.exceptions import ActorUnavailableError

from ray_dcp.cluster.link import CoordinatorLink
from ray_dcp.errors import CoordinatorLostError
from ray_dcp.settings import Limits

TIMEOUT_S = 0.01
LIMITS = Limits(coordinator_timeout_s=TIMEOUT_S)


class Starting:
    """The search for a coordinator whose process Ray starts again, until ``looks`` have been taken."""

    def __init__(self, looks: int) -> None:
        self.looks_left = looks

    def __call__(self) -> str:
        if self.looks_left == 0:
            return "handle"
        self.looks_left -= 1
        raise ActorUnavailableError("The actor is restarting.", b"\0" * 16)


def link_to(coordinator: Starting, start_patience_s: float) -> CoordinatorLink:
    looks, coordinator.looks_left = coordinator.looks_left, 0
    link = CoordinatorLink("group", limits=LIMITS, find=coordinator, start_patience_s=start_patience_s)
    coordinator.looks_left = looks
    return link


def test_a_process_that_starts_slower_than_a_frozen_one_is_replaced_is_waited_for():
    link = link_to(Starting(looks=3), start_patience_s=60.0)
    began = time.monotonic()
    link.reconnect()
    assert time.monotonic() - began > TIMEOUT_S
    assert link.handle == "handle"


def test_one_that_does_not_start_is_given_up():
    with pytest.raises(CoordinatorLostError, match="restarting"):
        link_to(Starting(looks=10**9), start_patience_s=0.01).reconnect()
