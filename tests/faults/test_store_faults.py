"""Every operation of a save, a load and a prune fails once, in every way: what was committed stays, and all ranks know.

Real saves and loads of ranks that are threads, on a ``FailingStore``.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import time
import uuid

import pytest
import torch

from ray_dcp import CheckpointException, LocalShards, PerRank
from ray_dcp.catalog.listing import list_checkpoints
from ray_dcp.catalog.newest import latest_checkpoint
from ray_dcp.errors import StoreError, SupersededError
from ray_dcp.format.names import METADATA, new_attempt, shard_files_named_in
from ray_dcp.maintenance.sweep.removal import delete_leftovers, plan_sweep
from ray_dcp.store.local import LocalStore
from ray_dcp.store.open import open_store
from ray_dcp.write.commit import Commit
from tests.ranks import ThreadRanks, require_no_errors
from tests.store.failing import Faults

OLDER, STEP = "step-00000001", "step-00000002"
WRITES = ("put", "open", "write", "close")
KINDS = [
    {"when": "before"},
    {"when": "after"},
    {"when": "part", "only": ("write",)},
    {"when": "before", "lasting": True, "number": errno.EACCES},
    {"when": "after", "only": ("close",)},
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=["before", "after", "short write", "permission", "close raises"])


def state(rank, value, world_size=2):
    width = 6 // world_size
    return {
        "w": LocalShards((6, 4), {(width * rank, 0): torch.full((width, 4), value)}),
        "replicated": torch.full((5,), value, dtype=torch.float64),
        "name": f"value {value}",
        "cursor": PerRank((rank, value), reshard=lambda values, rank, world_size: values[0]),
    }


def template(rank, world_size):
    return state(rank, float("nan"), world_size) | {"name": "not loaded", "cursor": _cursor("not loaded")}


def _cursor(value):
    return PerRank(value, reshard=lambda values, rank, world_size: values[0])


def value_in(filled, rank, world_size):
    """The one value that is everywhere in a loaded state; anything else fails."""
    value = filled["replicated"][0].item()
    expected = state(rank, value, world_size)
    (shard,), (wanted,) = filled["w"].chunks.values(), expected["w"].chunks.values()
    assert torch.equal(shard, wanted)
    assert torch.equal(filled["replicated"], expected["replicated"])
    assert filled["name"] == f"value {value}"
    assert filled["cursor"].value[1] == value
    return value


def save(root, folder, value):
    return ThreadRanks(2).save(lambda rank: state(rank, value), f"{root}/{folder}")


def loaded(root, folder, world_sizes=(3, 1)):
    """What ``folder`` holds, loaded on three ranks and on one."""
    found = set()
    for world_size in world_sizes:
        templates = [template(rank, world_size) for rank in range(world_size)]
        reports = require_no_errors(ThreadRanks(world_size).load(templates, f"{root}/{folder}"))
        assert all("w" in report.loaded for report in reports)
        found |= {value_in(filled, rank, world_size) for rank, filled in enumerate(templates)}
    (value,) = found
    return value


def require_all_told(outcomes):
    """Whether all ranks succeeded; if one did not, each has its ``CheckpointException``."""
    failed = [isinstance(outcome, BaseException) for outcome in outcomes]
    assert all(failed) or not any(failed), outcomes
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes if any(failed)), outcomes
    return not any(failed)


def require_files_there(root, folder):
    store = open_store(f"{root}/{folder}")
    held = {one.key for one in store.list()}
    assert shard_files_named_in(store.get(METADATA)) <= held


class Roots:
    """Fresh copies of one root, local or in memory, with two steps committed."""

    def __init__(self, tmp_path, where):
        self._places = (f"{tmp_path}/{n}" if where == "local" else f"memory://{uuid.uuid4().hex}/{n}"
                        for n in itertools.count())  # fmt: skip
        self._first = next(self._places)
        require_no_errors(save(self._first, OLDER, 1.0))
        require_no_errors(save(self._first, STEP, 2.0))

    def fresh(self):
        place = next(self._places)
        if place.startswith("/"):
            shutil.copytree(self._first, place)
            return place
        source, copy = open_store(self._first), open_store(place)
        for one in source.list():
            copy.put(one.key, source.get(one.key))
        return place


@pytest.fixture(params=["local", "memory"])
def roots(request, tmp_path):
    return Roots(tmp_path, request.param)


def check_after_save(root, outcomes):
    """All that is promised of a save of 3.0 over ``STEP`` that may have failed."""
    succeeded = require_all_told(outcomes)
    held = loaded(root, STEP)
    assert held in ((3.0,) if succeeded else (2.0, 3.0))
    assert loaded(root, OLDER) == 1.0
    for folder in (OLDER, STEP):
        require_files_there(root, folder)
    assert latest_checkpoint(root).step == 2
    require_no_errors(save(root, STEP, 4.0))
    report = delete_leftovers(plan_sweep(root, now=time.time() + 86400.0))
    assert report.failed == []
    assert (loaded(root, STEP, (3,)), loaded(root, OLDER, (3,))) == (4.0, 1.0)
    assert len([one for one in open_store(f"{root}/{STEP}").list() if one.key.endswith(".distcp")]) == 2


@each_kind
def test_a_save_that_fails_anywhere_leaves_the_previous_one_or_itself(roots, kind):
    for number in itertools.count(1):
        root = roots.fresh()
        faults = Faults(fail_at=number, **kind)
        outcomes = save(faults.url(root), STEP, 3.0)
        check_after_save(root, outcomes)
        if not faults.hit:
            assert require_all_told(outcomes)
            break
    assert number > (1 if "only" in kind else 10)


@pytest.mark.parametrize("share", [0, 0.02, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_a_disk_that_is_full_after_some_bytes_fails_the_save_for_all(roots, share):
    enough = Faults(space_nbytes=10**9)
    assert require_all_told(save(enough.url(roots.fresh()), STEP, 3.0))
    root = roots.fresh()
    outcomes = save(Faults(space_nbytes=int(share * (10**9 - enough.space_nbytes))).url(root), STEP, 3.0)
    assert not require_all_told(outcomes)
    assert all("No space left" in str(outcome) for outcome in outcomes)
    check_after_save(root, outcomes)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_first_save_that_fails_anywhere_leaves_nothing_that_a_reader_sees(tmp_path, when):
    for number in itertools.count(1):
        root = tmp_path / f"{number}"
        faults = Faults(fail_at=number, when=when)
        succeeded = require_all_told(save(faults.url(root), STEP, 3.0))
        committed = [info.step for info in list_checkpoints(root)]
        assert committed == [2] if succeeded else committed in ([], [2])
        assert committed == [] or loaded(root, STEP) == 3.0
        delete_leftovers(plan_sweep(root, now=time.time() + 86400.0))
        assert committed or not root.exists() or list(root.iterdir()) == []
        if not faults.hit:
            break
    assert number > 8


@pytest.mark.parametrize("number_of_error", [errno.EIO, errno.EACCES], ids=["EIO", "EACCES"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("world_size", [3, 1])
def test_a_load_that_fails_anywhere_fails_for_all_and_the_next_one_loads(tmp_path, when, number_of_error, world_size):
    root = Roots(tmp_path, "local").fresh()
    for number in itertools.count(1):
        faults = Faults(fail_at=number, when=when, number=number_of_error)
        templates = [template(rank, world_size) for rank in range(world_size)]
        outcomes = ThreadRanks(world_size).load(templates, f"{faults.url(root)}/{STEP}")
        if require_all_told(outcomes):
            assert [value_in(filled, rank, world_size) for rank, filled in enumerate(templates)] == [2.0] * world_size
        else:
            assert all(filled["name"] == "not loaded" for filled in templates)
            assert all(filled["cursor"].value == "not loaded" for filled in templates)
            require_no_errors(ThreadRanks(world_size).load(templates, f"{root}/{STEP}"))
            assert [value_in(filled, rank, world_size) for rank, filled in enumerate(templates)] == [2.0] * world_size
        if not faults.hit:
            break
    assert number > 5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_prune_that_fails_anywhere_deletes_nothing_that_is_needed_and_can_be_run_again(roots, when, lasting):
    for number in itertools.count(1):
        root = roots.fresh()
        require_no_errors(save(root, STEP, 3.0))
        for rank in range(2):
            open_store(root).put(f"step-00000003/__{rank}_0_{'0' * 24}.distcp", b"left")
        faults = Faults(fail_at=number, when=when, lasting=lasting)
        tomorrow = time.time() + 86400.0
        try:
            delete_leftovers(plan_sweep(faults.url(root), now=tomorrow))
        except StoreError as error:
            assert faults.hit, error  # noqa: PT017 - it need not raise
        assert (loaded(root, STEP), loaded(root, OLDER)) == (3.0, 1.0)
        delete_leftovers(plan_sweep(root, now=tomorrow))
        assert plan_sweep(root, now=tomorrow).leftovers == []
        assert (loaded(root, STEP, (3,)), loaded(root, OLDER, (3,))) == (3.0, 1.0)
        assert len(open_store(root).list()) == 8
        if not faults.hit:
            break
    assert number > 8


@pytest.mark.parametrize("lag", [1, 5, 20, 1000])
def test_a_listing_that_lags_hides_no_commit_and_lets_no_older_save_win(tmp_path, lag):
    root = Roots(tmp_path, "local").fresh()
    url = Faults(lag=lag).url(root)
    older = Commit(new_attempt())
    require_no_errors(save(url, STEP, 3.0))
    assert latest_checkpoint(url).step == 2
    assert loaded(url, STEP) == 3.0
    # A save that had begun before comes to its commit only now, and sees no file of the newer one in a listing.
    with pytest.raises(SupersededError):
        older.put(open_store(f"{url}/{STEP}"), b"metadata", lambda: b"manifest", files=())
    require_no_errors(save(url, STEP, 4.0))
    assert loaded(url, STEP) == 4.0
    delete_leftovers(plan_sweep(url, now=time.time() + 86400.0))
    assert (loaded(root, STEP), loaded(root, OLDER)) == (4.0, 1.0)


def test_a_new_step_that_no_listing_shows_yet_is_not_the_latest_and_loads_by_its_name(tmp_path):
    root = Roots(tmp_path, "local").fresh()
    url = Faults(lag=1000).url(root)
    require_no_errors(save(url, "step-00000003", 3.0))
    assert latest_checkpoint(url).step == 2
    assert loaded(url, "step-00000003") == 3.0


def test_a_file_that_somebody_deletes_while_it_is_written_fails_the_commit(tmp_path, monkeypatch):
    """A sweep with too short a grace, say: a checkpoint must not refer to it."""
    root = Roots(tmp_path, "local").fresh()
    put = LocalStore.put

    def delete_first(store, key, content, **options):
        if key == METADATA:
            delete_leftovers(plan_sweep(root, grace_s=0.0, now=time.time() + 86400.0))
        put(store, key, content, **options)

    monkeypatch.setattr(LocalStore, "put", delete_first)
    outcomes = save(root, STEP, 3.0)
    monkeypatch.undo()
    assert not require_all_told(outcomes)
    assert loaded(root, STEP) == 2.0
