"""A rank that loses its coordinator again and again while that lives, as where only the way there fails."""

from __future__ import annotations

import torch

from ray_dcp import CheckpointException
from ray_dcp.errors import CoordinatorLostError
from ray_dcp.protocol.rank.save import save
from tests.ranks import ThreadRanks, require_no_errors, save_request


class LosesAnswers:
    """The way of a rank that can tell of a failure, and hears no answer."""

    def __init__(self, link):
        self.tell, self.reconnect = link.tell, link.reconnect

    def send(self, phase, message):
        raise CoordinatorLostError("the answer got lost", group="threads")


def test_a_rank_that_gives_up_says_so_to_those_who_wait_for_it(tmp_path):
    ranks, place = ThreadRanks(2), str(tmp_path / "c")

    def save_rank(rank):
        call = ranks.call(rank, "save", place)
        if rank == 1:
            call._link = LosesAnswers(call._link)
        return save(save_request({"w": torch.ones(2)}, place, call), call)

    for outcome in ranks.run(save_rank):
        assert isinstance(outcome, CheckpointException)
        assert "the answer got lost" in str(outcome)
    require_no_errors(ranks.save(lambda rank: {"w": torch.ones(2)}, place))
