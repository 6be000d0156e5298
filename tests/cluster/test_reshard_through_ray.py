"""The reshard matrix through Ray actors: save on 1 to 4 ranks, load on 1 to 5, bit for bit."""

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


@pytest.mark.parametrize("saving", [1, 2, 3, 4])
def test_a_checkpoint_loads_on_any_number_of_actors(ranks, tmp_path, saving):
    ranks.ok(saving, save_all, tmp_path / "c")
    for loading in (1, 2, 3, 4, 5):
        assert ranks.ok(loading, load_all, tmp_path / "c") == [([], (), ())] * loading
