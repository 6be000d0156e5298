"""Who reads what for whom: each wanted block once a node, in bounded windows, evenly spread."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.format.names import BLOCK_NBYTES, PAYLOAD_ALIGNMENT
from ray_dcp.planning.node_sharing import (
    MIN_WINDOW_NBYTES,
    ShareOffer,
    ShareRules,
    Want,
    pack_wants,
    plan_shares,
    segment_nbytes,
    windows_of,
)
from ray_dcp.reads.sharing.node_reads import share_rules
from ray_dcp.store.local import LocalStore
from ray_dcp.store.store import StoreTraits

LOCAL = share_rules(LocalStore.traits)
BUCKET = share_rules(StoreTraits())
PLENTY = 1 << 40


def offer(wants, memory="node", rules=LOCAL, free_nbytes=PLENTY, token="token"):
    return ShareOffer(memory, free_nbytes, token, rules, pack_wants(wants))


def whole(number, num_blocks, *, straight=False):
    return Want(number, num_blocks * BLOCK_NBYTES, 0, num_blocks, straight)


def blocks_read(share):
    """How often each (number, block) is read."""
    return Counter(
        (piece.number, block)
        for window in windows_of(share)
        for piece in window
        for block in range(piece.start // BLOCK_NBYTES, -(-piece.end // BLOCK_NBYTES))
    )


@st.composite
def offers(draw):
    """Of some ranks on some nodes: any run of each of some records that are not all whole blocks."""
    payloads = draw(st.lists(st.integers(BLOCK_NBYTES + 1, 9 * BLOCK_NBYTES), min_size=1, max_size=6))
    rules = ShareRules(draw(st.sampled_from([1.5, 2, 3])), draw(st.integers(1, 4)) * BLOCK_NBYTES)
    free_nbytes = draw(st.integers(0, 200)) * BLOCK_NBYTES // 3
    made = []
    for rank in range(draw(st.integers(1, 7))):
        wants = []
        for number, nbytes in enumerate(payloads):
            first = draw(st.integers(0, (nbytes - 1) // BLOCK_NBYTES))
            end = draw(st.integers(first + 1, -(-nbytes // BLOCK_NBYTES)))
            if draw(st.booleans()):
                wants.append(Want(number, nbytes, first, end))
        node = draw(st.sampled_from(["a", "b"]))
        made.append(draw(st.sampled_from([None, *[offer(wants, node, rules, free_nbytes, f"t{rank}")] * 5])))
    return made


@settings(max_examples=300, deadline=None)
@given(made=offers())
def test_every_block_of_a_shared_record_is_read_once_a_node_and_no_other(made):
    shares = plan_shares(made)
    assert shares == plan_shares(made), "two coordinators must come to the same"
    for rank, share in enumerate(shares):
        if share is None:
            continue
        assert rank in share.members
        here = [one for one in made if one is not None and one.memory == made[rank].memory]
        shared_numbers = {run.number for run in share.runs}
        wanted = Counter()
        for one in here:
            rows = memoryview(one.packed).cast("q")
            for at in range(0, len(rows), 5):
                number, _, first, end = rows[at : at + 4]
                wanted.update((number, block) for block in range(first, end) if number in shared_numbers)
        read = blocks_read(share)
        assert read.keys() == wanted.keys()
        assert set(read.values()) == {1}
        for number in shared_numbers:
            counts = [times for (one, _), times in wanted.items() if one == number]
            assert sum(counts) >= made[rank].rules.min_repeats * len(counts)
        assert share.nbytes == sum(piece.nbytes for window in windows_of(share) for piece in window)


@settings(max_examples=300, deadline=None)
@given(made=offers())
def test_windows_are_bounded_aligned_and_even(made):
    for rank, share in enumerate(plan_shares(made)):
        if share is None:
            continue
        free_nbytes = made[rank].free_nbytes
        assert MIN_WINDOW_NBYTES <= share.window_nbytes <= len(share.members) * made[rank].rules.rank_nbytes
        windows = list(windows_of(share))
        assert segment_nbytes(share) <= free_nbytes // 2
        for number, window in enumerate(windows):
            end, by_slot = 0, defaultdict(int)
            for piece in window:
                assert piece.at >= end
                assert piece.at % PAYLOAD_ALIGNMENT == piece.start % BLOCK_NBYTES == 0
                end = piece.at + piece.nbytes
                by_slot[piece.slot] += piece.nbytes
            assert end <= share.window_nbytes
            assert number % share.num_windows * share.window_nbytes + end <= segment_nbytes(share)
            assert [piece.slot for piece in window] == sorted(piece.slot for piece in window)
            assert max(by_slot) < len(share.members)
            assert max(by_slot.values()) <= sum(by_slot.values()) / len(share.members) + BLOCK_NBYTES


def test_eight_ranks_that_want_columns_of_all_read_an_eighth_each():
    (share, *others) = plan_shares([offer([whole(number, 8) for number in range(16)])] * 8)
    assert others == [share] * 7
    windows = list(windows_of(share))
    assert [sum(piece.nbytes for piece in window) for window in windows] == [16 * BLOCK_NBYTES] * 8
    for window in windows:
        by_slot = Counter()
        for piece in window:
            by_slot[piece.slot] += piece.nbytes
        assert set(by_slot.values()) == {2 * BLOCK_NBYTES}


@pytest.mark.parametrize(
    ("rules", "straight", "shared"),
    [
        (LOCAL, (False, False), True),
        (LOCAL, (True, True), False),
        (LOCAL, (True, False), False),
        (LOCAL, (True, True, True), True),
        (BUCKET, (True, True), True),
        (BUCKET, (False,), False),
    ],
)
def test_two_ranks_share_what_is_far_away_or_cut_into_rows_and_three_what_is_near_and_straight(rules, straight, shared):
    shares = plan_shares([offer([whole(0, 4, straight=one)], rules=rules) for one in straight])
    assert [share is not None for share in shares] == [shared] * len(straight)


def test_rows_that_ranks_take_one_after_the_other_are_not_shared():
    wants = [[Want(0, 24 * BLOCK_NBYTES, 3 * rank, 3 * rank + 4)] for rank in range(7)]
    assert plan_shares([offer(one, rules=BUCKET) for one in wants]) == [None] * 7


def test_a_record_that_is_wanted_by_few_is_left_out_and_so_is_who_wants_no_other():
    first, second = whole(0, 4, straight=True), whole(1, 4, straight=True)
    shares = plan_shares([offer([first, second]), offer([first]), offer([first]), offer([second]), None])
    assert shares[3:] == [None, None]
    assert shares[0].members == (0, 1, 2)
    assert [run.number for run in shares[0].runs] == [0]


def test_nodes_share_by_themselves_under_names_of_their_own():
    made = [offer([whole(0, 4)], memory=f"node {rank % 2}", token=f"token {rank}") for rank in range(6)]
    shares = plan_shares(made)
    assert [share.members for share in shares] == [(0, 2, 4), (1, 3, 5)] * 3
    assert [share.token for share in shares] == ["token 0", "token 1"] * 3


def test_little_shared_memory_makes_small_windows_and_too_little_none():
    assert plan_shares([offer([whole(0, 64)], free_nbytes=64 << 20)] * 8)[0].window_nbytes == 8 << 20
    assert plan_shares([offer([whole(0, 64)], free_nbytes=15 << 20)] * 8) == [None] * 8


def test_ranks_that_want_nothing_large_share_nothing():
    assert plan_shares([offer([])] * 4) == [None] * 4
    assert plan_shares([None] * 4) == [None] * 4


def test_a_window_that_comes_where_a_shorter_one_was_has_room():
    odd = Want(1, BLOCK_NBYTES + 1, 0, 2)  # of the second window, which has no room for a whole block more
    wants = [whole(0, 2), odd, whole(2, 2), whole(3, 2)]
    rules = ShareRules(min_repeats=2, rank_nbytes=BLOCK_NBYTES)
    share = plan_shares([offer(wants, rules=rules)] * 2)[0]
    ends = [window[-1].at + window[-1].nbytes for window in windows_of(share)]
    assert ends[1] < ends[3]
    assert segment_nbytes(share) == share.window_nbytes + ends[3]
