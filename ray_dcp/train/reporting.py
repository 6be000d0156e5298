"""Hand Ray Train a checkpoint that already lies in storage, and find it again from Ray's ``Checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import ray.train
from pyarrow.fs import FileSystem, FileType

from ray_dcp.cluster.train_context import experiment_root
from ray_dcp.errors import CheckpointNotFoundError, ConfigError
from ray_dcp.format.names import METADATA, POINTER, decode_pointer, encode_pointer
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import name_below, url_scheme
from ray_dcp.store.open import open_store

if TYPE_CHECKING:
    from ray_dcp.catalog.facts import CheckpointInfo


def report(metrics: Mapping[str, Any], checkpoint: CheckpointInfo | str | None = None) -> None:
    """Report metrics, and a committed checkpoint, to Ray Train; no shard is copied.

    Call it on every rank of a TorchTrainer run, equally often and with the same checkpoint, as
    ``ray.train.report``. A checkpoint inside the run's experiment folder becomes Ray's as it lies: ``num_to_keep``
    deletes it there. For one elsewhere Ray keeps a folder with a pointer to it, and deletes the pointer only.
    Afterwards ``Result.checkpoint`` and ``ray.train.get_checkpoint`` lead to it; see ``checkpoint_id_of``.

    Raises ``ConfigError`` for a checkpoint that is reported outside of a TorchTrainer worker, and on rank 0
    ``CheckpointNotFoundError`` for one in the experiment folder that was never committed.
    """
    if checkpoint is None:
        ray.train.report(dict(metrics))
        return
    checkpoint_id = checkpoint if isinstance(checkpoint, str) else checkpoint.checkpoint_id
    name = _name_inside_run(checkpoint_id)
    if name is None:
        _report_pointer(metrics, checkpoint_id)
    else:
        _report_as_it_lies(metrics, name, checkpoint_id)


def checkpoint_id_of(checkpoint: ray.train.Checkpoint) -> str:
    """Return the id, for ``ray_dcp.load``, of what Ray Train keeps as ``checkpoint``; a pointer is followed."""
    filesystem = checkpoint.filesystem
    pointer = f"{checkpoint.path}/{POINTER}"
    if filesystem.get_file_info(pointer).type == FileType.NotFound:
        return _url(filesystem, checkpoint.path)
    with filesystem.open_input_file(pointer) as opened:
        content = opened.read()
    return decode_pointer(content, file=pointer)


def _report_as_it_lies(metrics: Mapping[str, Any], name: str, checkpoint_id: str) -> None:
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(name)
    filesystem = storage.storage_filesystem
    known = ray.train.get_checkpoint()
    if known is not None and known.filesystem == filesystem and known.path == path:
        # A resumed run reports what it resumed from. Listed twice, the first of the two to be evicted would delete
        # the folder of the other, and Ray refuses to start a run whose listed folders are not all there.
        ray.train.report(dict(metrics))
        return
    if ray.train.get_context().get_world_rank() == 0:
        # Ahead of Ray's barrier, so a folder that is not there never gets into the list of the run.
        _require_committed(filesystem, path, checkpoint_id)
    ray.train.report(
        dict(metrics),
        checkpoint=ray.train.Checkpoint(path, filesystem=filesystem),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def _report_pointer(metrics: Mapping[str, Any], checkpoint_id: str) -> None:
    storage = ray.train.get_context().get_storage()
    content = encode_pointer(open_store(checkpoint_id).url)

    def write_pointer(_: ray.train.Checkpoint, folder_name: str) -> ray.train.Checkpoint:
        # Ray calls this on every rank, with one folder name for all; what they write is the same.
        folder = storage.build_checkpoint_path_from_name(folder_name)
        filesystem = storage.storage_filesystem
        filesystem.create_dir(folder, recursive=True)
        with filesystem.open_output_stream(f"{folder}/{POINTER}") as stream:
            stream.write(content)
        return ray.train.Checkpoint(folder, filesystem=filesystem)

    ray.train.report(
        dict(metrics),
        checkpoint=ray.train.Checkpoint(storage.experiment_fs_path, filesystem=storage.storage_filesystem),
        checkpoint_upload_fn=write_pointer,
    )


def _name_inside_run(checkpoint_id: str) -> str | None:
    """The checkpoint's path relative to the run's experiment folder; None when it lies elsewhere."""
    try:
        root = experiment_root()
    except ConfigError:
        # A filesystem without a URL: whether the two are one place cannot be told.
        return None
    if root is None:
        raise ConfigError("checkpoint", "ray_dcp.train.report works inside a TorchTrainer worker only")
    place = absolute(checkpoint_id, setting="checkpoint")
    if url_scheme(place) is None:
        if url_scheme(root) is not None:
            return None
        inside = os.path.relpath(os.path.realpath(place), os.path.realpath(root))
        return None if inside.split(os.sep)[0] in (os.pardir, os.curdir) else inside
    return name_below(absolute(root), place)


def _require_committed(filesystem: FileSystem, path: str, checkpoint_id: str) -> None:
    if filesystem.get_file_info(f"{path}/{METADATA}").type == FileType.NotFound:
        raise CheckpointNotFoundError(checkpoint_id, f"it has no {METADATA}, so it was never committed")


def _url(filesystem: FileSystem, path: str) -> str:
    if filesystem.type_name == "local":
        return path
    scheme = {"s3": "s3", "gcs": "gs"}.get(filesystem.type_name)
    if scheme is None:
        raise ConfigError("checkpoint", f"no URL describes a {filesystem.type_name!r} filesystem")
    # Arrow tells where a bucket is served only in the form it pickles itself to. The credentials there stay there.
    options = filesystem.__reduce__()[1][0]
    wanted = {name: options.get(name) for name in ("endpoint_override", "scheme", "region")}
    if not wanted["endpoint_override"]:
        wanted["scheme"] = None
    query = urlencode({name: value for name, value in wanted.items() if value})
    return f"{scheme}://{path}{'?' if query else ''}{query}"
