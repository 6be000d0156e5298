"""``StoreWriter`` and ``StoreReader``: what lies on disk, what counts as committed, and use with torch's own calls."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.planner import SavePlan

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, StoreReader, StoreWriter
from ray_dcp.errors import StateDictError, StoreError, SupersededError
from ray_dcp.format.manifest import decode_facts, decode_manifest
from ray_dcp.format.names import ShardFile, parse_shard_file
from ray_dcp.store.local import LocalStore
from ray_dcp.store.open import open_store
from ray_dcp.write.commit import committed_by
from ray_dcp.write.results import StoredItem
from tests.ranks import ThreadRanks, require_no_errors
from tests.shardings import same_bits
from tests.slack import within

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def rank_state(rank: int, value: float = 1.0):
    """Two rows a rank, a replicated tensor, and a Python object."""
    rows = torch.full((2, 3), value + rank)
    return {"rows": LocalShards((4, 3), {(2 * rank, 0): rows}), "n": [value], "all": torch.full((3,), value)}


def save(place, value: float = 1.0, **options):
    return ThreadRanks(2).save(lambda rank: rank_state(rank, value), place, **options)


def values_at(place) -> tuple[list[float], list[float], list[float]]:
    template = {"rows": torch.full((4, 3), float("nan")), "n": None, "all": torch.full((3,), float("nan"))}
    dcp.load(template, checkpoint_id=place, no_dist=True)
    return template["rows"][:, 0].tolist(), template["n"], template["all"].tolist()


def holds(place, value: float) -> bool:
    return values_at(place) == ([value, value, value + 1, value + 1], [value], [value] * 3)


class TestOnDisk:
    def test_a_checkpoint_is_shard_files_a_manifest_and_the_metadata(self, tmp_path):
        (metadata, _) = require_no_errors(save(tmp_path))
        names = {path.name for path in tmp_path.iterdir()}
        shards = [shard for name in names if (shard := parse_shard_file(name))]
        assert names == {".metadata", "manifest.parquet", *(shard.key for shard in shards)}
        assert {(shard.rank, shard.number) for shard in shards} == {(0, 0), (1, 0)}
        (attempt,) = {shard.attempt for shard in shards}
        assert metadata.storage_meta.save_id == attempt
        assert str(metadata.storage_meta.checkpoint_id) == str(tmp_path)

    def test_the_manifest_says_where_every_item_lies(self, tmp_path):
        writer = [StoreWriter(tmp_path, step=9, metrics={"loss": 0.5}) for _ in range(2)]
        ranks = ThreadRanks(2)
        outcomes = ranks.run(lambda rank: ranks.save_rank(rank, rank_state(rank), tmp_path, writer=writer[rank]))
        (metadata, _) = require_no_errors(outcomes)
        manifest = decode_manifest((tmp_path / "manifest.parquet").read_bytes(), file="m")
        assert (manifest.step, manifest.metrics, manifest.world_size) == (9, {"loss": 0.5}, 2)
        assert {(e.fqn, e.offsets, e.file, e.record_offset) for e in manifest.entries} == {
            (index.fqn, None if index.offset is None else tuple(index.offset), info.relative_path, info.offset)
            for index, info in metadata.storage_data.items()
        }
        for entry in manifest.entries:
            assert parse_shard_file(entry.file).rank == entry.rank
        rows = [entry for entry in manifest.entries if entry.fqn == "rows"]
        assert [(e.offsets, e.sizes, e.dtype, e.rank) for e in sorted(rows, key=lambda e: e.rank)] == [
            ((0, 0), (2, 3), "float32", 0),
            ((2, 0), (2, 3), "float32", 1),
        ]

    def test_a_rank_with_nothing_to_write_has_no_file(self, tmp_path):
        require_no_errors(ThreadRanks(3).save(lambda rank: {"n": 1} if rank == 1 else {}, tmp_path))
        assert [path.name[:5] for path in tmp_path.glob("*.distcp")] == ["__1_0"]

    @pytest.mark.parametrize("place", ["memory://c/{}", "{}"])
    def test_saving_an_id_again_writes_new_files_and_leaves_the_old_ones_alone(self, tmp_path, place):
        place = place.format(tmp_path)
        require_no_errors(save(place, 1.0))
        store = open_store(place)
        before = {one.key: store.get(one.key) for one in store.list()}
        require_no_errors(save(place, 5.0))
        assert holds(place, 5.0)
        shards = [name for name in before if name.endswith(".distcp")]
        assert len(shards) == 2
        assert all(store.get(name) == before[name] for name in shards)


def failing(monkeypatch, step: str, when: str, error: BaseException) -> None:
    """Fail one step of the store: ``put`` of the manifest or metadata, or ``put_new`` of a shard file."""
    put, put_new = LocalStore.put, LocalStore.put_new

    def failing_put(self, key, content, **options):
        if key == step and when == "before":
            raise error
        put(self, key, content, **options)
        if key == step:
            raise error

    def failing_put_new(self, key):
        if step == "shard":
            raise error
        return put_new(self, key)

    monkeypatch.setattr(LocalStore, "put", failing_put)
    monkeypatch.setattr(LocalStore, "put_new", failing_put_new)


class TestFailures:
    @pytest.mark.parametrize(
        ("step", "when", "left"),
        [
            ("shard", "before", 1.0),
            ("manifest.parquet", "before", 1.0),
            ("manifest.parquet", "after", 1.0),
            (".metadata", "before", 1.0),
            (".metadata", "after", 5.0),  # it was there before anybody could tell
        ],
    )
    def test_a_save_over_another_that_fails_leaves_the_old_or_the_new(self, tmp_path, monkeypatch, step, when, left):
        require_no_errors(save(tmp_path, 1.0))
        failing(monkeypatch, step, when, StoreError("out of order", url="x"))
        assert all(isinstance(outcome, CheckpointException) for outcome in save(tmp_path, 5.0))
        monkeypatch.undo()
        assert holds(tmp_path, left)
        require_no_errors(save(tmp_path, 7.0))
        assert holds(tmp_path, 7.0)

    def test_a_process_that_dies_between_manifest_and_commit_leaves_the_old_one(self, tmp_path):
        require_no_errors(save(tmp_path, 1.0))
        code = (
            "import os, sys, torch, ray_dcp as dcp\n"
            "from ray_dcp.store.local import LocalStore\n"
            "put = LocalStore.put\n"
            "def dying(self, key, content, **options): os._exit(9) if key == '.metadata' else put(self, key, content)\n"
            "LocalStore.put = dying\n"
            "new = {'rows': torch.zeros(4, 3), 'n': [0], 'all': torch.zeros(3)}\n"
            "dcp.save(new, checkpoint_id=sys.argv[1], no_dist=True)\n"
        )
        manifest = (tmp_path / "manifest.parquet").read_bytes()
        ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=within(120))
        assert ran.returncode == 9, ran.stderr
        assert (tmp_path / "manifest.parquet").read_bytes() != manifest
        assert holds(tmp_path, 1.0)

    def test_what_a_failed_rank_wrote_is_removed(self, tmp_path):
        class Failing(StoreWriter):
            def write_data(self, plan, planner):
                written = super().write_data(plan, planner)
                if plan.storage_data.rank == 1:
                    raise OSError("lost the disk")
                return written

        ranks = ThreadRanks(2)
        outcomes = ranks.run(lambda rank: ranks.save_rank(rank, rank_state(rank), tmp_path, writer=Failing(tmp_path)))
        assert all("lost the disk" in str(outcome) for outcome in outcomes)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("fault", ["lost", "twice", "other"])
    def test_results_that_do_not_match_the_plan_are_not_committed(self, tmp_path, fault):
        class Miscounting(StoreWriter):
            def finish(self, metadata, results):
                first = results[0][0]
                results[0] = {
                    "lost": results[0][1:],
                    "twice": [*results[0], first],
                    "other": [dataclasses.replace(first, index=dataclasses.replace(first.index, fqn="x")), *results[0]],
                }[fault]
                super().finish(metadata, results)

        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": torch.ones(1), "b": 2}, storage_writer=Miscounting(tmp_path), no_dist=True)
        assert isinstance(caught.value.__cause__, StateDictError)
        assert "nothing was committed" in str(caught.value)
        assert not (tmp_path / ".metadata").exists()

    def test_a_planner_that_resolves_another_shape_than_it_planned_is_found(self, tmp_path):
        class Careless(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                return super().resolve_data(write_item)[:2]

        with pytest.raises(
            CheckpointException, match=r"w: the planner resolved a tensor of shape \(2,\), the plan says"
        ):
            dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", planner=Careless(), no_dist=True)

    def test_a_planner_that_resolves_what_has_no_plain_bytes_is_found(self, tmp_path):
        class Sparse(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                return super().resolve_data(write_item).to_sparse()

        with pytest.raises(CheckpointException, match=r"w: a tensor of layout torch\.sparse_coo"):
            dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", planner=Sparse(), no_dist=True)


class TestWithTorchsCalls:
    """The two are ordinary plug-ins of ``torch.distributed.checkpoint``."""

    @pytest.mark.parametrize("place", ["memory://with-torch/{}", "{}"])
    def test_they_save_and_load_under_torch(self, tmp_path, place):
        place = place.format(tmp_path)
        values = {"w": torch.arange(6.0), "deep": {"n": [1, 2]}, "e": torch.empty(0, 3)}
        torch_dcp.save(values, storage_writer=StoreWriter(place, step=3), no_dist=True)
        template = {"w": torch.full((6,), float("nan")), "deep": {"n": None}, "e": torch.empty(0, 3)}
        torch_dcp.load(template, storage_reader=StoreReader(place), no_dist=True)
        assert same_bits(template["w"], values["w"])
        assert template["deep"] == {"n": [1, 2]}
        manifest = decode_manifest(open_store(place).get("manifest.parquet"), file="m")
        assert {entry.fqn for entry in manifest.entries} == {"w", "deep.n", "e"}

    def test_checkpoint_id_takes_the_place_of_the_writers_own(self, tmp_path):
        torch_dcp.save({"n": 1}, checkpoint_id=tmp_path / "b", storage_writer=StoreWriter(tmp_path / "a"), no_dist=True)
        template = {"n": 0}
        torch_dcp.load(template, checkpoint_id=tmp_path / "b", storage_reader=StoreReader(tmp_path / "a"), no_dist=True)
        assert template["n"] == 1
        assert not (tmp_path / "a").exists()

    def test_results_are_dcps_with_what_the_manifest_needs(self, tmp_path):
        writer = StoreWriter(tmp_path)
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner({"w": torch.ones(3)}, writer.storage_meta(), True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = writer.prepare_global_plan(plans)
        (result,) = writer.write_data(plan, planner).value()
        assert isinstance(result, StoredItem)
        assert (result.dtype, result.sizes, result.rank, result.index.fqn) == ("float32", (3,), 0, "w")
        assert result.size_in_bytes == result.storage_data.length == result.payload.record_nbytes

    def test_an_empty_plan_writes_nothing(self, tmp_path):
        writer = StoreWriter(tmp_path / "c")
        (plan,) = writer.prepare_global_plan([SavePlan([])])
        assert writer.write_data(plan, dcp.DefaultSavePlanner()).value() == []
        assert not (tmp_path / "c").exists()

    @pytest.mark.parametrize("kind", [StoreWriter, StoreReader])
    def test_they_know_which_places_they_can_use(self, kind):
        assert kind.validate_checkpoint_id("/some/where")
        assert kind.validate_checkpoint_id("memory://x")
        assert not kind.validate_checkpoint_id("nonsense://x")

    def test_a_writer_used_again_starts_a_new_attempt(self, tmp_path):
        writer = StoreWriter(tmp_path)
        attempts = {
            dcp.save({"n": number}, storage_writer=writer, no_dist=True).storage_meta.save_id for number in range(3)
        }
        assert len(attempts) == 3
        template = {"n": 0}
        dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
        assert template["n"] == 2


class TestTwoAttemptsAtOnePlace:
    """Whichever began last stays, however late the other comes."""

    @staticmethod
    def begin(place, value):
        writer, planner = StoreWriter(place), dcp.DefaultSavePlanner()
        planner.set_up_planner({"w": torch.full((4,), value)}, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        (plan,) = writer.prepare_global_plan(plans)
        return writer, metadata, lambda: writer.write_data(plan, planner).value()

    @staticmethod
    def loaded(place):
        template = {"w": torch.full((4,), float("nan"))}
        dcp.load(template, checkpoint_id=place, no_dist=True)
        return template["w"].tolist()

    def test_the_older_one_is_refused_when_the_newer_has_committed(self, tmp_path):
        older, newer = self.begin(tmp_path, 1.0), self.begin(tmp_path, 2.0)
        late = older[2]()
        newer[0].finish(newer[1], [newer[2]()])
        before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
        with pytest.raises(SupersededError, match="newer save"):
            older[0].finish(older[1], [late])
        assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
        assert self.loaded(tmp_path) == [2.0] * 4

    def test_the_older_one_is_refused_while_the_newer_writes(self, tmp_path):
        older, newer = self.begin(tmp_path, 1.0), self.begin(tmp_path, 2.0)
        written = older[2](), newer[2]()
        with pytest.raises(SupersededError):
            older[0].finish(older[1], [written[0]])
        assert not (tmp_path / ".metadata").exists()
        newer[0].finish(newer[1], [written[1]])
        assert self.loaded(tmp_path) == [2.0] * 4

    def test_the_newer_one_takes_the_place_of_the_older(self, tmp_path):
        older, newer = self.begin(tmp_path, 1.0), self.begin(tmp_path, 2.0)
        older[0].finish(older[1], [older[2]()])
        assert self.loaded(tmp_path) == [1.0] * 4
        newer[0].finish(newer[1], [newer[2]()])
        assert self.loaded(tmp_path) == [2.0] * 4

    def test_one_that_is_overtaken_between_manifest_and_metadata_is_refused(self, tmp_path, monkeypatch):
        older, newer = self.begin(tmp_path, 1.0), self.begin(tmp_path, 2.0)
        late, put = older[2](), LocalStore.put

        def overtake(store, key, content, **options):
            put(store, key, content, **options)
            if key == "manifest.parquet":
                monkeypatch.setattr(LocalStore, "put", put)
                newer[0].finish(newer[1], [newer[2]()])

        monkeypatch.setattr(LocalStore, "put", overtake)
        with pytest.raises(SupersededError):
            older[0].finish(older[1], [late])
        assert self.loaded(tmp_path) == [2.0] * 4

    def test_a_clock_that_was_ahead_does_not_shut_out_those_who_come_later(self, tmp_path):
        ahead = ShardFile(0, 0, f"{2**62:016x}ffffffff")
        (tmp_path / ahead.key).write_bytes(b"left by a crash")
        writer, metadata, write = self.begin(tmp_path, 3.0)
        writer.finish(metadata, [write()])
        assert self.loaded(tmp_path) == [3.0] * 4


def attempt_of(folder) -> str:
    return decode_facts((folder / "manifest.parquet").read_bytes(), file="").attempt


@pytest.mark.parametrize("state", [{"w": torch.ones(2)}, {}], ids=["", "of nothing"])
def test_a_writer_is_told_whether_its_attempt_is_committed(tmp_path, state):
    require_no_errors(ThreadRanks(1).save(lambda rank: state, tmp_path))
    committed = (tmp_path / ".metadata").read_bytes()
    assert committed_by(LocalStore(tmp_path), attempt_of(tmp_path)) == committed
    assert committed_by(LocalStore(tmp_path), "0" * 24) is None
    assert committed_by(LocalStore(tmp_path / "nothing"), attempt_of(tmp_path)) is None


def test_an_attempt_is_committed_until_a_newer_one_that_has_put_its_manifest_is(tmp_path):
    ranks = ThreadRanks(1)
    require_no_errors(ranks.save(lambda rank: {"w": torch.ones(2)}, tmp_path))
    older, committed = attempt_of(tmp_path), (tmp_path / ".metadata").read_bytes()
    require_no_errors(ranks.save(lambda rank: {"w": torch.zeros(2)}, tmp_path))
    (tmp_path / ".metadata").write_bytes(committed)
    assert committed_by(LocalStore(tmp_path), older) == committed
    assert committed_by(LocalStore(tmp_path), attempt_of(tmp_path)) is None
