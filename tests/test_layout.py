"""Names of files and folders, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.layout import ShardFile, parse_shard_file, parse_step_folder, step_folder


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "step-00000000"), (100, "step-00000100"), (10**8, "step-100000000"), (10**12, "step-1000000000000")],
)
def test_a_step_has_one_folder(step, name):
    assert step_folder(step) == name
    assert parse_step_folder(name) == step


@given(st.integers(0, 10**15))
def test_step_folders_come_back(step):
    assert parse_step_folder(step_folder(step)) == step


def test_step_folders_sort_as_their_steps_do():
    names = [step_folder(step) for step in (0, 9, 10, 99, 100, 12345678)]
    assert sorted(names) == names


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-",
        "step-x",
        "step--1",
        "step-1a",
        "my-step-1",
        "step-1/x",
        "step-1.tmp",
        "step_1",
        "Step-1",
        " step-1",
        "step-1\n",
        "step-1.0",
    ],
)
def test_other_names_are_no_step(name):
    assert parse_step_folder(name) is None


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.text("0123456789abcdef", min_size=1, max_size=32))
def test_shard_files_come_back(rank, number, attempt):
    shard = ShardFile(rank, number, attempt)
    assert parse_shard_file(shard.key) == shard


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".metadata",
        "__0_0.distcp",
        "__0_0_.distcp",
        "__0_0_xyz.distcp",
        "__0_0_ab.distcp.tmp",
        "x__0_0_ab.distcp",
        "__-1_0_ab.distcp",
        "a/__0_0_ab.distcp",
        "__0_0_ab.distcp\n",
    ],
)
def test_other_names_are_no_shard_file(name):
    assert parse_shard_file(name) is None
