"""The reshard matrix through Ray actors: save on 2 to 4 ranks, load on as many others, bit for bit.

At night on 1 to 4, and on 1 to 5.
"""

from __future__ import annotations

import pytest

import ray_dcp as dcp
from tests import shardings

pytestmark = pytest.mark.ray


def save_all(rank, world_size, place):
    dcp.save(shardings.state(rank, world_size), checkpoint_id=place)


def load_all(rank, world_size, place):
    filled = shardings.templates(rank, world_size)
    report = dcp.load(filled, checkpoint_id=place)
    return shardings.differences(filled, rank, world_size), report.missing, report.unexpected


# In one process `tests/protocol/test_reshard.py` has them all; by day fewer actors, and groups, have to start here.
@pytest.mark.parametrize(
    ("saving", "loadings"),
    [
        (2, (3, 4)),
        (3, (2, 4)),
        (4, (2, 3)),
        *(pytest.param(saving, (1, 2, 3, 4, 5), marks=pytest.mark.soak) for saving in (1, 2, 3, 4)),
    ],
)
def test_a_checkpoint_loads_on_any_number_of_actors(ranks, tmp_path, saving, loadings):
    ranks.ok(saving, save_all, tmp_path / "c")
    for loading in loadings:
        assert ranks.ok(loading, load_all, tmp_path / "c") == [([], (), ())] * loading
