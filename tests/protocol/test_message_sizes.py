"""What a save sends: as few messages, and as small ones, as it ever did."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests import ranks as tests_ranks
from tests.ranks import ThreadRanks, require_no_errors


class Planner(DefaultSavePlanner):
    """A user's, which changes nothing."""


class StayingPlanner(DefaultSavePlanner):
    """A user's that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("stays here")


def scalars():
    return {f"s{number}": number for number in range(20_000)}


def few():
    return {**{f"s{number}": number for number in range(5)}, "w": torch.ones(3)}


BEFORE = {
    "scalars": (scalars, None, [{"plan": 608_849, "write": 1_673_168}, {"plan": 608_234, "write": 1_673_168}]),
    "a user's planner": (few, Planner, [{"plan": 3_180, "write": 1_996}, {"plan": 1_966, "write": 2_047}]),
    "a user's planner that stays": (
        few,
        StayingPlanner,
        [
            {"plan": 2_482, "global plan": 1_786, "write": 2_683, "commit": 2_432},
            {"plan": 1_216, "global plan": 837, "write": 914, "commit": 1_220},
        ],
    ),
}
"""Bytes sent and got, by rank and phase, before messages had a module of their own."""


@pytest.mark.parametrize("what", BEFORE)
def test_a_save_sends_no_more_than_it_did(monkeypatch, what):
    make, planner, before = BEFORE[what]
    sent = [{}, {}]
    send = tests_ranks._ThreadLink.send

    def counted(link, phase, message):
        answer = send(link, phase, message)
        assert phase not in sent[link._rank], "each phase has one message of a rank"
        sent[link._rank][str(phase)] = len(message) + len(answer)
        return answer

    monkeypatch.setattr(tests_ranks._ThreadLink, "send", counted)
    place = f"memory://message-sizes/{make.__name__}-{planner.__name__ if planner else ''}"
    ranks = ThreadRanks(2)
    require_no_errors(
        ranks.run(lambda rank: ranks.save_rank(rank, make(), place, planner=planner() if planner else None))
    )
    assert [of_rank.keys() for of_rank in sent] == [of_rank.keys() for of_rank in before]
    more = [{phase: nbytes for phase, nbytes in now.items() if nbytes > then[phase]}
            for now, then in zip(sent, before, strict=True)]  # fmt: skip
    assert more == [{}, {}]
