"""A store that fails now and then is asked again, for as long as the policy says."""

import errno
import logging
import pickle
import threading
import time
import uuid
from contextlib import contextmanager

import pytest

from ray_dcp.errors import (
    ConfigError,
    ObjectNotFoundError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
    SupersededError,
)
from ray_dcp.progress import Progress, working
from ray_dcp.settings import RetryPolicy
from ray_dcp.store.local import LocalStore
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.parallel import ParallelStore
from ray_dcp.store.retry import RetryStore
from ray_dcp.store.translate import is_transient, store_errors
from ray_dcp.testing.store_contract import StoreContract
from tests.slack import within

QUICK = RetryPolicy(max_attempts=4, max_elapsed_s=5, initial_backoff_s=0.001, max_backoff_s=0.002)
SLOW_DOWN = OSError(
    "When uploading object with key 'k' in bucket 'b': AWS Error SLOW_DOWN during PutObject operation: x"
)


class Flaky:
    """``inner``, whose next operations fail with what is in ``failures``; ``asked`` has all that were asked for."""

    def __init__(self, inner, failures=(), *, when="before"):
        self.inner, self.failures, self.when, self.asked = inner, list(failures), when, []
        self.url = inner.url

    def _call(self, name, key, operation):
        self.asked.append(f"{name} {key}")
        failure = self.failures.pop(0) if self.failures else None
        with store_errors(name, url=self.url, key=key):
            if failure is not None and self.when == "before":
                raise failure
            answer = operation()
            if failure is not None:
                raise failure
            return answer

    def put(self, key, content, *, last_look=None):
        self._call("put", key, lambda: self.inner.put(key, content, last_look=last_look))

    @contextmanager
    def put_new(self, key):
        opened = self.inner.put_new(key)
        self._call("open", key, lambda: None)
        with opened as writer:
            yield _FlakyWriter(self, key, writer)
            self._call("close", key, lambda: None)

    def get(self, key, offset=0, nbytes=None):
        return self._call("get", key, lambda: self.inner.get(key, offset, nbytes))

    def list(self, prefix=""):
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def list_folders(self, prefix=""):
        return self._call("list_folders", prefix, lambda: self.inner.list_folders(prefix))

    def delete(self, key):
        self._call("delete", key, lambda: self.inner.delete(key))


class _FlakyWriter:
    def __init__(self, store, key, writer):
        self.store, self.key, self.writer = store, key, writer

    def write(self, chunk):
        return self.store._call("write", self.key, lambda: self.writer.write(chunk))

    def tell(self):
        return self.writer.tell()


@pytest.fixture
def memory():
    return MemoryStore(f"memory://{uuid.uuid4().hex}/root")


def passing(count):
    return [ConnectionResetError(errno.ECONNRESET, "Connection reset by peer") for _ in range(count)]


class TestRetryStoreKeepsTheContract(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return RetryStore(LocalStore(tmp_path / "root"), QUICK)

    def put_behind(self, store, key, content):
        store.inner.put(key, content)

    def get_behind(self, store, key):
        try:
            return store.inner.get(key)
        except ObjectNotFoundError:
            return None


class TestStreamingRetryStoreKeepsTheContract(TestRetryStoreKeepsTheContract):
    @pytest.fixture
    def store(self, tmp_path):
        return RetryStore(LocalStore(tmp_path / "root"), QUICK, spool_nbytes=5)


class TestParallelStoreKeepsTheContract(TestRetryStoreKeepsTheContract):
    @pytest.fixture
    def store(self, tmp_path):
        return ParallelStore(LocalStore(tmp_path / "root"), part_nbytes=3, max_parallel=3)

    # Three bytes at a time it would take minutes, and test_s3.py does it in parts as they are used.
    test_get_of_a_large_range_is_the_same_bytes = None
    test_get_into_fills_large_buffers_and_nothing_beside_them = None
    test_many_threads_read_ranges_of_one_object = None


OPERATIONS = {
    "put": lambda store: store.put("new", b"content"),
    "put_new": lambda store: _put_new(store, [b"content"]),
    "get": lambda store: store.get("old"),
    "get_into": lambda store: store.get_into("old", 0, [memoryview(bytearray(3))]),
    "list": lambda store: store.list(),
    "list_folders": lambda store: store.list_folders(),
    "delete": lambda store: store.delete("old"),
}


def _put_new(store, chunks):
    with store.put_new("new") as writer:
        for chunk in chunks:
            writer.write(chunk)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failure_that_passes_is_not_seen(memory, name, when):
    memory.put("old", b"abc")
    store = RetryStore(Flaky(memory, passing(3), when=when), QUICK)
    OPERATIONS[name](store)
    assert store.num_retries == (2 if (name, when) == ("put_new", "after") else 3)  # it first looks, and finds nothing
    if name.startswith("put"):
        assert memory.get("new") == b"content"


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_that_does_not_pass_says_how_often_and_how_long_it_was_tried(memory, name):
    memory.put("old", b"abc")
    store = RetryStore(Flaky(memory, passing(9)), QUICK)
    with pytest.raises(StoreUnavailableError, match=r"after 4 attempts in \d+\.\d s: cannot .*reset by peer") as caught:
        OPERATIONS[name](store)
    assert caught.value.num_attempts == 4
    assert 0 < caught.value.elapsed_s < within(5)
    assert caught.value.url == memory.url
    assert str(caught.value).count(memory.url) == 1
    assert isinstance(caught.value.__cause__.__cause__, ConnectionResetError)
    assert pickle.loads(pickle.dumps(caught.value)).num_attempts == 4


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), StorePermissionError),
        (FileNotFoundError(errno.ENOENT, "No such file"), ObjectNotFoundError),
        (OSError(errno.ENOSPC, "No space left on device"), StoreError),
        (OSError("AWS Error NO_SUCH_BUCKET during PutObject operation: no bucket"), StoreError),
        (OSError("AWS Error ACCESS_DENIED during PutObject operation: no"), StorePermissionError),
        (OSError("AWS Error SIGNATURE_DOES_NOT_MATCH during PutObject operation: no"), StorePermissionError),
        (OSError("AWS Error NO_SUCH_KEY during GetObject operation: no"), ObjectNotFoundError),
        (OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation: No response body."), StoreError),
        (
            OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 60, Peer"),
            StoreError,
        ),
        (OSError("When reading key 'AWS Error SLOW_DOWN': AWS Error NO_SUCH_BUCKET during X: SLOW_DOWN"), StoreError),
    ],
)
def test_what_does_not_pass_by_itself_is_raised_at_once(memory, failure, expected):
    store = RetryStore(Flaky(memory, [failure] * 2), QUICK)
    with pytest.raises(expected) as caught:
        store.put("new", b"x")
    assert not isinstance(caught.value, StoreUnavailableError)
    assert store.inner.asked == ["put new"]


@pytest.mark.parametrize(
    "failure",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        TimeoutError("timed out"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        SLOW_DOWN,
        OSError("AWS Error INTERNAL_FAILURE during GetObject operation: x"),
        OSError("AWS Error UNKNOWN (HTTP status 502) during HeadObject operation: No response body."),
        OSError("AWS Error UNKNOWN (HTTP status 429) during HeadObject operation: No response body."),
        OSError("AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 7, Could not connect to server"),
        OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28, Timeout was reached"),
        OSError("google::cloud::Status(UNAVAILABLE: Retry policy exhausted)"),
    ],
)
def test_what_may_pass_is_known_by_what_the_system_or_the_service_says(failure):
    with pytest.raises(StoreError) as caught, store_errors("put", url="s3://b", key="k"):
        raise failure
    assert is_transient(caught.value)
    assert not is_transient(failure)


def test_last_look_is_asked_before_every_attempt_and_ends_them(memory):
    looks = []

    def look():
        looks.append(len(looks))
        if len(looks) == 3:
            raise SupersededError(checkpoint_id="id", attempt="a", newer="b")

    store = RetryStore(Flaky(memory, passing(9), when="after"), QUICK)
    with pytest.raises(SupersededError):
        store.put("key", b"x", last_look=look)
    assert looks == [0, 1, 2]


def test_a_last_look_whose_own_store_was_given_up_is_not_asked_again(memory):
    down = RetryStore(Flaky(memory, passing(99)), QUICK)
    store = RetryStore(Flaky(memory), QUICK)
    with pytest.raises(StoreUnavailableError):
        store.put("key", b"x", last_look=lambda: down.list() and None)
    assert store.inner.asked == ["put key"]
    assert memory.list() == []


@pytest.mark.parametrize("chunks", [[b"12345", b"6"], [b"123456"], [b"12", b"34", b"5678", b"9" * 100]])
def test_what_does_not_fit_the_spool_is_streamed(memory, chunks):
    store = RetryStore(Flaky(memory), QUICK, spool_nbytes=5)
    _put_new(store, chunks)
    assert "open new" in store.inner.asked
    assert "put new" not in store.inner.asked
    assert memory.get("new") == b"".join(chunks)


def test_what_fits_is_put_whole_and_so_can_be_tried_again(memory):
    store = RetryStore(Flaky(memory), QUICK, spool_nbytes=5)
    _put_new(store, [b"123", b"45"])
    assert store.inner.asked == ["get new", "put new"]


@pytest.mark.parametrize("chunks", [[b"12", b"3"], [b"123456", b"7"]])
def test_a_body_that_fails_leaves_no_object(memory, chunks):
    store = RetryStore(memory, QUICK, spool_nbytes=5)
    with pytest.raises(TypeError):
        _put_new(store, [*chunks, None])
    assert memory.list() == []


def test_a_stream_is_opened_again_but_not_begun_again_in_the_middle(memory):
    flaky = Flaky(memory)
    flaky.part_attempts = 7
    store = RetryStore(flaky, QUICK, spool_nbytes=5)

    def chunks():
        flaky.failures = passing(2)
        yield b"123456"
        assert store.num_retries == 2
        flaky.failures = passing(1)
        yield b"7"

    with pytest.raises(StoreUnavailableError, match="7 attempts") as caught:
        _put_new(store, chunks())
    assert caught.value.num_attempts == 7
    assert memory.list() == []


def test_no_attempt_begins_after_the_time_is_up(memory):
    policy = RetryPolicy(max_attempts=1000, max_elapsed_s=0.3, initial_backoff_s=0.05, max_backoff_s=0.1)
    store = RetryStore(Flaky(memory, passing(1000)), policy)
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError) as caught:
        store.list()
    assert time.monotonic() - began < within(2)
    assert 1 < caught.value.num_attempts < 100


def test_a_wait_counts_as_progress_and_ends_when_the_call_is_interrupted(memory):
    policy = RetryPolicy(max_attempts=1000, max_elapsed_s=60, initial_backoff_s=30, max_backoff_s=30)
    store = RetryStore(Flaky(memory, passing(1000)), policy)
    progress = Progress()
    outcome = []

    def work():
        with working(progress, "write"):
            try:
                store.put("key", b"x")
            except LookupError as error:
                outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + within(20)
    while progress.mark < 4 and time.monotonic() < deadline:
        thread.join(0.01)
    assert progress.mark >= 4
    progress.interrupt(LookupError("the save has failed elsewhere"))
    thread.join(within(20))
    assert not thread.is_alive()
    assert [str(error) for error in outcome] == ["the save has failed elsewhere"]


def test_each_wait_is_one_line_in_the_log(memory, caplog):
    store = RetryStore(Flaky(memory, passing(2)), QUICK)
    with caplog.at_level(logging.WARNING, "ray_dcp.storage"):
        store.put("the/key", b"x")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(part in lines[0] for part in ("put", f"{memory.url}/the/key", "attempt 1 of 4", "reset by peer"))
    assert "attempt 2 of 4" in lines[1]


def test_a_pickled_store_retries_as_before(memory):
    store = pickle.loads(pickle.dumps(RetryStore(memory, QUICK, spool_nbytes=3)))
    assert (store._policy, store._spool_nbytes, store.url) == (QUICK, 3, memory.url)


def test_a_policy_comes_from_variables():
    variables = {"RAY_DCP_RETRY_MAX_ATTEMPTS": "3", "RAY_DCP_RETRY_MAX_ELAPSED_S": "1.5", "X": "1"}
    assert RetryPolicy.from_texts({}, variables) == RetryPolicy(max_attempts=3, max_elapsed_s=1.5)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", 1.5),
        ("max_attempts", True),
        ("max_elapsed_s", 0),
        ("max_elapsed_s", float("inf")),
        ("initial_backoff_s", "1"),
        ("max_backoff_s", -1),
    ],
)
def test_a_policy_is_checked_when_it_is_made(setting, value):
    with pytest.raises(ConfigError, match=setting):
        RetryPolicy(**{setting: value})
    with pytest.raises(ConfigError, match=f"retry_{setting}"):
        RetryPolicy.from_texts({f"retry_{setting}": "never"}, {})
    with pytest.raises(ConfigError, match=f"RAY_DCP_RETRY_{setting.upper()}"):
        RetryPolicy.from_texts({}, {f"RAY_DCP_RETRY_{setting.upper()}": "0"})


# what is read in parallel


def test_large_reads_are_retried_by_part(memory):
    content = bytes(range(256)) * 4
    memory.put("key", content)
    flaky = Flaky(memory)
    store = ParallelStore(RetryStore(flaky, QUICK), part_nbytes=100, max_parallel=4)
    assert store.get("key", 0, 1) == content[:1]
    flaky.asked.clear()
    flaky.failures = [None, None, *passing(3)]
    assert store.get("key", 5, 1000) == content[5:1005]
    assert store.num_retries == 3
    assert len(flaky.asked) == 1 + 10 + 3


def test_the_calling_thread_counts_what_its_parts_read(memory):
    memory.put("key", bytes(1000))
    progress = Progress()
    with working(progress, "read"):
        ParallelStore(memory, part_nbytes=100, max_parallel=4).get_into("key", 0, [memoryview(bytearray(1000))])
    # MemoryStore counts all that it holds, for each of ten parts and the look whether they are there.
    assert progress.nbytes == 11 * 1000


def test_an_interrupted_read_ends_its_parts_before_it_returns(memory):
    memory.put("key", bytes(1000))
    # Waits are drawn from nought upwards: from so long a range that none ends before the interruption.
    policy = RetryPolicy(max_attempts=1000, max_elapsed_s=1e7, initial_backoff_s=1e6, max_backoff_s=1e6)
    flaky = Flaky(memory, [None, *passing(1000)])
    store = ParallelStore(RetryStore(flaky, policy), part_nbytes=100, max_parallel=3)
    progress = Progress()
    threading.Timer(0.3, lambda: progress.interrupt(LookupError("elsewhere"))).start()
    began = time.monotonic()
    with pytest.raises(LookupError, match="elsewhere"), working(progress, "read"):
        store.get_into("key", 0, [memoryview(bytearray(1000))])
    assert time.monotonic() - began < within(10)
    asked = len(flaky.asked)
    assert asked == 4
