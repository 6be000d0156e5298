"""What a node agent does with the jobs of its ranks, in one process."""

from __future__ import annotations

from array import array

import pytest

from ray_dcp.protocol.node_agent import DeputyJob, FileJob, NodeAgent, StagedPart
from ray_dcp.staging.sealing import OpenEnds
from ray_dcp.staging.shared_buffer import SharedBuffer
from ray_dcp.staging.write_rate import WriteRate
from tests.protocol.handed_saves import DirectLink, planned
from tests.protocol.test_coordinator import formed
from tests.protocol.test_deputies import require_committed
from tests.protocol.test_loads_from_memory import Node


def refuse(what):
    if what in ("write", "fail"):
        raise RuntimeError("the way to the coordinator is broken in some new way")


def job_of(one):
    return DeputyJob(one.handed_over, StagedPart(one.write_message, None))


@pytest.mark.parametrize("back", [False, True], ids=["", "and it cannot say so either"])
def test_a_job_that_ends_without_the_coordinator_having_heard_of_it_is_the_ranks_again(tmp_path, back, caplog):
    """The coordinator went on counting the agent's signs of life, and none of the rank's, which was at work."""
    coordinator = formed(1)
    (one,) = planned(coordinator, tmp_path / "c", world_size=1)

    def before(what):
        refuse("fail" if back and what == "hand back" else what)

    agent = NodeAgent(DirectLink([coordinator], "agent-0", before))
    assert not agent.take(job_of(one)).failed
    told = agent.told(one.handed_over.call_id, 0)
    assert told is not None
    assert told.taken_back
    assert "broken in some new way" in told.text
    assert agent.num_open == 0
    assert coordinator.has_part_with("agent-0") is back
    assert one.write(coordinator).exception(0) is None
    require_committed(tmp_path / "c", [one])
    assert "cannot end a save of rank 0" in caplog.text


def test_a_file_that_its_rank_has_written_meanwhile_fails_nothing(tmp_path):
    """The rank had given the agent up, which was slow: the save failed for all ranks, by "File exists"."""
    coordinator = formed(1)
    (one,) = planned(coordinator, tmp_path / "c", world_size=1)
    (written,) = (tmp_path / "c").glob("*.distcp")
    content = written.read_bytes()
    agent = NodeAgent(DirectLink([coordinator], "agent-0", lambda what: None))
    with SharedBuffer.create(4096) as buffer:
        file = FileJob(
            buffer.name,
            buffer.version,
            4096,
            OpenEnds(array("q"), array("I"), ()),
            str(tmp_path / "c"),
            written.name,
            False,
        )
        assert not agent.take(DeputyJob(one.handed_over, StagedPart(one.write_message, file))).failed
        told = agent.told(one.handed_over.call_id, 0)
    assert told.taken_back
    assert written.read_bytes() == content
    assert one.write(coordinator).exception(0) is None
    require_committed(tmp_path / "c", [one])


def test_the_job_after_one_that_has_ended_so_is_carried_out(tmp_path):
    coordinator, broken = formed(1), ["write"]

    def before(what):
        if what in broken:
            broken.remove(what)
            refuse(what)

    agent = NodeAgent(DirectLink([coordinator], "agent-0", before, patience_s=30))
    saves = []
    for number in (0, 1):
        saves += planned(coordinator, tmp_path / str(number), world_size=1, number=number)
        agent.take(job_of(saves[-1]))
    first, second = saves
    assert agent.told(first.handed_over.call_id, 0).taken_back
    first.write(coordinator).result(0)
    assert not agent.told(second.handed_over.call_id, 0).failed
    require_committed(tmp_path / "0", [first])
    require_committed(tmp_path / "1", [second])


def test_all_ranks_of_a_node_share_one_rate_of_writing(tmp_path, monkeypatch):
    spent = []
    monkeypatch.setattr(WriteRate, "spend", lambda self, nbytes, per_s: spent.append((self, nbytes, per_s)))
    monkeypatch.setenv("RAY_DCP_AGENT_WRITE_RATE", "50e6")
    Node().save(str(tmp_path / "c"), 1.0)
    assert {(rate, per_s) for rate, _, per_s in spent} == {(spent[0][0], 50e6)}
    files = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp"))
    assert sum(nbytes for _, nbytes, _ in spent) == files > 0
