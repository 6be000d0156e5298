"""What every store must do. A backend's test file subclasses ``StoreContract`` and gives it three hooks.

Two of the hooks reach the objects *without* the store, so that a store cannot vouch for itself. Needs pytest.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ray_dcp.errors import NotAFolderError, ObjectNotFoundError, StoreError
from ray_dcp.store.reading import get_into, opened
from ray_dcp.store.store import Store, exists, get_or_none

Into = Callable[[Store, str, int, Sequence[memoryview]], None]
"""One of the ways of ``get_into``."""

KEYS = [
    "plain",
    ".metadata",
    "__0_0_ab12.distcp",
    "folder/below/it",
    "with space",
    "percent%20and%",
    "hash#mark?query=1&more",
    "plus+at@colon:quote'star*tilde~",
    "[brackets]{braces}",
    "back\\slash",
    "..dots..",
    "umlaut-\u00e4\u00f6/\u65e5\u672c\u8a9e/\U0001f600",
    "n" * 200,
]
NOT_KEYS = ["", "/absolute", "a//b", "a/", "..", "../x", "a/../b", "a/../../b", "./a", "a/.", "nul\0byte"]

SHARD_KEY = "__0_0_ab12.distcp"
"""A key of one attempt alone, as each has its own: a store may keep what it knows of the object."""
LARGE = random.Random(0).randbytes(18_000_000)


def into_opened(store: Store, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
    """Read as ``get_into`` does, from an object that is open, twice: the second read must find it as the first did."""
    with opened(store, key) as fill:
        fill(offset, buffers)
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        fill(offset, buffers)


class StoreContract:
    """Subclass, override the hooks, and pytest runs every test against the backend."""

    put_is_atomic = True
    """False where a reader may see a put half done; the backend's docstring says so."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """An empty store whose root does not exist yet, in a place of its own."""
        raise NotImplementedError

    def put_behind(self, store: Store, key: str, content: bytes) -> None:
        """Put an object without the store."""
        raise NotImplementedError

    def get_behind(self, store: Store, key: str) -> bytes | None:
        """The content of an object, read without the store; None when there is no such object."""
        raise NotImplementedError

    # put

    def test_a_last_look_that_raises_gives_the_put_up(self, store: Store) -> None:
        store.put("key", b"old")

        def refuse() -> None:
            assert self.get_behind(store, "key") == b"old"
            raise LookupError("not now")

        with pytest.raises(LookupError, match="not now"):
            store.put("key", b"new", last_look=refuse)
        assert store.get("key") == b"old"
        assert [one.key for one in store.list()] == ["key"]

    def test_a_last_look_comes_once_and_before_readers_see_the_object(self, store: Store) -> None:
        seen = []
        store.put("key", b"new", last_look=lambda: seen.append(self.get_behind(store, "key")))
        assert seen == [None]
        assert store.get("key") == b"new"

    @pytest.mark.parametrize("key", KEYS)
    def test_put_stores_under_any_key(self, store: Store, key: str) -> None:
        store.put(key, b"content")
        assert self.get_behind(store, key) == b"content"
        assert store.get(key) == b"content"
        assert [one.key for one in store.list()] == [key]

    @pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "byte", "mebibyte"])
    def test_put_replaces_the_whole_object(self, store: Store, content: bytes) -> None:
        self.put_behind(store, "key", b"older and longer than one byte")
        store.put("key", content)
        assert self.get_behind(store, "key") == content

    def test_put_is_seen_whole_or_not_at_all(self, store: Store) -> None:
        if not self.put_is_atomic:
            pytest.skip("this backend does not promise it")
        versions = [bytes([number]) * 100_000 for number in range(4)]
        store.put("key", versions[0])
        done = threading.Event()

        def read_until_done() -> None:
            while not done.is_set():
                assert store.get("key") in versions
                assert [one.key for one in store.list()] == ["key"]

        with ThreadPoolExecutor() as pool:
            reading = [pool.submit(read_until_done) for _ in range(2)]
            for number in range(40):
                store.put("key", versions[number % 4])
            done.set()
            for one in reading:
                one.result()

    @pytest.mark.parametrize("key", NOT_KEYS)
    def test_what_is_no_key_inside_the_root_is_refused(self, store: Store, key: str) -> None:
        for call in (lambda: store.put(key, b""), lambda: store.put_new(key), lambda: store.delete(key)):
            with pytest.raises(StoreError, match="key"):
                call()
        with pytest.raises(StoreError):
            store.get(key)

    # put_new

    def test_put_new_stores_what_was_written(self, store: Store) -> None:
        with store.put_new("folder/key") as writer:
            assert writer.tell() == 0
            assert writer.write(b"one ") == 4
            assert writer.write(bytearray(b"two")) == 3
            assert writer.tell() == 7
        assert self.get_behind(store, "folder/key") == b"one two"

    def test_put_new_without_a_write_stores_an_empty_object(self, store: Store) -> None:
        with store.put_new("key"):
            pass
        assert self.get_behind(store, "key") == b""

    def test_put_new_counts_bytes_of_views_of_any_item_size(self, store: Store) -> None:
        words = memoryview(bytes(range(64))).cast("I")
        with store.put_new("key") as writer:
            assert writer.write(words) == 64
            assert writer.write(words[:0]) == 0
            assert writer.write(memoryview(bytes(6)).cast("B", (2, 3))) == 6
            assert writer.tell() == 70
        assert self.get_behind(store, "key") == bytes(range(64)) + bytes(6)

    def test_put_new_takes_many_large_chunks(self, store: Store) -> None:
        chunk = bytes(range(256)) * 16384
        with store.put_new("key") as writer:
            for _ in range(5):
                writer.write(chunk)
        assert self.get_behind(store, "key") == chunk * 5

    def test_put_new_refuses_an_existing_key_and_leaves_it_alone(self, store: Store) -> None:
        self.put_behind(store, "key", b"first")
        with pytest.raises(StoreError, match="exist"), store.put_new("key") as writer:
            writer.write(b"second")
        assert self.get_behind(store, "key") == b"first"

    @pytest.mark.parametrize("raised", [ValueError("from the body"), OSError("from the body"), KeyboardInterrupt()])
    def test_an_aborted_put_new_leaves_nothing_and_its_error_unchanged(
        self, store: Store, raised: BaseException
    ) -> None:
        with pytest.raises(type(raised)) as caught, store.put_new("folder/key") as writer:  # noqa: PT012 - the body is the test
            writer.write(b"some bytes")
            raise raised
        assert caught.value is raised
        assert self.get_behind(store, "folder/key") is None
        assert store.list() == []
        with store.put_new("folder/key") as writer:
            writer.write(b"again")
        assert self.get_behind(store, "folder/key") == b"again"

    # get

    @pytest.mark.parametrize(
        ("offset", "nbytes", "expected"),
        [
            (0, None, b"0123456789"),
            (0, 10, b"0123456789"),
            (0, 3, b"012"),
            (4, 3, b"456"),
            (4, None, b"456789"),
            (9, 1, b"9"),
            (10, None, b""),
            (10, 0, b""),
            (3, 0, b""),
        ],
    )
    def test_get_returns_the_range(self, store: Store, offset: int, nbytes: int | None, expected: bytes) -> None:
        self.put_behind(store, "key", b"0123456789")
        content = store.get("key", offset, nbytes)
        assert type(content) is bytes
        assert content == expected

    @pytest.mark.parametrize(("offset", "nbytes", "missing"), [(0, 11, 1), (8, 4, 2), (12, None, 2), (99, 1, 90)])
    def test_get_past_the_end_says_how_much_is_missing(
        self, store: Store, offset: int, nbytes: int | None, missing: int
    ) -> None:
        self.put_behind(store, "key", b"0123456789")
        with pytest.raises(StoreError, match=rf"\b{missing} are missing.*key"):
            store.get("key", offset, nbytes)

    def test_get_of_an_absurd_range_is_refused_without_reading(self, store: Store) -> None:
        self.put_behind(store, "key", b"0123456789")
        with pytest.raises(StoreError, match="missing"):
            store.get("key", 0, 2**62)
        for offset, nbytes in [(-1, None), (0, -1)]:
            with pytest.raises(StoreError, match="not a byte range"):
                store.get("key", offset, nbytes)

    def test_get_of_an_empty_object(self, store: Store) -> None:
        self.put_behind(store, "key", b"")
        assert store.get("key") == store.get("key", 0, 0) == b""
        with pytest.raises(StoreError, match="1 are missing"):
            store.get("key", 0, 1)

    def test_get_of_what_is_not_there_is_an_object_not_found(self, store: Store) -> None:
        with pytest.raises(ObjectNotFoundError, match="nope") as caught:
            store.get("nope")
        assert (caught.value.url, caught.value.key) == (store.url, "nope")
        self.put_behind(store, "folder/key", b"")
        for key in ("folder", "folder/other", "folder/key/below"):
            with pytest.raises(ObjectNotFoundError):
                store.get(key)

    def test_what_is_not_there_is_told_without_an_error_to_who_asks_for_that(self, store: Store) -> None:
        self.put_behind(store, "folder/empty", b"")
        assert exists(store, "folder/empty")
        assert get_or_none(store, "folder/empty") == b""
        assert not exists(store, "folder/other")
        assert get_or_none(store, "folder/other") is None

    def test_get_reaches_a_sibling_of_the_root_and_no_further(self, store: Store) -> None:
        name = store.url.partition("?")[0].rpartition("/")[2]
        self.put_behind(store, "key", b"mine")
        assert store.get(f"../{name}/key", 1, 2) == b"in"
        with pytest.raises(ObjectNotFoundError):
            store.get("../another/key")
        for key in (f"../../{name}/key", f"../{name}/../{name}/key", f"a/../../{name}/key", "../key", f"../{name}/"):
            with pytest.raises(StoreError, match="not a key"):
                store.get(key)

    @pytest.mark.parametrize("key", ["key", SHARD_KEY])
    def test_get_sees_what_has_become_of_an_object_since_the_last_get(self, store: Store, key: str) -> None:
        store.put(key, b"0123456789")
        assert store.get(key, 2, 3) == b"234"
        store.put(key, b"another")
        assert store.get(key) == b"another"
        store.delete(key)
        with pytest.raises(ObjectNotFoundError):
            store.get(key, 2, 3)
        with store.put_new(key) as writer:
            writer.write(b"once more")
        assert store.get(key, 5, 4) == b"more"

    def test_get_of_a_large_range_is_the_same_bytes(self, store: Store) -> None:
        self.put_behind(store, SHARD_KEY, LARGE)
        assert store.get(SHARD_KEY) == LARGE
        for offset, nbytes in [(0, len(LARGE)), (12_345, 9_000_001), (len(LARGE) - 8_500_000, 8_500_000)]:
            assert store.get(SHARD_KEY, offset, nbytes) == LARGE[offset : offset + nbytes]
        with pytest.raises(StoreError, match=r"\b7 are missing"):
            store.get(SHARD_KEY, 7, len(LARGE))

    # get_into, opened

    @pytest.fixture(params=[get_into, into_opened])
    def into(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.mark.parametrize("sizes", [(), (0,), (4,), (1, 0, 2, 3), (3,) * 3, (0, 0, 8, 0)])
    def test_get_into_fills_buffers_one_after_the_other(self, store: Store, into: Into, sizes: tuple[int, ...]) -> None:
        self.put_behind(store, "key", b"0123456789")
        buffers = [bytearray(nbytes) for nbytes in sizes]
        into(store, "key", 1, [memoryview(one) for one in buffers])
        assert b"".join(buffers) == b"123456789"[: sum(sizes)]

    @pytest.mark.parametrize(
        "sizes", [(17_000_000,), (1, 16_999_999), (5_000_000, 100, 0, 12_000_000 - 100), (1_000_000,) * 17]
    )
    def test_get_into_fills_large_buffers_and_nothing_beside_them(
        self, store: Store, into: Into, sizes: tuple[int, ...]
    ) -> None:
        self.put_behind(store, SHARD_KEY, LARGE)
        memory = bytearray(b"\xee" * (sum(sizes) + 2))
        rest, buffers = memoryview(memory)[1:-1], []
        for nbytes in sizes:
            buffers.append(rest[:nbytes])
            rest = rest[nbytes:]
        into(store, SHARD_KEY, 1234, buffers)
        assert memory == b"\xee" + LARGE[1234 : 1234 + sum(sizes)] + b"\xee"

    @pytest.mark.parametrize(("key", "held"), [("key", b"0123456789"), (SHARD_KEY, LARGE)], ids=["small", "large"])
    def test_get_into_past_the_end_says_how_much_is_missing(
        self, store: Store, into: Into, key: str, held: bytes
    ) -> None:
        self.put_behind(store, key, held)
        with pytest.raises(StoreError, match=rf"\b5 are missing.*{key}"):
            into(store, key, 4, [memoryview(bytearray(len(held))), memoryview(bytearray(1))])

    @pytest.mark.parametrize("nbytes", [1, 17_000_000])
    def test_get_into_of_what_is_not_there_is_an_object_not_found(self, store: Store, into: Into, nbytes: int) -> None:
        with pytest.raises(ObjectNotFoundError, match="nope"):
            into(store, "nope", 0, [memoryview(bytearray(nbytes))])

    def test_get_into_reaches_a_sibling(self, store: Store, into: Into) -> None:
        name = store.url.partition("?")[0].rpartition("/")[2]
        self.put_behind(store, "key", b"mine")
        buffer = bytearray(2)
        into(store, f"../{name}/key", 1, [memoryview(buffer)])
        assert buffer == b"in"
        with pytest.raises(StoreError, match="not a key"):
            into(store, "../../key", 0, [memoryview(buffer)])

    def test_many_threads_read_ranges_of_one_object(self, store: Store, into: Into) -> None:
        self.put_behind(store, SHARD_KEY, LARGE)

        def read(number: int) -> None:
            offset = number * 500_000
            buffers = [bytearray(9_000_000), bytearray(number)]
            into(store, SHARD_KEY, offset, [memoryview(one) for one in buffers])
            assert b"".join(buffers) == LARGE[offset : offset + 9_000_000 + number]
            assert store.get(SHARD_KEY, offset, 1000) == LARGE[offset : offset + 1000]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(16)))

    # list

    def test_list_is_sorted_and_says_sizes(self, store: Store) -> None:
        contents = {"b": b"22", "a/c": b"333", "a-b": b"1", ".hidden": b"", "a/b/d": b"4444"}
        for key, content in contents.items():
            self.put_behind(store, key, content)
        assert [(one.key, one.nbytes) for one in store.list()] == sorted((k, len(c)) for k, c in contents.items())

    def test_list_below_a_folder_only(self, store: Store) -> None:
        for key in ("a/x", "a/y/z", "ab/x", "b"):
            self.put_behind(store, key, b"")
        assert [one.key for one in store.list("a")] == ["a/x", "a/y/z"]
        assert [one.key for one in store.list("a/")] == ["a/x", "a/y/z"]
        assert [one.key for one in store.list("a/y")] == ["a/y/z"]

    def test_nothing_there_is_no_error(self, store: Store) -> None:
        assert store.list() == store.list("nope") == []
        assert store.list_folders() == store.list_folders("nope") == []

    def test_list_of_a_file_is_not_a_folder(self, store: Store) -> None:
        self.put_behind(store, "folder/key", b"")
        for listing in (store.list, store.list_folders):
            with pytest.raises(NotAFolderError, match="folder/key"):
                listing("folder/key")

    @pytest.mark.parametrize("prefix", ["..", "../x", "/x", "a//b", "a/../.."])
    def test_list_outside_the_root_is_refused(self, store: Store, prefix: str) -> None:
        for listing in (store.list, store.list_folders):
            with pytest.raises(StoreError, match="key"):
                listing(prefix)

    def test_list_folders_names_those_directly_inside(self, store: Store) -> None:
        for key in ("step-2/x", "step-10/a/b", "file", "step-2/a/b", "step-2/c/d"):
            self.put_behind(store, key, b"")
        assert store.list_folders() == ["step-10", "step-2"]
        assert store.list_folders("step-2") == ["a", "c"]
        assert store.list_folders("step-10/a") == []

    # delete

    def test_delete_removes_the_object_and_no_other(self, store: Store) -> None:
        for key in ("a/x", "a/y"):
            self.put_behind(store, key, b"")
        store.delete("a/x")
        assert self.get_behind(store, "a/x") is None
        assert [one.key for one in store.list()] == ["a/y"]

    def test_delete_of_what_is_not_there_is_no_error(self, store: Store) -> None:
        store.delete("nope")
        store.delete("no/folder/either")

    def test_an_object_may_come_back_after_the_last_delete(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.delete("a/b/c")
        assert store.list() == []
        store.put("a/b/c", b"2")
        with store.put_new("a/b/d") as writer:
            writer.write(b"3")
        assert [one.key for one in store.list()] == ["a/b/c", "a/b/d"]

    # all of it

    def test_a_pickled_store_is_the_same_store(self, store: Store) -> None:
        store.put("before", b"1")
        copy = pickle.loads(pickle.dumps(store))
        assert copy.url == store.url
        assert copy.get("before") == b"1"
        copy.put("after", b"2")
        assert self.get_behind(store, "after") == b"2"

    def test_threads_do_not_disturb_each_other(self, store: Store) -> None:
        content = bytes(range(256)) * 64
        store.put("shared", content)

        def work(number: int) -> None:
            with store.put_new(f"folder-{number % 3}/{number}") as writer:
                for start in range(0, len(content), 4096):
                    writer.write(content[start : start + 4096])
            for start in range(0, 256, 16):
                assert store.get("shared", start, 8) == content[start : start + 8]
                assert store.get(f"folder-{number % 3}/{number}", start, 8) == content[start : start + 8]
            store.put(f"put-{number}", content)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(16)))
        assert len(store.list()) == 33
        assert all(self.get_behind(store, f"put-{number}") == content for number in range(16))


class FolderStoreContract(StoreContract):
    """The contract of a store whose objects are the files of a local folder, its ``url``."""

    def put_behind(self, store: Store, key: str, content: bytes) -> None:
        path = Path(store.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def get_behind(self, store: Store, key: str) -> bytes | None:
        path = Path(store.url, key)
        return path.read_bytes() if path.is_file() else None
