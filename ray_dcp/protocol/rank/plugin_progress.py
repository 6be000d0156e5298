"""Progress of what is not ours: a user's writer or reader shows that it moves by what it asks of its planner."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ray_dcp.progress import Progress


class CountingPlanner:
    """Stands in for a planner, whichever it is; every use of it counts, in whatever thread."""

    def __init__(self, planner: Any, progress: Progress) -> None:
        self._planner = planner
        self._progress = progress

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # A user's writer may ask whether this is the user's planner: it is meant to find nothing new here.
        return type(self._planner)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._planner, name)
        if not inspect.ismethod(attribute):
            return attribute

        @functools.wraps(attribute)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._progress.advance()
            return attribute(*args, **kwargs)

        return counted

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._planner,)


def _itself(planner: Any) -> Any:
    return planner
