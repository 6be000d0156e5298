"""What a thread keeps from one read to the next."""

from __future__ import annotations

import functools
from contextlib import closing, contextmanager

import pytest

from ray_dcp.errors import StoreError
from ray_dcp.reads.checkpoint_files import CheckpointFiles
from ray_dcp.reads.engine import Task, finished
from ray_dcp.store.memory import MemoryStore

IN_FLIGHT = pytest.mark.parametrize("num", [1, 2, 4])


class CountingStore(MemoryStore):
    """Says which of its objects are open."""

    def __init__(self, url):
        super().__init__(url)
        self.opened_keys, self.now = [], []

    @contextmanager
    def opened(self, key):
        self.opened_keys.append(key)
        self.now.append(key)
        yield functools.partial(self.get_into, key)
        self.now.remove(key)

    def get_into(self, key, offset, buffers):
        if key == "broken":
            raise StoreError("no", url=self.url, key=key)
        for buffer in buffers:
            buffer[:] = self.get(key, offset, len(buffer))
            offset += len(buffer)


class TestLane:
    @pytest.fixture
    def store(self):
        store = CountingStore("memory://lane")
        for key in ("a", "b", "broken"):
            store.put(key, key.encode() * 10)
        return store

    @staticmethod
    def reads(store, *keys):
        files = CheckpointFiles(store, "memory://lane")

        def read(key, lane):
            held = bytearray(3)
            lane.file(files, key)(1, [memoryview(held)])
            assert held == key[:1].encode() * 3
            return 3

        return [Task(functools.partial(read, key), key) for key in keys]

    def test_a_file_stays_open_from_read_to_read_and_the_one_before_is_closed(self, store):
        assert [done for done, _ in finished(self.reads(store, "a", "a", "a", "b", "b", "a"), 1)] == list("aaabba")
        assert store.opened_keys == ["a", "b", "a"]
        assert store.now == []

    @IN_FLIGHT
    def test_no_file_is_left_open_by_a_read_that_fails(self, store, num):
        with pytest.raises(StoreError):
            list(finished(self.reads(store, "a", "broken", "b"), num))
        assert store.now == []

    @IN_FLIGHT
    def test_no_file_is_left_open_when_nobody_wants_the_rest(self, store, num):
        with closing(finished(self.reads(store, *"aaaabbbb"), num)) as some:
            next(some)
        assert store.now == []
