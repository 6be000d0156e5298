"""``DataPosition``: every sample of an epoch once, on whatever numbers of ranks, counted when it is consumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ray_dcp as dcp
from ray_dcp.errors import ConfigError, StateDictError
from tests.ranks import ThreadRanks, require_no_errors


def positions(world_size: int, num_samples: int, batch_size: int, **options: Any) -> list[dcp.DataPosition]:
    return [
        dcp.DataPosition(num_samples, batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def handed_over(before: list[dcp.DataPosition], after: list[dcp.DataPosition]) -> list[dcp.DataPosition]:
    """``after`` as a checkpoint of ``before`` makes them; all ranks of a save have the same state."""
    states = [{k: v for k, v in position.state_dict().items() if k != "consumed"} for position in before]
    assert states == [states[0]] * len(states)
    for position in after:
        position.load_state_dict(states[0])
    return after


def consume(ranks: list[dcp.DataPosition], num_steps: int | None = None) -> list[int]:
    """What all ranks together get in so many steps, or up to the end of the epoch."""
    streams = [position.track() for position in ranks]
    seen: list[int] = []
    while num_steps is None or num_steps > 0:
        batches = [next(stream, None) for stream in streams]
        if None in batches:
            assert batches == [None] * len(ranks), "ranks make as many steps as the others"
            break
        assert all(batches), "no rank is left without samples"
        seen += [sample for batch in batches for sample in batch]
        num_steps = None if num_steps is None else num_steps - 1
    return seen


def test_an_epoch_on_four_then_two_then_three_ranks_is_seen_once(tmp_path: Path) -> None:
    """Through checkpoints, with a part of the epoch, then the next whole one."""
    seen: list[int] = []
    at: Path | None = None
    for world_size, batch_size, num_steps in ((4, 3, 5), (2, 5, 3), (3, 2, None), (3, 2, None)):
        ranks = positions(world_size, 101, batch_size, seed=7)
        threads = ThreadRanks(world_size)
        if at is not None:
            require_no_errors(threads.load([{"data": position} for position in ranks], at, strict="exact"))
        seen += consume(ranks, num_steps)
        at = tmp_path / str(len(seen))
        require_no_errors(threads.save(lambda rank, ranks=ranks: {"data": ranks[rank]}, at))
    assert sorted(seen[:101]) == list(range(101)) == sorted(seen[101:])
    assert seen[:101] != seen[101:] != list(range(101))
    assert (ranks[0].epoch, ranks[0].samples) == (2, 0)


@settings(max_examples=200, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    shuffle=st.booleans(),
    chain=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=6),
)
def test_every_sample_of_every_epoch_is_seen_once(
    num_samples: int, shuffle: bool, chain: list[tuple[int, int, int]]
) -> None:
    seen: list[int] = []
    ranks: list[dcp.DataPosition] = []
    for world_size, batch_size, num_steps in [*chain, (1, 1, None)]:
        if world_size > num_samples:
            continue
        before, ranks = ranks, positions(world_size, num_samples, batch_size, seed=3, shuffle=shuffle)
        if before:
            handed_over(before, ranks)
        seen += consume(ranks, num_steps)
        assert ranks[0].epoch * num_samples + ranks[0].samples == len(seen)
    assert len(seen) % num_samples == 0
    for first in range(0, len(seen), num_samples):
        assert sorted(seen[first : first + num_samples]) == list(range(num_samples))


@settings(max_examples=100, deadline=None)
@given(
    num_samples=st.integers(1, 60), world_size=st.integers(1, 7), batch_size=st.integers(1, 5), steps=st.integers(0, 5)
)
def test_batches_are_even_and_their_number_is_known(
    num_samples: int, world_size: int, batch_size: int, steps: int
) -> None:
    for drop_last in (False, True):
        ranks = positions(world_size, num_samples, batch_size, drop_last=drop_last)
        if num_samples < world_size * (batch_size if drop_last else 1):
            with pytest.raises(ConfigError, match="too few"):
                len(ranks[0])
            continue
        consume(ranks, steps)
        length = len(ranks[0])
        batches = [list(position) for position in ranks]
        assert {len(of_rank) for of_rank in batches} == {length}
        sizes = [len(batch) for of_rank in batches for batch in of_rank]
        assert max(sizes) <= batch_size + (not drop_last)
        assert min(sizes) >= (batch_size if drop_last else 1)
        seen = consume(ranks)
        assert Counter(seen) == Counter(sample for of_rank in batches for batch in of_rank for sample in batch)
        assert ranks[0].samples == 0, "an epoch has ended, with or without its rest"


def test_what_is_dropped_is_dropped_once(tmp_path: Path) -> None:
    ranks = positions(4, 10, 2, drop_last=True)
    first = consume(ranks)
    assert len(first) == 8
    # On one rank there would be a batch left in it.
    alone = handed_over(ranks, positions(1, 10, 2, drop_last=True))
    assert (alone[0].epoch, alone[0].samples) == (1, 0)
    assert sorted(consume(alone)) == list(range(10))


def test_fewer_samples_than_ranks_at_the_end_of_an_epoch_are_seen_with_the_next() -> None:
    alone = positions(1, 20, 6)
    first = consume(alone, 3)
    many = handed_over(alone, positions(5, 20, 2))
    rest = consume(many)
    assert len(rest) == 2 + 20
    assert sorted(first + rest[:2]) == sorted(rest[2:]) == list(range(20))


class Squares(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> int:
        return number * number


@pytest.mark.parametrize("make_loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_loader_has_fetched_ahead_is_not_counted(make_loader: Any, num_workers: int, tmp_path: Path) -> None:
    position = dcp.DataPosition(40, 4)
    data = dcp.LoaderPosition(make_loader(Squares(), batch_sampler=position, num_workers=num_workers))
    assert len(data) == 10
    seen: list[int] = []
    for batch in data:
        seen += batch.tolist()
        if len(seen) == 12:
            break
    dcp.save({"data": data}, checkpoint_id=tmp_path, no_dist=True)
    again = dcp.DataPosition(40, 4, seed=99)
    resumed = dcp.LoaderPosition(make_loader(Squares(), batch_sampler=again, num_workers=num_workers))
    dcp.load({"data": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert (again.epoch, again.samples, again.seed) == (0, 12, 0)
    seen += [value for batch in resumed for value in batch.tolist()]
    assert sorted(seen) == [number * number for number in range(40)]
    assert (again.epoch, again.samples) == (1, 0)
    # The loop that broke off goes on in its own process too.
    assert sorted(seen[12:]) == sorted(value for batch in data for value in batch.tolist())


class Stream(IterableDataset):
    """Every rank has a source of its own."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __iter__(self) -> Any:
        return iter(range(self._first, self._first + 20))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_position_of_a_loader_that_keeps_one_belongs_to_its_rank(num_workers: int, tmp_path: Path) -> None:
    def loader(rank: int) -> Any:
        return dcp.LoaderPosition(StatefulDataLoader(Stream(100 * rank), batch_size=2, num_workers=num_workers))

    before = [loader(rank) for rank in range(2)]
    streams = [iter(one) for one in before]
    for rank, stream in enumerate(streams):
        for _ in range(3 + rank):
            next(stream)
    require_no_errors(ThreadRanks(2).save(lambda rank: {"data": before[rank]}, tmp_path))
    after = [loader(rank) for rank in range(2)]
    require_no_errors(ThreadRanks(2).load([{"data": one} for one in after], tmp_path))
    assert [next(iter(one)).tolist() for one in after] == [next(stream).tolist() for stream in streams]
    alone = {"data": loader(0)}
    with pytest.raises(dcp.CheckpointException, match=r"data\.loader: saved by 2 ranks, loading on 1"):
        dcp.load(alone, checkpoint_id=tmp_path, no_dist=True)


def test_ranks_that_are_not_at_the_same_place_are_refused_when_they_save(tmp_path: Path) -> None:
    ranks = positions(2, 100, 5)
    consume(ranks, 2)
    ranks[1].advance()
    outcomes = ThreadRanks(2).save(lambda rank: {"data": ranks[rank]}, tmp_path / "c")
    assert all(isinstance(outcome, dcp.CheckpointException) for outcome in outcomes)
    assert "data.consumed" in str(outcomes[0])
    assert "(20, 0)" in str(outcomes[0])
    assert "(30, 0)" in str(outcomes[0])
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_run_that_never_counts_is_told_when_it_saves(tmp_path: Path) -> None:
    position = dcp.DataPosition(100, 5)
    next(iter(position))
    with pytest.raises(dcp.CheckpointException, match=r"position\.track\(loader\)"):
        dcp.save({"data": position}, checkpoint_id=tmp_path, no_dist=True)
    position.advance()
    dcp.save({"data": position}, checkpoint_id=tmp_path, no_dist=True)
    assert position.samples == 5


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    dcp.save({"data": dcp.DataPosition(100, 5)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="100 samples, this one has 101"):
        dcp.load({"data": dcp.DataPosition(101, 5)}, checkpoint_id=tmp_path, no_dist=True)


def test_a_position_that_a_checkpoint_lacks_stays(tmp_path: Path) -> None:
    dcp.save({"other": 1}, checkpoint_id=tmp_path, no_dist=True)
    position = dcp.DataPosition(100, 5)
    position.advance(3)
    dcp.load({"data": position, "other": 0}, checkpoint_id=tmp_path, no_dist=True, strict=False)
    assert position.samples == 15


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_samples": 0},
        {"batch_size": 2.0},
        {"batch_size": True},
        {"rank": 1},
        {"rank": 2, "world_size": 2},
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dcp.DataPosition(**{"num_samples": 10, "batch_size": 2} | arguments)


def test_a_loader_without_a_position_is_refused() -> None:
    with pytest.raises(ConfigError, match="no state_dict and no DataPosition"):
        dcp.LoaderPosition(DataLoader(Squares(), batch_size=2))


def test_more_than_the_epoch_has_is_not_counted() -> None:
    position = dcp.DataPosition(10, 5)
    with pytest.raises(ConfigError, match="more than the epoch has left"):
        position.advance(3)
    with pytest.raises(ConfigError, match="more batches than the position has"):
        list(dcp.DataPosition(10, 5).track([1, 2, 3]))


def test_a_position_with_a_state_that_was_not_loaded_is_none() -> None:
    with pytest.raises(StateDictError):
        dcp.DataPosition(10, 5).load_state_dict({**dcp.DataPosition(9, 5).state_dict()})
