"""Stores: bytes by key; and, for ``dcp.storage`` in ported code, the names of torch's module."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.distributed.checkpoint.storage"), name)
