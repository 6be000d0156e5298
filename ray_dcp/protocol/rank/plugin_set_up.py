"""How planners, writers and readers are set up: torch's interfaces have grown over time, users' classes have not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def accepted(method: Callable[..., Any], rank: int) -> dict[str, Any]:
    """The keyword arguments for a set-up method: torch passes them only to those that declare ``**kwargs``."""
    declared = "kwargs" in inspect.signature(method).parameters
    return {"rank": rank, "use_collectives": True} if declared else {}
