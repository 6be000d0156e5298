"""Values that ranks hold under one name and that differ: one rank's, whole, and never without a word."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ray_dcp import CheckpointException, LocalShards, PerRank
from ray_dcp.catalog.committed import open_manifest
from ray_dcp.cli.main import main
from ray_dcp.errors import ConfigError, StateDictError
from ray_dcp.protocol import replica_warnings
from ray_dcp.settings import ReplicaCheck, replica_check_from
from ray_dcp.store.open import open_store
from tests.ranks import ThreadRanks, require_no_errors, save_request

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_told_before(monkeypatch):
    monkeypatch.setattr(replica_warnings, "_times_told", type(replica_warnings._times_told)())


def restored(template, place):
    torch_dcp.load(template, checkpoint_id=place)
    return template


def by_rank(rank):
    """Everything differs between ranks, and the lists are long enough to be spread over all of them."""
    return {
        "tensor": torch.full((4,), float(rank + 1)),
        "number": rank + 1,
        "string": f"of {rank}",
        "list": [rank + 1] * 5,
        "tensors": [torch.tensor([rank + 1.0]) for _ in range(5)],
        "nested": {"mean": torch.full((3,), rank + 0.5), "count": rank, "tuple": (rank, "x")},
        "same": torch.arange(8.0),
        "also": "the same",
    }


TEMPLATE = {
    "tensor": torch.zeros(4),
    "number": 0,
    "string": "",
    "list": [],
    "tensors": [torch.zeros(1) for _ in range(5)],
    "nested": {"mean": torch.zeros(3), "count": 0, "tuple": ()},
    "same": torch.zeros(8),
    "also": "",
}
DIFFERING = [
    "list",
    "nested.count",
    "nested.mean",
    "nested.tuple",
    "number",
    "string",
    "tensor",
    *[f"tensors.{n}" for n in range(5)],
]


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def assert_of_rank_0(state):
    expected = by_rank(0)
    assert state["tensor"].tolist() == expected["tensor"].tolist()
    assert [t.tolist() for t in state["tensors"]] == [[1.0]] * 5
    assert state["nested"]["mean"].tolist() == [0.5] * 3
    for name in ("number", "string", "list", "also"):
        assert state[name] == expected[name]
    assert (state["nested"]["count"], state["nested"]["tuple"]) == (0, (0, "x"))
    assert state["same"].tolist() == list(range(8))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_lowest_rank_s_value_is_saved_whole_with_a_warning_for_each_name(tmp_path, caplog, world_size):
    require_no_errors(ThreadRanks(world_size).save(by_rank, tmp_path / "c"))
    assert_of_rank_0(restored(TEMPLATE, tmp_path / "c"))
    told = warned(caplog)
    assert [text.split(" ")[0] for text in told] == DIFFERING
    assert f"tensor (ranks 0 | 1{' | 2' * (world_size == 3)}, largest difference {world_size - 1})" in " ".join(told)
    assert all("rank 0's was saved" in text and "replica_check" in text for text in told)


def test_a_torch_writer_or_a_planner_of_the_user_s_gets_the_same(tmp_path, caplog):
    class OwnPlanner(DefaultSavePlanner):
        pass

    for name, options in {
        "torch writer": lambda: {"writer": FileSystemWriter(tmp_path / "torch writer")},
        "own planner": lambda: {"planner": OwnPlanner()},
    }.items():
        ranks = ThreadRanks(2)
        given = [options(), options()]
        require_no_errors(
            ranks.run(lambda rank, r=ranks, n=name, g=given: r.save_rank(rank, by_rank(rank), tmp_path / n, **g[rank]))
        )
        assert_of_rank_0(restored(TEMPLATE, tmp_path / name))
        assert len(warned(caplog)) == len(DIFFERING), "each name once in a process"


def test_a_planner_that_cannot_travel_writes_the_lowest_rank_s_too(tmp_path, caplog):
    import threading

    class Locked(DefaultSavePlanner):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    ranks = ThreadRanks(2)
    require_no_errors(ranks.run(lambda rank: ranks.save_rank(rank, by_rank(rank), tmp_path / "c", planner=Locked())))
    assert_of_rank_0(restored(TEMPLATE, tmp_path / "c"))
    assert len(warned(caplog)) == len(DIFFERING)


def test_names_are_told_once_and_then_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ray_dcp")
    ranks = ThreadRanks(2)
    for number in range(3):
        require_no_errors(ranks.save(lambda rank: {"bn": torch.tensor([float(rank)])}, tmp_path / str(number)))
    assert len(warned(caplog)) == 1
    counted = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO and "again" in r.getMessage()]
    assert [("in 2 saves" in counted[0], "in 3 saves" in counted[1])] == [(True, True)]


def test_many_names_are_cut_short(tmp_path, caplog):
    require_no_errors(ThreadRanks(2).save(lambda rank: {f"n{i}": rank for i in range(500)}, tmp_path / "c"))
    assert len(warned(caplog)) == 21
    assert "480 more names" in warned(caplog)[-1]


def test_ranks_that_agree_hear_nothing(tmp_path, caplog):
    def state(rank):
        return {
            "w": torch.arange(10.0),
            "big": torch.ones(MIB),
            "set": ({f"{n}" for n in range(20)},),
            "rng": PerRank(rank),
            "rows": LocalShards((2, 3), {(rank, 0): torch.full((1, 3), float(rank))}),
            "nan": float("nan"),
        }

    require_no_errors(ThreadRanks(2).save(state, tmp_path / "c"))
    assert not warned(caplog)
    assert open_manifest(open_store(str(tmp_path / "c"))).differing == ()


def test_chunks_that_two_ranks_hold_are_compared(tmp_path, caplog):
    def state(rank):
        return {"w": LocalShards((2, 3), {(0, 0): torch.zeros(1, 3), (1, 0): torch.full((1, 3), float(rank))})}

    require_no_errors(ThreadRanks(2).save(state, tmp_path / "c"))
    assert [text.split(",")[0] for text in warned(caplog)] == ["w (ranks 0 | 1"]
    assert restored({"w": torch.ones(2, 3)}, tmp_path / "c")["w"].tolist() == [[0.0] * 3] * 2


def test_large_tensors_are_looked_at_here_and_there_or_whole(tmp_path, caplog):
    def everywhere(rank):
        return {"w": torch.full((MIB,), float(rank))}

    def at_one_place(rank):
        w = torch.zeros(MIB)
        w[MIB // 2 + 77777] = rank
        return {"v": w}

    require_no_errors(ThreadRanks(2).save(everywhere, tmp_path / "a"))
    assert len(warned(caplog)) == 1
    require_no_errors(ThreadRanks(2).save(at_one_place, tmp_path / "b"))
    assert len(warned(caplog)) == 1, "not looked at there"
    check = ReplicaCheck("warn", None)
    require_no_errors(ThreadRanks(2).save(at_one_place, tmp_path / "c", replica_check=check))
    assert len(warned(caplog)) == 2
    assert restored({"v": torch.ones(MIB)}, tmp_path / "c")["v"].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64])
def test_every_dtype_can_differ(tmp_path, caplog, dtype):
    def state(rank):
        return {"w": torch.tensor([1, rank]).to(dtype)}

    require_no_errors(ThreadRanks(2).save(state, tmp_path / "c"))
    assert "largest difference 1)" in warned(caplog)[0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float4_e2m1fn_x2]
)
def test_tensors_without_dimensions_are_compared(tmp_path, caplog, dtype):
    def state(rank):
        bits = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, rank], dtype=torch.uint8)
        return {"same": bits[: dtype.itemsize].view(dtype)[0], "other": bits[-dtype.itemsize :].view(dtype)[0]}

    require_no_errors(ThreadRanks(2).save(state, tmp_path / "c"))
    assert [text.split(" ")[0] for text in warned(caplog)] == ["other"]


def test_with_error_nothing_is_written_and_all_names_and_ranks_are_told(tmp_path, caplog):
    ranks = ThreadRanks(3)
    refused = ranks.save(by_rank, tmp_path / "c", replica_check=ReplicaCheck("error"))
    for error in refused:
        assert isinstance(error, CheckpointException)
        assert error.phase == "plan"
        assert isinstance(error.__cause__, StateDictError)
        assert [problem.split(":")[0] for problem in error.__cause__.problems] == DIFFERING
        assert "ranks 0 | 1 | 2" in error.__cause__.problems[0]
    assert not list(tmp_path.rglob("*.distcp"))
    assert not warned(caplog)
    require_no_errors(ranks.save(lambda rank: by_rank(0), tmp_path / "c", replica_check=ReplicaCheck("error")))


def test_off_looks_at_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ray_dcp.planning.save_plan.replicas.crc32", None)
    monkeypatch.setattr("ray_dcp.planning.save_plan.replicas.scalar_digest", None)
    require_no_errors(ThreadRanks(2).save(by_rank, tmp_path / "c", replica_check=ReplicaCheck("off")))
    assert not warned(caplog)


def test_other_shapes_stay_an_error_of_their_own(tmp_path):
    for check in (ReplicaCheck(), ReplicaCheck("error")):
        refused = ThreadRanks(2).save(lambda rank: {"w": torch.zeros(rank + 1)}, tmp_path / "c", replica_check=check)
        assert "rank 0 has a tensor of shape (1,)" in str(refused[0].__cause__)


def test_what_differed_is_kept_shown_and_told_again_at_load(tmp_path, caplog, capsys):
    require_no_errors(ThreadRanks(2).save(by_rank, tmp_path / "c"))
    kept = open_manifest(open_store(str(tmp_path / "c"))).differing
    assert [one.fqn for one in kept] == DIFFERING
    assert kept[DIFFERING.index("tensor")].ranks == ((0,), (1,))
    assert kept[DIFFERING.index("tensor")].largest_difference == 1.0
    assert kept[DIFFERING.index("string")].largest_difference is None

    assert main(["show", str(tmp_path / "c")]) == 0
    assert "12 values differed between ranks" in capsys.readouterr().out
    assert main(["show", "--json", str(tmp_path / "c")]) == 0
    assert json.loads(capsys.readouterr().out)["differing"][6]["ranks"] == [[0], [1]]

    caplog.clear()
    ranks = ThreadRanks(2)
    require_no_errors(
        ranks.load([{"tensor": torch.zeros(4), "same": torch.zeros(8)} for _ in range(2)], tmp_path / "c")
    )
    (told,) = warned(caplog)
    assert told.startswith("1 values")
    assert "tensor (ranks 0 | 1, largest difference 1)" in told
    caplog.clear()
    require_no_errors(ranks.load([{"same": torch.zeros(8)} for _ in range(2)], tmp_path / "c"))
    assert not warned(caplog)


def test_a_staged_save_tells_of_the_values_at_the_call(tmp_path, caplog):
    from ray_dcp.protocol.rank.async_save import stage_save
    from ray_dcp.protocol.rank.background import BackgroundSaves
    from ray_dcp.protocol.rank.save import plan_save, write_save
    from ray_dcp.staging.buffer_pool import BufferPool

    ranks = ThreadRanks(2)
    place = str(tmp_path / "c")

    def save(rank):
        state = {"w": torch.full((3,), float(rank)), "n": rank}
        call = ranks.call(rank, "save", place)
        planned = plan_save(save_request(state, place, call), call)
        staged = stage_save(planned, call, BufferPool())
        state["w"].fill_(100.0 * rank)
        return BackgroundSaves().start(lambda: write_save(staged, call), call).result(30)

    require_no_errors(ranks.run(save))
    assert "w (ranks 0 | 1, largest difference 1)" in " ".join(warned(caplog))
    assert restored({"w": torch.ones(3)}, place)["w"].tolist() == [0.0] * 3


def test_the_variable_says_what_no_argument_does():
    assert replica_check_from({}).mode == "warn"
    assert replica_check_from({"RAY_DCP_REPLICA_CHECK": "error"}).mode == "error"
    assert replica_check_from({"RAY_DCP_REPLICA_CHECK": "error"}, "off").mode == "off"
    with pytest.raises(ConfigError, match="'never' is none of"):
        replica_check_from({"RAY_DCP_REPLICA_CHECK": "never"})
    with pytest.raises(ConfigError, match="replica_check_nbytes"):
        replica_check_from({}, "warn", -1)


def test_one_process_alone_is_not_slowed(tmp_path, monkeypatch):
    import ray_dcp as dcp

    monkeypatch.setattr("ray_dcp.protocol.engines.plugin_save.replica_digests", None)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
