"""What torch writes with ``use_collectives=False``: a file and a metadata of its own for each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ray_dcp as dcp
from ray_dcp import CheckpointException, StoreReader
from ray_dcp.errors import CheckpointNotFoundError
from tests.ranks import ThreadRanks, require_no_errors

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


class WriterOfRank(torch_dcp.FileSystemWriter):
    """As ``torch_dcp.save`` sets it up on one rank of several."""

    def __init__(self, path, rank):
        super().__init__(path)
        self._as_rank = rank

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        super().set_up_storage_writer(is_coordinator, rank=self._as_rank, use_collectives=False)


def state(rank):
    return {"w": torch.arange(4.0) + 10 * rank, "nested": {"n": rank, "s": "text"}}


def template():
    return {"w": torch.full((4,), float("nan")), "nested": {"n": -1, "s": ""}}


def holds(filled, rank) -> bool:
    return torch.equal(filled["w"], state(rank)["w"]) and filled["nested"] == state(rank)["nested"]


@pytest.fixture
def of_two_ranks(tmp_path):
    for rank in range(2):
        writer = WriterOfRank(tmp_path / "c", rank)
        torch_dcp.save(state(rank), storage_writer=writer, no_dist=True, use_collectives=False)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        *("__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp")
    ]
    return tmp_path / "c"


READERS = pytest.mark.parametrize("reader", [StoreReader, torch_dcp.FileSystemReader], ids=lambda kind: kind.__name__)


@READERS
def test_each_rank_loads_what_it_saved(of_two_ranks, reader):
    ranks, templates = ThreadRanks(2), [template(), template()]
    require_no_errors(
        ranks.run(lambda rank: ranks.load_rank(rank, templates[rank], of_two_ranks, reader=reader(str(of_two_ranks))))
    )
    assert [holds(filled, rank) for rank, filled in enumerate(templates)] == [True, True]


@READERS
def test_one_process_loads_what_rank_0_saved_as_under_torch(of_two_ranks, reader):
    for library in (torch_dcp, dcp):
        filled = template()
        library.load(filled, storage_reader=reader(str(of_two_ranks)), no_dist=True)
        assert holds(filled, 0)


def test_more_ranks_than_have_saved_are_refused(of_two_ranks):
    outcomes = ThreadRanks(3).load([template() for _ in range(3)], of_two_ranks)
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes)
    assert isinstance(outcomes[2].__cause__, CheckpointNotFoundError)
    assert "saved with use_collectives=False by 2 ranks" in str(outcomes[2])


@READERS
def test_where_there_is_neither_it_is_the_lack_of_a_checkpoint_that_is_told(tmp_path, reader):
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\.metadata|the folder is empty"):
        dcp.load(template(), storage_reader=reader(str(tmp_path / "c")), no_dist=True)


def test_saving_so_is_refused_with_the_way_to_do_it(tmp_path):
    with pytest.raises(CheckpointException, match="no_dist=True and a checkpoint_id of its own"):
        dcp.save({"n": 1}, checkpoint_id=tmp_path / "c", use_collectives=False)
    assert not (tmp_path / "c").exists()
