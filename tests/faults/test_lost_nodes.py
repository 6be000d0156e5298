"""A node dies, raylet and rank at once, in the middle of a save or load of ranks on different nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.survival import LOST_NODE_FAST_S, LOST_NODE_S
from tests.slack import within

pytestmark = pytest.mark.ray


def lose_nodes(flags: str, *points: str) -> dict[str, dict]:
    """How it ended by point; each time a node is added and the group re-forms, saves, and its checkpoint is checked."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("lose_nodes.py")),
        flags,
        *points,
    ]
    # Else a node that a busy machine holds up is taken for a dead one.
    patient = os.environ | {"RAY_DCP_TEST_HEALTH_CHECK_MS": f"{within(2000):.0f}"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(280), env=patient)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {line["point"]: line for line in lines}


# In a load by night: a node is several processes.
@pytest.mark.parametrize("point", ["mid write", pytest.param("mid read", marks=pytest.mark.soak)])
def test_a_lost_node_is_named_within_seconds_under_fast_health_checks(point):
    (ended,) = lose_nodes("fast", point).values()
    assert ended["failed_ranks"] == [1], ended
    assert ended["seconds"] < within(LOST_NODE_FAST_S)
    assert ended["left"] == [1.0, 2.0]


@pytest.mark.soak
def test_a_commit_goes_through_without_a_node_whose_results_are_there():
    (ended,) = lose_nodes("fast", "before manifest").values()
    assert ended["outcome"] == "saved"
    assert ended["left"] == [1.0, 3.0]


@pytest.mark.soak
def test_a_frozen_node_that_was_declared_dead_wakes_up_and_changes_nothing():
    """What it has left is not part of any checkpoint: the program itself checks that, after it has woken up."""
    ended = lose_nodes("fast", "freeze: mid write", "freeze: before result")
    for point in ("freeze: mid write", "freeze: before result"):
        assert ended[point]["failed_ranks"] == [1], ended
        assert ended[point]["left"] == [1.0, 2.0]


@pytest.mark.soak
def test_a_lost_node_is_named_in_time_under_rays_default_health_checks():
    (ended,) = lose_nodes("default", "mid write").values()
    assert ended["failed_ranks"] == [1], ended
    assert ended["seconds"] < within(LOST_NODE_S)
    assert ended["left"] == [1.0, 2.0]
