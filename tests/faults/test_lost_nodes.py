"""A node dies, raylet and rank at once, in the middle of a save or load of ranks on different nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ray_dcp.points import Point
from tests.faults.survival import LOST_NODE_FAST_S, LOST_NODE_S

pytestmark = pytest.mark.ray


def lose_nodes(flags: str, *points: Point) -> dict[str, dict]:
    """How it ended by point; each time a node is added and the group re-forms, saves, and its checkpoint is checked."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("lose_nodes.py")),
        flags,
        *(point.title for point in points),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {line["point"]: line for line in lines}


@pytest.mark.timeout(300)
def test_a_lost_node_is_named_within_seconds_under_fast_health_checks():
    ended = lose_nodes("fast", Point.MID_WRITE, Point.BEFORE_MANIFEST, Point.MID_READ)
    for point in (Point.MID_WRITE, Point.MID_READ):
        assert ended[point.title]["failed_ranks"] == [1], ended
        assert ended[point.title]["seconds"] < LOST_NODE_FAST_S
        assert ended[point.title]["left"] == [1.0, 2.0]
    # All results were there: the commit goes through without the node.
    assert ended[Point.BEFORE_MANIFEST.title]["outcome"] == "saved"
    assert ended[Point.BEFORE_MANIFEST.title]["left"] == [1.0, 3.0]


@pytest.mark.timeout(300)
def test_a_lost_node_is_named_in_time_under_rays_default_health_checks():
    (ended,) = lose_nodes("default", Point.MID_WRITE).values()
    assert ended["failed_ranks"] == [1], ended
    assert ended["seconds"] < LOST_NODE_S
    assert ended["left"] == [1.0, 2.0]
