"""An asynchronous save for which there is no memory: what a rank writes is written before the call returns."""

from __future__ import annotations

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException
from ray_dcp.staging.buffer_errors import StagingMemoryError
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.write.writer import StoreWriter
from tests.protocol.test_async_save import _no_save_left_behind  # noqa: F401 - nor any buffer
from tests.protocol.test_loads_from_memory import Node, state_of
from tests.ranks import require_no_errors
from tests.slack import within


@pytest.fixture(autouse=True, params=["no memory", "budget"])
def _no_room(monkeypatch, request):
    def refuse(nbytes):
        raise StagingMemoryError(nbytes=nbytes, available_nbytes=0, reason="it would not fit")

    if request.param == "budget":
        monkeypatch.setenv("RAY_DCP_STAGING_NBYTES", "100")
    else:
        monkeypatch.setattr(SharedBuffer, "create", refuse)


def told(caplog):
    return [record.getMessage() for record in caplog.records if "before async_save returns" in record.getMessage()]


def test_it_is_written_when_the_call_returns_and_the_agent_sends_the_results(tmp_path, caplog):
    node = Node()

    def save_rank(rank):
        state = state_of(rank, 3.0)
        response = dcp.async_save(state, checkpoint_id=tmp_path / "c", group=node.groups[rank])
        files = [file.name for file in (tmp_path / "c").glob(f"__{rank}_*.distcp")]
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, dcp.LocalShards):
                for chunk in value.chunks.values():
                    chunk.zero_()
        response.result(within(60))
        return files

    files = require_no_errors(node.ranks.run(save_rank))
    assert [len(of_rank) for of_rank in files] == [1, 1]
    node.load(tmp_path / "c", 1, 3.0)
    assert len(told(caplog)) == 2
    assert node.deputies.agent.memory.held(str(tmp_path / "c")) == ()


def test_a_process_alone_does_so_too(tmp_path, caplog):
    state = {"w": torch.arange(5), "n": [1]}
    response = dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 1
    state["w"].zero_()
    response.result(within(60))
    loaded = {"w": torch.zeros(5, dtype=torch.int64), "n": None}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert (loaded["w"].tolist(), loaded["n"]) == ([0, 1, 2, 3, 4], [1])
    assert len(told(caplog)) == 1


def test_where_that_fails_the_call_fails_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(writer, plan, planner):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StoreWriter, "write_data", refuse)
    with pytest.raises(CheckpointException, match=r"phase 'write'.*No space left on device"):
        dcp.async_save({"w": torch.arange(5)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert list(tmp_path.rglob("*.distcp")) == list(tmp_path.rglob(".metadata")) == []
    monkeypatch.undo()
    dcp.save({"w": torch.arange(5)}, checkpoint_id=tmp_path / "c", no_dist=True)
