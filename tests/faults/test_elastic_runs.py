"""Nodes are lost and added again and again in one run, in saves and loads too: what resumes is the whole of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ray_dcp.catalog.listing import list_checkpoints
from tests.faults import elastic_runs
from tests.faults.elastic_runs import LOSSES, NUM_STEPS, SAVE_EVERY, Learner
from tests.ranks import ThreadRanks, require_no_errors
from tests.slack import within

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def require_whole_checkpoints(root: Path) -> list[int]:
    """The steps that are committed; each can be loaded by one rank and by three, and is all of that step."""
    found = list_checkpoints(str(root))
    for info in found:
        for world_size in (1, 3):
            learners = [Learner(rank, world_size) for rank in range(world_size)]
            templates = [{"learner": learner} for learner in learners]
            require_no_errors(ThreadRanks(world_size).load(templates, info.checkpoint_id))
            for learner in learners:
                assert learner.step == info.step
                learner.require_whole()
    return [info.step for info in found if info.step is not None]


# By day one loss, in the background of the training, of two nodes; at night all four, of which two come together.
@pytest.mark.parametrize(
    ("mode", "losses", "sizes_of_pool"),
    [
        ("small-pool", LOSSES[:1], [2, 1, 2]),
        pytest.param("pool", LOSSES, [3, 2, 1, 3, 2, 3, 2, 3], marks=pytest.mark.soak),
        pytest.param("trainer", LOSSES, None, marks=pytest.mark.soak),
    ],
    ids=["pool-one loss", "pool", "trainer"],
)
def test_a_run_that_loses_and_gains_nodes_ends_as_if_it_had_not(
    mode: str, losses: tuple[str, ...], sizes_of_pool: list[int] | None, tmp_path: Path
) -> None:
    command = [sys.executable, elastic_runs.__file__, mode, str(tmp_path), *losses]
    # Else a node that a busy machine holds up is taken for a dead one.
    patient = os.environ | {"RAY_DCP_TEST_HEALTH_CHECK_MS": f"{within(2000):.0f}"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(380), env=patient)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    happened = json.loads(ran.stdout.splitlines()[-1])
    print(happened)

    assert [loss for loss, _, _ in happened["losses"]] == list(losses)
    world_sizes = happened["world_sizes"]
    if sizes_of_pool is not None:
        # A pool takes all that is there.
        assert world_sizes == sizes_of_pool
    else:
        assert sum(after > before for before, after in pairwise(world_sizes)) >= 2, happened
    assert all(len(steps) == 1 for steps in happened["resumed_at"]), "ranks resumed at different steps"
    assert happened["forgotten"] == [], "a step that was saved was not resumed"
    assert happened["steps_missing"] == []
    assert happened["steps_repeated"] >= SAVE_EVERY
    assert happened["is_equal"], happened
    assert happened["processes_left"] == []
    committed = require_whole_checkpoints(tmp_path / "run")
    assert committed[-1] == NUM_STEPS
