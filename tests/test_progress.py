"""Who counts, who looks, and who is told to stop."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from ray_dcp import StoreWriter
from ray_dcp.progress import PROGRESS_NBYTES, Progress, advance, working
from ray_dcp.protocol.engines.plugin_calls import CountingPlanner
from ray_dcp.store.open import open_store
from tests.ranks import ThreadRanks, require_no_errors


def test_what_moves_bytes_counts_for_whoever_is_at_work():
    progress = Progress()
    advance(5)
    with working(progress, "write"):
        advance(7)
        assert progress.phase == "write"
        with working(progress, "commit"):
            assert progress.phase == "commit"
        assert progress.phase == "write"
    advance(9)
    assert (progress.nbytes, progress.phase) == (7, None)


def test_threads_count_for_their_own_call_only():
    progress = Progress()
    with working(progress, "write"):
        other = threading.Thread(target=advance, args=(5,))
        other.start()
        other.join()
    assert progress.nbytes == 0


def test_a_rank_that_is_interrupted_stops_at_its_next_piece():
    progress = Progress()
    with working(progress, "write"):
        progress.interrupt(LookupError("failed elsewhere"))
        with pytest.raises(LookupError, match="failed elsewhere"):
            advance(1)


@pytest.mark.parametrize("scheme", ["", "memory://progress"])
def test_a_store_counts_what_it_writes_and_reads_in_pieces(scheme, tmp_path):
    store = open_store(f"{scheme}{tmp_path}")
    progress = Progress()
    with working(progress, "write"), store.put_new("big") as file:
        before = progress.mark
        file.write(bytes(2 * PROGRESS_NBYTES + 1))
    assert progress.nbytes == 2 * PROGRESS_NBYTES + 1
    assert progress.mark - before >= (3 if not scheme else 1)
    with working(progress, "read"):
        store.get("big", 0, 1000)
    assert progress.nbytes >= 2 * PROGRESS_NBYTES + 1001


def test_a_write_that_is_interrupted_leaves_no_file(tmp_path):
    """What a rank does when another one has failed: it stops in the middle of a long write."""
    place = tmp_path / "step-1"

    class Interrupting(StoreWriter):
        def write_data(self, plan, planner):
            call.progress.interrupt(KeyError("rank 1 has failed"))
            return super().write_data(plan, planner)

    ranks = ThreadRanks(1)
    call = ranks.call(0, "save", str(place))
    ranks.call = lambda *arguments: call
    (outcome,) = ranks.save(lambda rank: {"w": torch.ones(1000)}, place, writer=Interrupting(place))
    assert isinstance(outcome.__cause__, KeyError)
    assert not place.exists() or os.listdir(place) == []


class OwnPlanner(torch_dcp.DefaultSavePlanner):
    colour = "green"


def test_a_users_writer_finds_its_planner_as_it_was_and_every_use_counts(tmp_path):
    seen = []

    class OwnWriter(torch_dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            seen.append((isinstance(planner, OwnPlanner), planner.colour))
            return super().write_data(plan, planner)

    ranks = ThreadRanks(1)
    calls = []
    start = ranks.call
    ranks.call = lambda *arguments: calls.append(start(*arguments)) or calls[-1]
    require_no_errors(
        ranks.save(
            lambda rank: {f"w{number}": torch.ones(3) for number in range(10)},
            tmp_path / "c",
            planner=OwnPlanner(),
            writer=OwnWriter(tmp_path / "c"),
        )
    )
    assert seen == [(True, "green")]
    assert calls[0].progress.mark > 10


def test_a_planner_that_is_counted_pickles_as_itself():
    import pickle

    counted = CountingPlanner(OwnPlanner(), Progress())
    assert type(pickle.loads(pickle.dumps(counted))) is OwnPlanner
