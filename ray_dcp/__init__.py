"""ray_dcp: a distributed checkpoint service for PyTorch on Ray.

``import ray_dcp as dcp`` takes the place of ``import torch.distributed.checkpoint as dcp``: every name of
torch's package that is not defined here (planners, readers, writers, metadata, ``state_dict``, ...) is torch's own.
Names are looked up when first used, so that the command line starts without torch and without Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ray_dcp.torch_modules import find_torch_modules
from ray_dcp.version import __version__

if TYPE_CHECKING:
    # Each is imported `as` its own name: that makes a name public to type checkers.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader as FileSystemReader
    from torch.distributed.checkpoint.filesystem import FileSystemWriter as FileSystemWriter
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as HuggingFaceStorageReader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as HuggingFaceStorageWriter
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata as BytesStorageMetadata
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as ChunkStorageMetadata
    from torch.distributed.checkpoint.metadata import Metadata as Metadata
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorStorageMetadata
    from torch.distributed.checkpoint.optimizer import (
        load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.planner import LoadPlan as LoadPlan
    from torch.distributed.checkpoint.planner import LoadPlanner as LoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem as ReadItem
    from torch.distributed.checkpoint.planner import SavePlan as SavePlan
    from torch.distributed.checkpoint.planner import SavePlanner as SavePlanner
    from torch.distributed.checkpoint.planner import WriteItem as WriteItem
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader,
    )
    from torch.distributed.checkpoint.storage import StorageReader as StorageReader
    from torch.distributed.checkpoint.storage import StorageWriter as StorageWriter

    from ray_dcp import default_planner as default_planner
    from ray_dcp import errors as errors
    from ray_dcp import filesystem as filesystem
    from ray_dcp import format_utils as format_utils
    from ray_dcp import hf_storage as hf_storage
    from ray_dcp import metadata as metadata
    from ray_dcp import optimizer as optimizer
    from ray_dcp import planner as planner
    from ray_dcp import planner_helpers as planner_helpers
    from ray_dcp import quantized_hf_storage as quantized_hf_storage
    from ray_dcp import staging as staging
    from ray_dcp import state_dict as state_dict
    from ray_dcp import state_dict_loader as state_dict_loader
    from ray_dcp import state_dict_saver as state_dict_saver
    from ray_dcp import stateful as stateful
    from ray_dcp import storage as storage
    from ray_dcp import train as train
    from ray_dcp.api import AsyncSaveResponse, LoadReport, async_save, load, save, warm_up
    from ray_dcp.catalog.facts import CheckpointInfo
    from ray_dcp.cluster.current import current_group
    from ray_dcp.cluster.group import RankGroup
    from ray_dcp.data_position import DataPosition, LoaderPosition
    from ray_dcp.manager import CheckpointManager
    from ray_dcp.planning.local_shards import LocalShards
    from ray_dcp.planning.per_rank import PerRank
    from ray_dcp.pool import RankPool
    from ray_dcp.protocol.exception import CheckpointException, RankFailure
    from ray_dcp.protocol.rank.overlap import staged
    from ray_dcp.reads.reader import StoreReader
    from ray_dcp.settings import Limits
    from ray_dcp.state.rng_state import RNGState
    from ray_dcp.state.train_state import TrainState
    from ray_dcp.state_dict_loader import load_state_dict as load_state_dict
    from ray_dcp.state_dict_saver import save_state_dict as save_state_dict
    from ray_dcp.store.bucket.s3_options import S3Options
    from ray_dcp.write.writer import StoreWriter

_HOME = {
    "save": "ray_dcp.api",
    "async_save": "ray_dcp.api",
    "load": "ray_dcp.api",
    "warm_up": "ray_dcp.api",
    "staged": "ray_dcp.protocol.rank.overlap",
    "save_state_dict": "ray_dcp.state_dict_saver",
    "load_state_dict": "ray_dcp.state_dict_loader",
    "AsyncSaveResponse": "ray_dcp.api",
    "LoadReport": "ray_dcp.api",
    "LocalShards": "ray_dcp.planning.local_shards",
    "PerRank": "ray_dcp.planning.per_rank",
    "RankGroup": "ray_dcp.cluster.group",
    "current_group": "ray_dcp.cluster.current",
    "RankPool": "ray_dcp.pool",
    "Limits": "ray_dcp.settings",
    "CheckpointManager": "ray_dcp.manager",
    "CheckpointInfo": "ray_dcp.catalog.facts",
    "CheckpointException": "ray_dcp.protocol.exception",
    "RankFailure": "ray_dcp.protocol.exception",
    "TrainState": "ray_dcp.state.train_state",
    "RNGState": "ray_dcp.state.rng_state",
    "DataPosition": "ray_dcp.data_position",
    "LoaderPosition": "ray_dcp.data_position",
    "S3Options": "ray_dcp.store.bucket.s3_options",
    "StoreReader": "ray_dcp.reads.reader",
    "StoreWriter": "ray_dcp.write.writer",
}

__all__ = [
    "save",
    "async_save",
    "load",
    "warm_up",
    "staged",
    "AsyncSaveResponse",
    "LoadReport",
    "LocalShards",
    "PerRank",
    "RankGroup",
    "current_group",
    "RankPool",
    "Limits",
    "CheckpointManager",
    "CheckpointInfo",
    "CheckpointException",
    "RankFailure",
    "TrainState",
    "RNGState",
    "DataPosition",
    "LoaderPosition",
    "S3Options",
    "StoreReader",
    "StoreWriter",
    "__version__",
]


find_torch_modules()

if not TYPE_CHECKING:  # a module that gives any name hides misspelt ones from type checkers

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            found = getattr(importlib.import_module(_HOME[name]), name)
        elif name.startswith("__"):
            raise AttributeError(f"module 'ray_dcp' has no attribute {name!r}")
        else:
            found = _module_or_torchs(name)
        globals()[name] = found
        return found


def _module_or_torchs(name: str) -> Any:
    """The submodule ``name``, or what ``torch.distributed.checkpoint`` has under that name."""
    try:
        return importlib.import_module(f"ray_dcp.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ray_dcp.{name}":
            raise
    try:
        return getattr(importlib.import_module("torch.distributed.checkpoint"), name)
    except AttributeError as error:
        message = f"neither ray_dcp nor torch.distributed.checkpoint has {name!r}"
        raise AttributeError(message) from error


def __dir__() -> list[str]:
    return sorted(__all__)
