"""Whatever is saved comes back equal on any number of ranks, or is refused at save, with nothing left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st

from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import StateDictError
from ray_dcp.protocol.rank.async_save import stage_save
from ray_dcp.protocol.rank.save import plan_save, write_save
from ray_dcp.staging.buffer_pool import BufferPool
from ray_dcp.write.writer import StoreWriter
from tests.conftest import random_states
from tests.ranks import ThreadRanks, require_no_errors, save_request
from tests.states import Dict, Maker, OfRank, Stateful, losing_states, names, same, states

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
WORLD_SIZES = st.integers(1, 4)


def save(description: Dict, place: str, world_size: int, *, staged: bool) -> list[Any]:
    """What each rank got; ``staged``: as a background save, with the state gone once it is staged."""
    ranks = ThreadRanks(world_size)

    def save_rank(rank: int) -> Any:
        state = Maker(rank, world_size, fill=True).make(description)
        writer = StoreWriter(place, sync_files=False)
        if not staged:
            return ranks.save_rank(rank, state, place, writer=writer)
        call = ranks.call(rank, "save", place)
        request = save_request(state, place, call, writer=writer)
        planned = stage_save(plan_save(request, call), call, BufferPool())
        wipe(state)
        return write_save(planned, call)

    return ranks.run(save_rank)


def wipe(value: Any) -> None:
    """Fill all tensors with zeros, and empty all dicts and lists."""
    if isinstance(value, LocalShards):
        wipe(list(value.chunks.values()))
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            wipe(entry)
        value.clear()
    elif hasattr(value, "state_dict"):
        wipe(value.state)


class Place:
    """A folder for one checkpoint; in memory where the machine has such a folder."""

    def __enter__(self) -> str:
        shm = "/dev/shm"
        self._folder = tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None)
        return str(Path(self._folder, "c"))

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder)


def has_clash(description: Dict) -> bool:
    return max(Counter(names(description)).values(), default=0) > 1


@random_states()
@given(states(), WORLD_SIZES, WORLD_SIZES, st.booleans())
def test_a_state_comes_back_equal_or_is_refused_at_save(description, saving, loading, staged):
    with Place() as place:
        outcomes = save(description, place, saving, staged=staged)
        if has_clash(description):
            require_refused(outcomes, place)
            return
        require_no_errors(outcomes)
        makers = [Maker(rank, loading, fill=False) for rank in range(loading)]
        templates = [maker.make(description) for maker in makers]
        reports = require_no_errors(ThreadRanks(loading).load(templates, place, strict="exact"))
        assert all(report.missing == report.unexpected == () for report in reports)
        for rank, (maker, template) in enumerate(zip(makers, templates, strict=True)):
            wanted = Maker(rank, loading, fill=True)
            assert same(template, wanted.make(description), saving), (rank, template)
            assert all(holder.loaded for holder in maker.statefuls)
            for found, holder in zip(maker.statefuls, wanted.statefuls, strict=True):
                assert same(found.state, holder.state, saving), (rank, found.state)


@random_states(share=5)
@given(losing_states(), WORLD_SIZES, st.booleans())
def test_a_state_of_which_something_would_be_lost_is_refused_and_leaves_nothing(description, saving, staged):
    with Place() as place:
        require_refused(save(description, place, saving, staged=staged), place)


def require_refused(outcomes: list[Any], place: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointException), outcome
        assert isinstance(outcome.__cause__, StateDictError), outcome
        assert outcome.phase == "plan"
        assert outcome.__cause__.problems
    assert not os.path.exists(place) or os.listdir(place) == []


@random_states(share=5)
@given(states(), WORLD_SIZES)
def test_stock_torch_loads_what_it_knows_of_it(description, saving):
    """Of one rank's template with tensors alone: torch leaves Statefuls below the top and PerRank values to others."""
    if has_clash(description):
        return
    with Place() as place:
        require_no_errors(save(description, place, saving, staged=False))
        metadata = torch_dcp.FileSystemReader(place).read_metadata()
        wanted = {
            name: value
            for name, value in values(description)
            if isinstance(value, torch.Tensor) and not isinstance(value, LocalShards)
        }
        assert wanted.keys() <= metadata.state_dict_metadata.keys()
        template = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in wanted.items()}
        torch_dcp.load(template, checkpoint_id=place, no_dist=True)
        assert same(template, wanted, saving)


def values(description: Dict) -> list[tuple[str, Any]]:
    """Each name with rank 0's value."""
    maker = Maker(0, 1, fill=True)
    found: list[tuple[str, Any]] = []

    def visit(node: Any, prefix: str) -> None:
        own = list(names(node, prefix))
        if isinstance(node, Stateful):
            visit(node.inner, prefix)
        elif isinstance(node, Dict):
            for key, entry in node.entries:
                visit(entry, f"{prefix}.{key}" if prefix else str(key))
        elif own == [prefix] and not isinstance(node, OfRank):
            found.append((prefix, maker.make(node)))

    visit(description, "")
    return found
