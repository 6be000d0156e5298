"""Where a run's experiment folder is, and which checkpoints lie inside: without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, S3FileSystem, SubTreeFileSystem
from ray.train import Checkpoint

from ray_dcp.cluster import ray_private, train_context
from ray_dcp.errors import ConfigError, CorruptCheckpointError
from ray_dcp.format.names import POINTER
from ray_dcp.train import checkpoint_id_of, reporting

BUCKET = "s3://bucket/runs?endpoint_override=127.0.0.1%3A9000&scheme=http"


@pytest.fixture
def inside_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process look like a worker of a run with this storage."""
    module = ray_private.TRAIN_CONTEXT_MODULE

    def become_worker(storage_path: str, filesystem: FileSystem | None = None) -> None:
        found, base = (filesystem, storage_path) if filesystem else FileSystem.from_uri(storage_path)
        storage = SimpleNamespace(
            storage_filesystem=found,
            custom_fs_provided=filesystem is not None,
            experiment_dir_name="exp",
            experiment_fs_path=f"{base}/exp",
        )
        run_config = SimpleNamespace(storage_path=storage_path)
        context = SimpleNamespace(get_storage=lambda: storage, train_run_context=SimpleNamespace(run_config=run_config))
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(_train_context=context))

    return become_worker


def test_outside_of_a_worker_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, SimpleNamespace(_train_context=None)):
        monkeypatch.setitem(sys.modules, ray_private.TRAIN_CONTEXT_MODULE, module)
        assert train_context.train_group_spec() is None
        assert train_context.experiment_root() is None
        assert train_context.ray_num_to_keep() is None
        with pytest.raises(ConfigError, match="inside a TorchTrainer worker"):
            reporting.report({}, checkpoint="/there")


def test_a_group_is_named_after_its_run_and_its_folder() -> None:
    names = [train_context.train_group_name("run", folder) for folder in ("/a/run", "/b/run", "/a/run")]
    assert names[0] == names[2] != names[1]
    assert names[0].startswith("train-run-")


@pytest.mark.parametrize(
    ("storage_path", "root"),
    [
        ("/mnt/runs", "/mnt/runs/exp"),
        ("file:///mnt/runs", "/mnt/runs/exp"),
        (BUCKET, "s3://bucket/runs/exp?endpoint_override=127.0.0.1%3A9000&scheme=http"),
        # Ray reads this as Arrow does, with escapes; the manager's root has none.
        (BUCKET.replace("/runs", "/r%20s"), "s3://bucket/r s/exp?endpoint_override=127.0.0.1%3A9000&scheme=http"),
    ],
)
def test_the_root_of_a_run_is_its_experiment_folder(inside_run: Any, storage_path: str, root: str) -> None:
    inside_run(storage_path)
    assert train_context.experiment_root() == root


def test_a_filesystem_without_a_url_needs_a_root(inside_run: Any) -> None:
    inside_run("base", SubTreeFileSystem("/mnt", LocalFileSystem()))
    with pytest.raises(ConfigError, match="root"):
        train_context.experiment_root()
    # What is reported there is a pointer.
    assert reporting._name_inside_run("/mnt/base/exp/step-00000001") is None


def test_what_lies_inside_a_local_run(inside_run: Any, tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "exp")
    inside_run(str(tmp_path))
    inside = {
        f"{tmp_path}/exp/step-00000001": "step-00000001",
        f"file://{tmp_path}/exp/a/b/": "a/b",
        f"{tmp_path}/exp/../exp/x": "x",
        f"{tmp_path}/link/x": "x",
        f"{tmp_path}/exp/..x": "..x",
        f"{tmp_path}/exp": None,
        f"{tmp_path}/exp-2/x": None,
        f"{tmp_path}/exp/../x": None,
        "s3://bucket/runs/exp/x": None,
        "memory://exp/x": None,
    }
    assert {given: reporting._name_inside_run(given) for given in inside} == inside


def test_what_lies_inside_a_run_in_a_bucket(inside_run: Any) -> None:
    inside_run(BUCKET)
    query = BUCKET.partition("?")[2]
    inside = {
        f"s3://bucket/runs/exp/step-00000001?{query}": "step-00000001",
        f"s3://bucket/runs/exp/a/b/?{query}": "a/b",
        f"s3://bucket/runs/exp?{query}": None,
        f"s3://bucket/runs/exp-2/x?{query}": None,
        # Another endpoint, so another bucket of this name.
        "s3://bucket/runs/exp/step-00000001": None,
        "/bucket/runs/exp/x": None,
        f"s3://bucket/runs/exp/a%20b c?{query}": "a%20b c",
    }
    assert {given: reporting._name_inside_run(given) for given in inside} == inside


def test_the_id_of_a_checkpoint_in_a_bucket_opens_the_same_bucket() -> None:
    filesystem = S3FileSystem(endpoint_override="127.0.0.1:9000", scheme="http", access_key="me", secret_key="hush")
    url = reporting._url(filesystem, "bucket/exp/step-00000001")
    assert "hush" not in url
    found, path = FileSystem.from_uri(url)
    assert path == "bucket/exp/step-00000001"
    assert found.__reduce__()[1][0]["endpoint_override"] == "127.0.0.1:9000"
    assert found.__reduce__()[1][0]["scheme"] == "http"
    assert reporting._url(S3FileSystem(region="eu-west-1"), "bucket/x") == "s3://bucket/x?region=eu-west-1"
    with pytest.raises(ConfigError, match="subtree"):
        reporting._url(SubTreeFileSystem("/mnt", LocalFileSystem()), "x")


@pytest.mark.parametrize("content", ["", "[]", "{}", "no json"])
def test_a_pointer_that_points_nowhere_is_corrupt(content: str, tmp_path: Path) -> None:
    (tmp_path / POINTER).write_text(content)
    with pytest.raises(CorruptCheckpointError, match=POINTER):
        checkpoint_id_of(Checkpoint(str(tmp_path)))
