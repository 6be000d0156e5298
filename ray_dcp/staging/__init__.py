"""Copies in host memory; and, for ``dcp.staging`` in ported code, the names of torch's module."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.distributed.checkpoint.staging"), name)
