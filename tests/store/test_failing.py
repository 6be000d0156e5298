"""``FailingStore`` keeps the contract while it fails nothing, and fails what it is told to."""

from __future__ import annotations

import errno
import uuid

import pytest

from ray_dcp.errors import StoreError, StorePermissionError
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.open import open_store
from ray_dcp.testing.store_contract import FolderStoreContract
from tests.store.failing import FailingStore, Faults


class TestFailingStoreThatFailsNothing(FolderStoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return FailingStore(LocalStore(tmp_path / "root"), Faults())


def exercise(store):
    """One of each operation: 1 put, 2 open, 3 write, 4 close, 5 get, 6 list, 7 list_folders, 8 delete."""
    store.put("a/put", b"1")
    with store.put_new("a/new") as writer:
        writer.write(b"1234")
    store.get("a/put")
    store.list()
    store.list_folders()
    store.delete("a/put")


@pytest.mark.parametrize("when", ["before", "after", "part"])
@pytest.mark.parametrize("number", range(1, 10))
def test_the_nth_operation_fails_and_no_other(tmp_path, when, number):
    faults = Faults(fail_at=number, when=when)
    store = open_store(faults.url(tmp_path / "root"))
    if number == 9:
        exercise(store)
        assert (faults.hit, faults.count) == ([], 8)
        return
    with pytest.raises(StoreError, match="Input/output error"):
        exercise(store)
    assert len(faults.hit) == 1
    held = [one.key for one in LocalStore(tmp_path / "root").list()]
    put_arrived = when == "after" or number > 1
    new_arrived = (number == 4 and when == "after") or number > 4
    deleted = number == 8 and when == "after"
    assert held == ["a/new"] * new_arrived + ["a/put"] * (put_arrived and not deleted)


def test_a_part_of_a_write_arrives(tmp_path):
    store = open_store(Faults(fail_at=1, when="part", only=("write",)).url(tmp_path))
    with store.put_new("key") as writer:
        with pytest.raises(StoreError):
            writer.write(b"1234")
        assert (tmp_path / "key").read_bytes() == b"12"


def test_a_full_disk_takes_what_fits(tmp_path):
    store = open_store(Faults(space_nbytes=5).url(tmp_path))
    store.put("a", b"123")
    with pytest.raises(StoreError, match="No space left"):
        store.put("a", b"456")
    with pytest.raises(StoreError, match="No space left"), store.put_new("b") as writer:
        writer.write(b"1234")
    assert store.get("a") == b"123"


def test_permission_that_is_lost_stays_lost(tmp_path):
    store = open_store(Faults(fail_at=2, lasting=True, number=errno.EACCES).url(tmp_path))
    store.put("a", b"1")
    for _ in range(3):
        with pytest.raises(StorePermissionError):
            store.get("a")


def test_a_listing_that_lags_shows_objects_later_and_reads_see_them_at_once():
    store = open_store(Faults(lag=2).url(f"memory://{uuid.uuid4().hex}/root"))
    assert isinstance(store.inner, MemoryStore)
    store.put("folder/key", b"1")
    assert store.list() == []
    assert store.get("folder/key") == b"1"
    assert store.list_folders() == ["folder"]
    assert [one.key for one in store.list()] == ["folder/key"]
