"""Which tests of a run in several processes (`make test`, by pytest-xdist) go to the same one, and which go first.

A file's tests stay together, as its fixtures want it. Those on the shared cluster are in few processes, as each of them
has to start one; they wait more than they work, so the files without Ray keep the machine busy beside them.
"""

from __future__ import annotations

import pytest

# Each is a group: for its own processes the machine starts a cluster, so it is worth as much time as the others.
ON_A_CLUSTER_OF_THEIR_OWN = ("tests/faults/test_points.py", "tests/faults/test_stalls.py")
# What takes longest of the rest comes first, lest one process works on it when all others have ended.
LONG = (
    "tests/protocol/test_interleavings.py",
    "tests/test_typing.py",
    "tests/faults/test_s3_faults.py",
    "tests/faults/test_store_faults.py",
    "tests/maintenance/test_convert.py",
    "tests/protocol/test_user_plugins.py",
)
GROUPS = ("faults on the shared cluster", "the shared cluster", "clusters of their own", *LONG)


def group_of(item: pytest.Item) -> str:
    """Tests of one group run one after the other in one process."""
    file = item.nodeid.partition("::")[0]
    if item.get_closest_marker("ray") is None:
        return file
    if "ray_session" not in getattr(item, "fixturenames", ()):
        return "clusters of their own"
    return "faults on the shared cluster" if file in ON_A_CLUSTER_OF_THEIR_OWN else "the shared cluster"


def arrange(items: list[pytest.Item]) -> None:
    """Mark each test with its group, and put the groups that take longest first."""
    order = {group: number for number, group in enumerate(GROUPS)}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: order.get(group_of(item), len(order)))
