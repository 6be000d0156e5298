"""ray_dcp: a distributed checkpoint service for PyTorch on Ray.

``import ray_dcp as dcp`` takes the place of ``import torch.distributed.checkpoint as dcp``: every name of
torch's package that is not defined here (planners, readers, writers, metadata, ``state_dict``, ...) is torch's own.
Names are looked up when first used, so that the command line starts without torch and without Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ray_dcp.version import __version__

if TYPE_CHECKING:
    from ray_dcp.api import AsyncSaveResponse, LoadReport, async_save, load, save
    from ray_dcp.catalog import CheckpointInfo
    from ray_dcp.cluster.current import current_group
    from ray_dcp.cluster.group import RankGroup
    from ray_dcp.config import Limits
    from ray_dcp.dcp_io.store_reader import StoreReader
    from ray_dcp.dcp_io.store_writer import StoreWriter
    from ray_dcp.manager import CheckpointManager
    from ray_dcp.planning.local_shards import LocalShards
    from ray_dcp.planning.per_rank import PerRank
    from ray_dcp.pool import RankPool
    from ray_dcp.protocol.failures import CheckpointException, RankFailure
    from ray_dcp.storage.s3_options import S3Options

_HOME = {
    "save": "ray_dcp.api",
    "async_save": "ray_dcp.api",
    "load": "ray_dcp.api",
    "AsyncSaveResponse": "ray_dcp.api",
    "LoadReport": "ray_dcp.api",
    "LocalShards": "ray_dcp.planning.local_shards",
    "PerRank": "ray_dcp.planning.per_rank",
    "RankGroup": "ray_dcp.cluster.group",
    "current_group": "ray_dcp.cluster.current",
    "RankPool": "ray_dcp.pool",
    "Limits": "ray_dcp.config",
    "CheckpointManager": "ray_dcp.manager",
    "CheckpointInfo": "ray_dcp.catalog",
    "CheckpointException": "ray_dcp.protocol.failures",
    "RankFailure": "ray_dcp.protocol.failures",
    "S3Options": "ray_dcp.storage.s3_options",
    "StoreReader": "ray_dcp.dcp_io.store_reader",
    "StoreWriter": "ray_dcp.dcp_io.store_writer",
}

__all__ = [
    "save",
    "async_save",
    "load",
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
    "S3Options",
    "StoreReader",
    "StoreWriter",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(importlib.import_module(_HOME[name]), name)
    elif name in ("errors", "train", "staging", "storage"):
        found = importlib.import_module(f"ray_dcp.{name}")
    elif name.startswith("__"):
        raise AttributeError(f"module 'ray_dcp' has no attribute {name!r}")
    else:
        found = _from_torch(name)
    globals()[name] = found
    return found


def _from_torch(name: str) -> Any:
    """The attribute or submodule ``name`` of ``torch.distributed.checkpoint``."""
    torch_dcp = "torch.distributed.checkpoint"
    try:
        return getattr(importlib.import_module(torch_dcp), name)
    except AttributeError:
        pass
    try:
        return importlib.import_module(f"{torch_dcp}.{name}")
    except ModuleNotFoundError as error:
        message = f"neither ray_dcp nor torch.distributed.checkpoint has {name!r}"
        raise AttributeError(message) from error


def __dir__() -> list[str]:
    return sorted(__all__)
