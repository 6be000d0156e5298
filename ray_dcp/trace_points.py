"""The numbered points of a save and a load: where tests make something go wrong, and what a trace can show.

A point is reached on the rank or at the coordinator that gets there. While nobody watches, that costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from ray_dcp.errors import ConfigError


class Point(Enum):
    """The points, in the order in which a save, then a load, gets there. The value of each is (number, title)."""

    BEFORE_PLAN = (1, "before plan")
    """Rank: the state is collected, nothing is sent."""
    GLOBAL_PLAN = (2, "global plan")
    """Coordinator: all local plans are there."""
    AFTER_PLAN = (3, "after plan")
    """Rank: the final plan is there, nothing is staged or written."""
    MID_WRITE = (4, "mid write")
    """Rank: the first item is written, the shard file is open."""
    BEFORE_RESULT = (5, "before result")
    """Rank: its shard file is durable, nobody knows."""
    BEFORE_MANIFEST = (6, "before manifest")
    """Coordinator: all results are there and counted."""
    BETWEEN_MANIFEST_AND_METADATA = (7, "between manifest and metadata")
    """Coordinator: the manifest is put, ``.metadata`` is not."""
    AFTER_METADATA = (8, "after metadata")
    """Coordinator: it is committed, nobody knows."""
    AFTER_OPEN = (9, "after open")
    """Rank of a load: the checkpoint is known."""
    LOAD_PLAN = (10, "load plan")
    """Coordinator of a load: all local plans and checks are there."""
    MID_READ = (11, "mid read")
    """Rank of a load: another tensor is read."""
    BEFORE_RESTORE = (12, "before restore")
    """Rank of a load: every rank has read all; nothing but tensors has changed."""
    AFTER_RESTORE = (13, "after restore")
    """Rank of a load: its part is done, the others' may not be."""

    @property
    def number(self) -> int:
        return self.value[0]

    @property
    def title(self) -> str:
        return self.value[1]

    @classmethod
    def titled(cls, title: str) -> Point:
        """The point of this title. Raises ``ConfigError`` where there is no such point."""
        for point in cls:
            if point.title == title:
                return point
        raise ConfigError("point", f"{title!r} is not a point; there are {', '.join(point.title for point in cls)}")


_observer: Callable[[Point], None] | None = None


def reached(point: Point) -> None:
    """Tell the observer, if there is one, that this process has come to ``point``. Raises what the observer raises."""
    if _observer is not None:
        _observer(point)


def observe(observer: Callable[[Point], None] | None) -> None:
    """Have ``observer`` called from now on at each point that this process reaches, in any thread; None ends it."""
    global _observer
    if observer is not None and not callable(observer):
        raise ConfigError("observer", f"{observer!r} cannot be called")
    _observer = observer


@contextmanager
def observed_by(observer: Callable[[Point], None]) -> Iterator[None]:
    """Have ``observer`` called at every point that this process reaches within the block, in whatever thread."""
    if observer is None:
        raise ConfigError("observer", "None cannot be called")
    before = _observer
    observe(observer)
    try:
        yield
    finally:
        observe(before)
