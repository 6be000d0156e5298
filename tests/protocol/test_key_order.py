"""Values that wait for all ranks when they are asked, in state dicts whose keys each rank has in its own order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.ranks import ThreadRanks, require_no_errors


class Together:
    """A ``Stateful`` whose two methods return when all ranks are in that one, as collectives do."""

    def __init__(self, number: float, barriers: dict[str, threading.Barrier]):
        self.tensor = torch.full((2,), number)
        self._barriers = barriers

    def state_dict(self):
        self._barriers["state_dict"].wait(timeout=10)
        return {"t": self.tensor}

    def load_state_dict(self, state_dict):
        self._barriers["load_state_dict"].wait(timeout=10)
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
