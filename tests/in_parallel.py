"""Which tests of a run in several processes (`pytest -n`, as in `make test`) go to the same one, and which go first.

A file's tests stay together, as its fixtures want it. Files with tests on the shared cluster are in two groups, of
which one shares its rank actors: each process has to start a cluster for its own, and actors in it. They wait more than
they work, so files without Ray keep the machine busy beside them. pytest-xdist's own marks for groups do nothing with
pytest 9.2.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
ACTORS_OF_THEIR_OWN = (
    "tests/faults/test_points.py",
    "tests/faults/test_stalls.py",
    "tests/interop/test_torchrun.py",
    "tests/test_pool.py",
    "tests/train/test_reporting.py",
    "tests/train/test_spares.py",
)
CLUSTERS_OF_THEIR_OWN = (
    "tests/benchmarks/test_compare.py",
    "tests/faults/test_elastic_runs.py",
    "tests/faults/test_lost_copies.py",
    "tests/faults/test_lost_nodes.py",
    "tests/jobs/test_elastic_train.py",
    "tests/test_readme.py",
)
# What takes longest of the rest comes first, lest one process works on it when all others have ended.
LONG = (
    "tests/protocol/test_interleavings.py",
    "tests/faults/test_s3_faults.py",
    "tests/faults/test_store_faults.py",
    "tests/interop/test_random_states.py",
    "tests/convert/test_convert.py",
    "tests/test_typing.py",
)
ORDER = ("actors that are shared", "actors of their own", "clusters of their own", *LONG)


@functools.cache
def _group_of_file(file: str) -> str:
    if file in CLUSTERS_OF_THEIR_OWN:
        return "clusters of their own"
    if file in ACTORS_OF_THEIR_OWN:
        return "actors of their own"
    return "actors that are shared" if re.search(r"pytest\.mark\.ray\b", (ROOT / file).read_text()) else file


def group_of(nodeid: str) -> str:
    """Tests of one group run one after the other in one process."""
    return _group_of_file(nodeid.partition("::")[0])


def longest_first(items: list[pytest.Item]) -> None:
    """Put the groups that take longest first."""
    order = {group: number for number, group in enumerate(ORDER)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


class ByGroup(LoadScopeScheduling):
    """Gives each process that has nothing left to do the next group."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
