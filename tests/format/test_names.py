"""Names of files and folders, both ways."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp.errors import CorruptCheckpointError
from ray_dcp.format.names import (
    ShardFile,
    decode_pointer,
    encode_pointer,
    is_newer,
    new_attempt,
    parse_shard_file,
    parse_step_folder,
    rank_of_shard_file,
    shard_files_named_in,
    started_ns,
    step_folder,
)


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


def test_attempts_are_ordered_by_their_start():
    first = new_attempt()
    second = new_attempt([first])
    assert is_newer(second, first)
    assert not is_newer(first, second)
    assert not is_newer(first, first)
    assert parse_shard_file(ShardFile(0, 0, second).key).attempt == second


def test_an_attempt_is_newer_than_those_of_a_clock_that_is_ahead():
    ahead = f"{started_ns(new_attempt()) + 3600 * 10**9:016x}ffffffff"
    assert is_newer(new_attempt([ahead, "ab12"]), ahead)


def test_a_name_that_says_no_start_is_the_oldest():
    assert started_ns("0123456789ab") == 0
    assert is_newer(new_attempt(), "f" * 12)


def test_shard_files_are_found_in_a_pickle_without_unpickling_it():
    names = [
        "__0_0.distcp",
        f"__12_3_{'ab' * 12}.distcp",
        "../step-00000050/__0_0_ab.distcp",
        "../a b-\u00e4/__1_0_c.distcp",
    ]
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        ascii_only = [name for name in names if name.isascii() or protocol]
        assert shard_files_named_in(pickle.dumps({"x": ascii_only, 7: "__0_0.safetensors"}, protocol)) == set(
            ascii_only
        )
    assert shard_files_named_in(b"garbage") == set()


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("__3_0_0000000000000001deadbeef.distcp", 3),
        ("__12_4.distcp", 12),
        ("../step-1/__0_1.distcp", 0),
        ("a.bin", None),
    ],
)
def test_the_rank_that_wrote_a_shard_file_is_in_its_name(path, rank):
    assert rank_of_shard_file(path) == rank


def test_a_pointer_leads_to_the_place_that_was_put_in_and_to_no_other_kind_of_value():
    assert decode_pointer(encode_pointer("s3://bucket/step-00000001"), file="pointer") == "s3://bucket/step-00000001"
    for content in (b"", b"[]", b"{}", b'{"checkpoint_id": 7}', b'{"checkpoint_id": ""}'):
        with pytest.raises(CorruptCheckpointError, match="pointer"):
            decode_pointer(content, file="pointer")
