"""``CheckpointManager.load(fallback=True)``: past damaged steps to one that is whole, on all ranks alike."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards, PerRank
from ray_dcp.errors import ConfigError, CorruptCheckpointError, FormatVersionError, StateDictError
from ray_dcp.format.manifest import FORMAT_VERSION, Manifest, decode_manifest, encode_manifest, metadata_digest
from ray_dcp.format.names import MANIFEST, METADATA, step_folder
from ray_dcp.manager import is_damage
from ray_dcp.protocol.exception import RankFailure
from tests.ranks import ThreadGroup, ThreadRanks, require_no_errors


class Model(torch.nn.Module):
    """A ``Stateful`` whose state is its own tensors."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))
        self.loaded = 0

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.loaded += 1
        return super().load_state_dict(state_dict, *args, **kwargs)


def state(rank, world_size, value):
    return {
        "w": LocalShards((2 * world_size,), {(2 * rank,): torch.full((2,), value)}),
        "model": Model(value),
        "cursor": PerRank((rank, value)),
        "name": f"value {value}",
    }


def require_value(filled, rank, value):
    (shard,) = filled["w"].chunks.values()
    assert shard.tolist() == [value] * 2
    assert filled["model"].weight.tolist() == [value] * 3
    assert filled["model"].loaded == 1
    assert filled["cursor"].value == (rank, value)
    assert filled["name"] == f"value {value}"


class Run:
    """Steps 10, 20 and 30 of 1 or 2 ranks; each holds its number everywhere."""

    def __init__(self, root, world_size):
        self.root, self.world_size = root, world_size
        for step in (10, 20, 30):
            require_no_errors(
                self.on_ranks(lambda m, rank, step=step: m.save(step, state(rank, world_size, float(step))))
            )

    def on_ranks(self, call):
        if self.world_size == 1:
            try:
                return [call(dcp.CheckpointManager(self.root), 0)]
            except Exception as error:
                return [error]
        ranks = ThreadRanks(self.world_size)
        managers = [dcp.CheckpointManager(self.root, group=ThreadGroup(ranks, rank)) for rank in range(self.world_size)]
        return ranks.run(lambda rank: call(managers[rank], rank))

    def templates(self):
        return [state(rank, self.world_size, float("nan")) for rank in range(self.world_size)]

    def load(self, templates, **options):
        return self.on_ranks(lambda manager, rank: manager.load(templates[rank], **options))

    def folder(self, step):
        return Path(self.root, step_folder(step))

    def shard(self, step):
        return sorted(self.folder(step).glob("*.distcp"))[0]


@pytest.fixture(params=[1, 2], ids=["alone", "two ranks"])
def run(request, tmp_path):
    return Run(tmp_path, request.param)


def flip_payload(run, step):
    manifest = decode_manifest((run.folder(step) / MANIFEST).read_bytes(), file="m")
    entry = next(entry for entry in manifest.entries if entry.fqn == "model.weight")
    path = run.folder(step) / entry.file
    content = bytearray(path.read_bytes())
    content[entry.payload_offset] ^= 1
    path.write_bytes(content)


def truncate(run, step):
    path = run.shard(step)
    path.write_bytes(path.read_bytes()[:200])


def break_manifest(run, step):
    (run.folder(step) / MANIFEST).write_bytes(b"PAR1 garbage PAR1")


DAMAGE = {
    "payload": flip_payload,
    "truncated": truncate,
    "deleted": lambda run, step: run.shard(step).unlink(),
    "manifest": break_manifest,
    "metadata": lambda run, step: (run.folder(step) / METADATA).write_bytes(b"garbage"),
}
each_damage = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)


@each_damage
def test_the_newest_step_is_damaged_and_an_older_one_is_loaded_on_all_ranks(run, damage):
    damage(run, 30)
    templates = run.templates()
    assert run.load(templates, fallback=True) == [20] * run.world_size
    for rank, filled in enumerate(templates):
        require_value(filled, rank, 20.0)


@each_damage
def test_the_given_step_is_damaged_and_an_older_one_is_loaded_on_all_ranks(run, damage, caplog):
    damage(run, 20)
    templates = run.templates()
    with caplog.at_level(logging.WARNING):
        assert run.load(templates, step=20, fallback=True) == [10] * run.world_size
    for rank, filled in enumerate(templates):
        require_value(filled, rank, 10.0)
    (warning, *_) = [text for text in caplog.messages if "going on with step 10" in text]
    assert step_folder(20) in warning


@each_damage
def test_without_fallback_the_error_names_the_file(run, damage):
    damage(run, 30)
    for error in run.load(run.templates(), step=30):
        assert isinstance(error, CheckpointException)
        assert isinstance(error.__cause__, CorruptCheckpointError)
        assert error.__cause__.file.startswith(str(run.folder(30)))
        assert is_damage(error)


@pytest.mark.parametrize("damage", [flip_payload, truncate], ids=["payload", "truncated"])
def test_without_fallback_the_error_names_the_tensor_and_its_bytes(run, damage):
    damage(run, 30)
    for error in run.load(run.templates(), step=30):
        assert error.__cause__.fqn
        assert error.__cause__.file.endswith(".distcp")
        assert error.__cause__.nbytes > 0
        assert error.__cause__.fqn in str(error)


def test_the_warning_names_file_and_tensor(run, caplog):
    flip_payload(run, 30)
    run.load(run.templates(), fallback=True)
    (warning, *_) = [text for text in caplog.messages if "going on with step 20" in text]
    assert "model.weight" in warning
    assert f"{run.folder(30)}/__" in warning


def test_one_rank_after_another_may_be_the_one_that_finds_it(tmp_path):
    """Different damage for each rank at once, so that each has an error of its own."""
    run = Run(tmp_path, 2)
    for step in (20, 30):
        for path in run.folder(step).glob("*.distcp"):
            path.write_bytes(path.read_bytes()[:100])
        (run.folder(step) / MANIFEST).unlink()
    templates = run.templates()
    assert run.load(templates, fallback=True) == [10, 10]
    for rank, filled in enumerate(templates):
        require_value(filled, rank, 10.0)


def test_when_no_step_is_left_the_first_error_is_raised(run):
    for step in (10, 20, 30):
        flip_payload(run, step)
    for error in run.load(run.templates(), fallback=True):
        assert isinstance(error, CheckpointException)
        assert step_folder(30) in str(error)
        assert isinstance(error.__cause__, CorruptCheckpointError)


def test_nothing_of_the_damaged_step_stays_after_a_load_that_failed(run):
    flip_payload(run, 30)
    templates = run.templates()
    assert all(isinstance(error, CheckpointException) for error in run.load(templates, step=30))
    for filled in templates:
        assert filled["name"] == "value nan"
        assert str(filled["cursor"].value[1]) == "nan"
        assert filled["model"].loaded == 0


def test_what_is_no_damage_is_raised_at_once(run, monkeypatch):
    missing = [{"w": filled["w"], "other": torch.zeros(2)} for filled in run.templates()]
    for error in run.load(missing, fallback=True):
        assert isinstance(error.__cause__, StateDictError)
        assert step_folder(30) in str(error)
    for error in run.load(run.templates(), step=25, fallback=True):
        assert step_folder(25) in str(error)
        assert not is_damage(error)
    metadata = (run.folder(30) / METADATA).read_bytes()
    newer = Manifest([], 1, "ab", metadata_digest(metadata), 5.0, format_version=FORMAT_VERSION + 1)
    (run.folder(30) / MANIFEST).write_bytes(encode_manifest(newer))
    for error in run.load(run.templates(), fallback=True):
        assert isinstance(error.__cause__, FormatVersionError)


def test_a_rank_that_saw_another_reason_goes_along(tmp_path, monkeypatch):
    """Rank 1 cannot read at the moment that rank 0 finds damage: each raises its own, and both go on."""
    run = Run(tmp_path, 2)
    flip_payload(run, 30)
    from ray_dcp import manager

    real, failed = manager.load, []

    def load(state_dict, *, checkpoint_id, group, **options):
        try:
            return real(state_dict, checkpoint_id=checkpoint_id, group=group, **options)
        except CheckpointException:
            if group.rank == 0:
                raise
            failed.append(checkpoint_id)
            failure = RankFailure(1, "read", "StoreError", "Input/output error", "")
            raise CheckpointException("load", checkpoint_id, [failure]) from None

    monkeypatch.setattr(manager, "load", load)
    assert run.load(run.templates(), fallback=True) == [20, 20]
    assert failed == [str(run.folder(30))]


def test_a_rank_that_passes_no_step_number_makes_nobody_wait(tmp_path):
    run = Run(tmp_path, 2)
    templates = run.templates()
    outcomes = run.on_ranks(lambda manager, rank: manager.load(templates[rank], (30, "x")[rank], fallback=True))
    assert isinstance(outcomes[0], CheckpointException)
    assert isinstance(outcomes[1], ConfigError)


def test_damage_is_known_by_its_name_where_its_cause_did_not_survive():
    failures = [
        RankFailure(0, "read", "OSError", "x", ""),
        RankFailure(1, "read", "CorruptCheckpointError", "y", ""),
    ]
    assert is_damage(CheckpointException("load", "/c", failures))
    assert not is_damage(CheckpointException("load", "/c", failures[:1]))


def test_the_latest_is_the_newest_that_is_committed_and_whole(run):
    (run.folder(20) / METADATA).unlink()
    run.shard(30).unlink()
    manager = dcp.CheckpointManager(run.root)
    assert manager.latest().step == 10
    assert [info.step for info in manager.list()] == [10, 30]
    assert run.load(run.templates()) == [10] * run.world_size
