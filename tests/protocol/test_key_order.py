"""Values that wait for all ranks when they are asked, in state dicts whose keys each rank has in its own order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.ranks import ThreadRanks, require_no_errors
from tests.slack import within


class Together:
    """A ``Stateful`` whose two methods return when all ranks are in that one, as collectives do."""

    def __init__(self, number: float, barriers: dict[str, threading.Barrier]):
        self.tensor = torch.full((2,), number)
        self._barriers = barriers

    def state_dict(self):
        self._barriers["state_dict"].wait(timeout=within(10))
        return {"t": self.tensor}

    def load_state_dict(self, state_dict):
        self._barriers["load_state_dict"].wait(timeout=within(10))
        self.tensor = state_dict["t"]


NAMES = ["b", "a", 10, 9]
ORDERS = [NAMES, NAMES[::-1]]


def states(number: Callable[[int], float]) -> list[dict]:
    barriers = {name: {method: threading.Barrier(2) for method in ("state_dict", "load_state_dict")} for name in NAMES}
    return [{name: Together(number(NAMES.index(name)), barriers[name]) for name in order} for order in ORDERS]


@pytest.fixture
def saved(tmp_path):
    plain = {name: {"t": torch.full((2,), float(n))} for n, name in enumerate(NAMES)}
    require_no_errors(ThreadRanks(2).save(lambda rank: plain, tmp_path / "c"))
    return tmp_path / "c"


def test_a_load_asks_and_fills_them_in_one_order(saved):
    templates = states(lambda n: float("nan"))
    require_no_errors(ThreadRanks(2).load(templates, saved))
    for template, order in zip(templates, ORDERS, strict=True):
        assert list(template) == order
        assert {name: value.tensor.tolist() for name, value in template.items()} == {
            name: [float(n)] * 2 for n, name in enumerate(NAMES)
        }


def nested(states: dict) -> dict:
    return {"plain": 1, "deeper": {"plain": 2} | states}


def test_a_save_asks_them_in_one_order(tmp_path):
    ranks = ThreadRanks(2)
    for place, wrap in (("on top", dict), ("deeper", nested)):
        saved = [wrap(of_rank) for of_rank in states(float)]
        require_no_errors(ranks.save(lambda rank, saved=saved: saved[rank], tmp_path / place))
        templates = [wrap(of_rank) for of_rank in states(lambda n: float("nan"))]
        require_no_errors(ranks.load(templates, tmp_path / place))
        for template in templates:
            loaded = template.get("deeper", template)
            assert [loaded[name].tensor.tolist() for name in NAMES] == [[float(n)] * 2 for n in range(4)]


class Noting(dict):
    """A dict that notes what is put into it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.put = []

    def __setitem__(self, key, value):
        self.put.append(key)
        super().__setitem__(key, value)


def test_a_dict_of_the_users_own_class_is_told_of_every_value_but_those_that_load_themselves(tmp_path):
    plain = {"a": {"t": torch.ones(2), "n": [1, 2]}, "t": torch.ones(2), "n": 5}
    require_no_errors(ThreadRanks(1).save(lambda rank: plain | {"s": {"t": torch.ones(2)}}, tmp_path / "c"))
    barriers = {method: threading.Barrier(1) for method in ("state_dict", "load_state_dict")}
    template = Noting(plain | {"s": Together(0.0, barriers)})
    require_no_errors(ThreadRanks(1).load([template], tmp_path / "c"))
    assert sorted(template.put) == ["a", "n", "t"]
