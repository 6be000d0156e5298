"""Users' plug-ins on several real ranks: the same under torch's collectives and under ray_dcp's coordinator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader

import ray_dcp as dcp
from tests.interop import layouts
from tests.protocol import plugins
from tests.shardings import same_bits

pytestmark = pytest.mark.ray


class Stamped(DefaultSavePlanner):
    """Says in which process the global step ran. Defined here: the coordinator has to be able to load it."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data["global step in"] = os.getpid()
        return plans, metadata


SAVES = {
    "renaming": lambda place, rank: (plugins.RenamingSavePlanner(), None),
    "half": lambda place, rank: (plugins.HalfPlanner(), None),
    "extra data": lambda place, rank: (plugins.ExtraDataPlanner({"of": rank}), None),
    "old": lambda place, rank: (plugins.OldPlanner(), None),
    "remembering": lambda place, rank: (plugins.RememberingPlanner(), None),
    "cannot be pickled": lambda place, rank: (plugins.LockingPlanner(), plugins.LockingWriter(place)),
    ".pt files": lambda place, rank: (None, plugins.PtFolderWriter(place)),
    "one pickle": lambda place, rank: (None, plugins.OneFileWriter(place)),
    "torch's, extended": lambda place, rank: (None, plugins.SigningWriter(place)),
    "keeps a log": lambda place, rank: (plugins.RememberingPlanner(), plugins.LoggingWriter(place)),
}
READERS = {
    "cannot be pickled": plugins.LockingReader,
    ".pt files": plugins.PtFolderReader,
    "one pickle": plugins.OneFileReader,
    "torch's, extended": plugins.SignedReader,
    "keeps a log": plugins.PtFolderReader,
}


def model_state(rank: int, value: float | None = None) -> dict[str, object]:
    """A DTensor with a row a rank, a replicated tensor, and Python values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rows = torch.arange(6.0).reshape(2, 3) + 1 if value is None else torch.full((2, 3), value)
    return {
        "rows": distribute_tensor(rows, init_device_mesh("cpu", (2,)), [Shard(0)]),
        "all": torch.arange(3.0) if value is None else torch.full((3,), value),
        "n": [1, "x"] if value is None else None,
    }


def facts(metadata) -> tuple[object, ...]:
    where = {(index.fqn, index.offset) for index in metadata.storage_data}
    return metadata.state_dict_metadata, metadata.planner_data, where


def save_both_ways(rank: int, folder: Path) -> list[str]:
    """Names of plug-ins whose metadata differ, in what is returned or in what is stored."""
    wrong = []
    for name, make in SAVES.items():
        found = []
        for way in (torch_dcp, dcp):
            place = folder / name / way.__name__
            planner, writer = make(place, rank)
            returned = way.save(model_state(rank), checkpoint_id=place, planner=planner, storage_writer=writer)
            reader = READERS.get(name, FileSystemReader)(place)
            stored = facts(reader.read_metadata())
            found.append((stored, facts(returned) if way is dcp else stored))
        if found[0] != found[1]:
            wrong.append(name)
    return wrong


def load_both_ways(rank: int, folder: Path) -> list[str]:
    """What differs after a load, by plug-in and by who saved and who loads."""
    wrong = []
    for name, reader in READERS.items():
        for saved_by in (torch_dcp, dcp):
            for way in (torch_dcp, dcp):
                place = folder / name / saved_by.__name__
                filled = model_state(rank, value=-1.0)
                way.load(filled, checkpoint_id=place, storage_reader=reader(place))
                expected = model_state(rank)
                if not (
                    same_bits(filled["rows"].to_local(), expected["rows"].to_local())
                    and same_bits(filled["all"], expected["all"])
                    and filled["n"] == expected["n"]
                ):
                    wrong.append(f"{name}, saved by {saved_by.__name__}, loaded by {way.__name__}")
    filled = model_state(rank, value=-1.0)
    dcp.load(filled, checkpoint_id=folder / "renaming" / dcp.__name__, planner=plugins.RenamingLoadPlanner())
    return wrong if same_bits(filled["all"], torch.arange(3.0)) else [*wrong, "renaming back"]


def where_the_global_step_runs(rank: int, folder: Path) -> tuple[int, int, int]:
    travels = dcp.save({"n": 1}, checkpoint_id=folder / "a", planner=Stamped())
    stays = dcp.save(
        {"n": 1}, checkpoint_id=folder / "b", planner=Stamped(), storage_writer=plugins.PtFolderWriter("x")
    )
    return os.getpid(), travels.planner_data["global step in"], stays.planner_data["global step in"]


def all_of_it(rank: int, folder: Path) -> tuple[list[str], list[str], tuple[int, int, int]]:
    """One after the other in one process group: each group of ours has a coordinator, which is a process."""
    return save_both_ways(rank, folder), load_both_ways(rank, folder), where_the_global_step_runs(rank, folder)


@pytest.fixture(scope="module")
def outcomes(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    return layouts.in_group(ranks, 2, all_of_it, folder, folder)


def test_every_plug_in_saves_the_same_on_two_ranks_as_under_torch(outcomes):
    assert [wrong for wrong, _, _ in outcomes] == [[], []]


def test_every_plug_in_loads_the_same_on_two_ranks_as_under_torch(outcomes):
    assert [wrong for _, wrong, _ in outcomes] == [[], []]


def test_a_planner_plans_globally_at_the_coordinator_and_with_a_users_writer_on_rank_zero(outcomes):
    (zero, travels, stays), (one, *_) = [pids for _, _, pids in outcomes]
    assert travels not in (zero, one, os.getpid())
    assert stays == zero
