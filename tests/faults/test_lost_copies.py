"""A node dies, raylet, rank and agent at once: what it had staged is loaded from another node's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slack import within

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What the program tells of each of its parts; that the values are right it checks itself."""
    command = [sys.executable, str(Path(__file__).with_name("lose_copies.py"))]
    folder = tmp_path_factory.mktemp("lost")
    with open(folder / "stderr", "w") as log:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=within(280))
    assert ran.returncode == 0, ran.stdout + (folder / "stderr").read_text()[-20000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {line["part"]: line for line in lines}


def sources(part):
    return [{place for place, nbytes in by.items() if nbytes} for by in part["by_place"]]


def test_each_file_is_on_a_node_of_another_zone_and_loads_take_it_from_there(parts):
    held, zones = parts["copies"]["held"], parts["copies"]["zones"]
    assert sum(map(len, held)) == 6
    for rank in range(3):
        own, other = (node for node in sorted(range(3), key=lambda node: node != rank) if rank in held[node])
        assert own == rank
        assert zones[other] != zones[own]
    for rank, of_rank in enumerate(sources(parts["all live"])):
        assert of_rank == ({"memory"} if len(held[rank]) == 3 else {"memory", "peer"})


def test_a_node_is_lost_and_nothing_of_the_tensors_is_read_from_storage(parts):
    assert [by["storage"] for by in parts["a node is lost"]["by_place"]] == [0, 0]
    assert max(parts["a node is lost"]["took_s"]) < within(5)


def test_a_node_that_is_lost_before_its_copy_is_made_costs_a_read_of_its_file(parts):
    lost = parts["a node is lost before its copy is made"]
    assert lost["held"] == [[0], [1]], "the copies are under way"
    assert sources(lost) == [{"memory", "storage"}]
    assert max(lost["took_s"]) < within(10)
    assert sources(parts["what was copied before is not wanted"]) == [{"storage"}]


def test_saves_of_the_node_that_is_left_have_no_copy_and_work(parts):
    assert sources(parts["one node is left"]) == [{"memory"}]
    (opened,) = parts["descriptors"]["of_agents"]
    assert opened <= 3, "two buffers of its rank, and one that the copies of the lost node had"
