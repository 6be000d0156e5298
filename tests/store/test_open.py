"""A path or URL opens the store it names, or none."""

from pathlib import Path

import pytest

from ray_dcp.errors import ConfigError, UnknownSchemeError
from ray_dcp.store.local import LocalStore
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.memory import MemoryStore
from ray_dcp.store.open import open_store, register_scheme


@pytest.mark.parametrize("form", [str, Path, lambda path: f"file://{path}", lambda path: f"file://localhost{path}"])
def test_a_local_folder_in_every_spelling(tmp_path, form):
    store = open_store(form(tmp_path / "new"))
    assert isinstance(store, LocalStore)
    store.put("key", b"x")
    assert (tmp_path / "new/key").read_bytes() == b"x"


def test_a_relative_path_is_below_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("runs/1").put("key", b"x")
    assert (tmp_path / "runs/1/key").read_bytes() == b"x"


def test_a_file_url_is_unquoted_and_a_path_is_not(tmp_path):
    open_store(f"file://{tmp_path}/a%20b%23c").put("key", b"url")
    open_store(f"{tmp_path}/a%20b").put("key", b"path")
    assert (tmp_path / "a b#c/key").read_bytes() == b"url"
    assert (tmp_path / "a%20b/key").read_bytes() == b"path"


def test_memory():
    assert isinstance(open_store("memory://x/y"), MemoryStore)


@pytest.mark.parametrize(
    "url",
    ["hdfsx://a/b", "s3n://b/x", "C://x", "C:/x", "http://host/x", "s3s3://b", "gcs://b/x", "S3N://b", "my-x+y.z://b"],
)
def test_an_unknown_scheme_is_named_with_those_that_are_known(url):
    with pytest.raises(UnknownSchemeError) as caught:
        open_store(url)
    assert f"unknown scheme {url.partition(':')[0]}:" in str(caught.value)
    assert all(f"{scheme}://" in str(caught.value) for scheme in ("file", "gs", "memory", "s3"))


def test_a_url_that_pathlib_collapsed_is_no_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownSchemeError, match=r"not as a pathlib\.Path"):
        open_store(Path("s3://bucket/x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["", "s3://", "s3:///x", "gs://", "file://host/x", "file://", "s3://b/x?no_such_parameter=1"]
)
def test_a_url_that_names_nothing_is_refused(url):
    with pytest.raises(ConfigError, match="url"):
        open_store(url)


def test_a_folder_with_a_colon_in_its_name_can_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("12:30/run").put("key", b"x")
    with pytest.raises(ConfigError, match="make it first"):
        open_store("./s3:/b")
    (tmp_path / "s3:").mkdir()  # as an earlier program may have left it
    open_store("./s3:/b").put("key", b"y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12:30", "s3:"]


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a/prefix?endpoint_override=localhost:9000&region=here&scheme=http",
        "gs://anonymous@bucket/a/prefix?endpoint_override=localhost:9000",
    ],
)
def test_buckets_open_without_a_network(url):
    store = open_store(url)
    assert store.url == url
    assert store.inner.url == url
    assert store.inner.inner._base == "bucket/a/prefix"


def test_secrets_in_a_url_are_not_shown():
    store = open_store("s3://name:s3cr3t@bucket/x?endpoint_override=localhost:1&region=here&scheme=http")
    with pytest.raises(Exception, match="key") as caught:
        store.put("../key", b"")
    assert "s3cr3t" not in str(caught.value) + repr(store)
    with pytest.raises(ConfigError) as refused:
        open_store("s3://name:s3cr3t@bucket/with/../dots")
    assert "s3cr3t" not in str(refused.value)


def test_join_url_keeps_the_query_at_the_end():
    assert join_url("s3://b/p/?region=x", "step-1", ".metadata") == "s3://b/p/step-1/.metadata?region=x"
    assert join_url("gs://b", "step-1") == "gs://b/step-1"
    assert join_url("/odd?name", "step-1") == "/odd?name/step-1"
    assert join_url("/", "step-1") == "/step-1"
    assert join_url("memory://", "step-1") == "memory://step-1"
    assert join_url(Path("runs"), "step-1", "key") == "runs/step-1/key"


def test_a_scheme_of_ones_own_opens_with_ones_own_store(tmp_path, monkeypatch):
    monkeypatch.setattr("ray_dcp.store.location.urls._added", set())
    monkeypatch.setattr("ray_dcp.store.open._openers", {})
    opened = []
    register_scheme("own+1", lambda url: opened.append(url) or LocalStore(tmp_path / url.rpartition("/")[2]))
    open_store("own+1://host/a").put("key", b"x")
    assert (tmp_path / "a/key").read_bytes() == b"x"
    assert opened == ["own+1://host/a"]
    with pytest.raises(UnknownSchemeError, match=r"known are .*s3://, own\+1://"):
        open_store("other://a")


@pytest.mark.parametrize("scheme", ["s3", "file", "memory", "", "Own", "a b", "own://"])
def test_a_built_in_scheme_and_what_is_none_are_refused(scheme):
    with pytest.raises(ConfigError, match="scheme"):
        register_scheme(scheme, LocalStore)
