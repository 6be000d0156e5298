"""``RNGState``: to each rank its own, on as many ranks; on others seeds that differ and are always the same."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ray_dcp as dcp
from tests.ranks import ThreadRanks, require_no_errors

_one_at_a_time = threading.Lock()


def draws(*generators: torch.Generator) -> list[Any]:
    """From every source; gauss keeps a second number back, in Python and numpy."""
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]
    return drawn + [torch.rand(1, generator=generator).item() for generator in generators]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _everything_as_before() -> Any:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    seed_all(3)
    own = torch.Generator().manual_seed(5)
    draws(own)
    dcp.save({"rng": dcp.RNGState(own=own)}, checkpoint_id=tmp_path, no_dist=True)
    expected = draws(own), draws(own)
    seed_all(4)
    other = torch.Generator()
    dcp.load({"rng": dcp.RNGState(own=other)}, checkpoint_id=tmp_path, no_dist=True)
    assert (draws(other), draws(other)) == expected


class SeededRank:
    """A rank in a thread: they share the process's generators, so each seeds them for itself while it is asked."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.drawn: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        with _one_at_a_time:
            seed_all(100 + self._rank)
            return dcp.RNGState().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with _one_at_a_time:
            dcp.RNGState().load_state_dict(state)
            self.drawn = draws()


def drawn_after_load(place: Path, world_size: int) -> list[list[Any]]:
    ranks = ThreadRanks(world_size)
    templates = [{"rng": SeededRank(-50 - rank)} for rank in range(world_size)]
    require_no_errors(ranks.load(templates, place))
    return [template["rng"].drawn for template in templates]


def test_on_as_many_ranks_each_has_its_own_and_on_others_a_seed_of_its_own(tmp_path: Path) -> None:
    require_no_errors(ThreadRanks(3).save(lambda rank: {"rng": SeededRank(rank)}, tmp_path))
    expected = []
    for rank in range(3):
        seed_all(100 + rank)
        expected.append(draws())
    assert drawn_after_load(tmp_path, 3) == expected
    seen = list(expected)
    for world_size in (1, 2, 4):
        drawn = drawn_after_load(tmp_path, world_size)
        assert drawn_after_load(tmp_path, world_size) == drawn
        # Not one number that some rank, then or now, has drawn too.
        for source in range(len(expected[0])):
            numbers = [str(one[source]) for one in [*seen, *drawn]]
            assert len(set(numbers)) == len(numbers)
        seen += drawn


def test_a_generator_that_was_not_saved_is_seeded_by_what_was(tmp_path: Path) -> None:
    seed_all(3)
    dcp.save({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
    found = []
    for seed in (1, 2):
        late = torch.Generator().manual_seed(seed)
        dcp.load({"rng": dcp.RNGState(late=late)}, checkpoint_id=tmp_path, no_dist=True)
        found.append(draws(late))
    assert found[0] == found[1]


def test_an_asynchronous_save_has_the_state_of_the_call(tmp_path: Path) -> None:
    seed_all(3)
    response = dcp.async_save({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
    expected = draws()
    response.upload_completion.result()
    dcp.load({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
    assert draws() == expected


def stand_in_devices(monkeypatch: pytest.MonkeyPatch, *seeds: int) -> list[torch.Generator]:
    """Generators of the CPU as those of CUDA devices; where there is CUDA, the real ones are left alone."""
    devices = [torch.Generator().manual_seed(seed) for seed in seeds]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: devices[device].set_state(state))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: [device.manual_seed(seed) for device in devices])
    return devices


def test_each_device_has_its_own_and_one_that_was_not_there_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = stand_in_devices(monkeypatch, 1, 2)
    dcp.save({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
    expected = draws(*devices)[-2:]
    third = []
    for seed in (8, 9):
        devices = stand_in_devices(monkeypatch, seed, seed, seed)
        dcp.load({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
        *first_two, last = draws(*devices)[-3:]
        assert first_two == expected
        third.append(last)
    assert third[0] == third[1]
    assert third[0] not in expected
    [alone] = stand_in_devices(monkeypatch, 8)
    dcp.load({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
    assert draws(alone)[-1] == expected[0]


def test_devices_of_another_number_of_ranks_have_seeds_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_devices(monkeypatch, 1, 1)
    require_no_errors(ThreadRanks(2).save(lambda rank: {"rng": SeededRank(rank)}, tmp_path))
    found = []
    for _ in range(2):
        devices = stand_in_devices(monkeypatch, 5, 5)
        dcp.load({"rng": dcp.RNGState()}, checkpoint_id=tmp_path, no_dist=True)
        found.append(draws(*devices)[-2:])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
