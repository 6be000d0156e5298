"""``LoadReport``: what a load tells its caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray_dcp.errors import without_keys
from ray_dcp.wording import MAX_LISTED


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What a load did on this rank. Lists of names are sorted."""

    checkpoint_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Names of the template that the checkpoint lacks; they kept their values."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that no rank's template has."""
    nbytes_read: int
    """Bytes that this rank read from storage."""
    nbytes_loaded: int
    """Bytes that were loaded into this rank's template."""
    nbytes_by_place: Mapping[str, int] = field(default_factory=dict)
    """Bytes that this rank read, by where they came from: "storage", "memory" of the node's agent, "peer", another's.

    Empty where a reader of yours does not say.
    """

    def __repr__(self) -> str:
        """The report with the first names of each list and a count: a model has thousands."""
        named = ", ".join(f"{name}={_few(getattr(self, name))}" for name in ("loaded", "missing", "unexpected"))
        place = without_keys(self.checkpoint_id)
        by_place = f", nbytes_by_place={dict(self.nbytes_by_place)}" if len(self.nbytes_by_place) > 1 else ""
        return (
            f"LoadReport(checkpoint_id={place!r}, {named}, "
            f"nbytes_read={self.nbytes_read}, nbytes_loaded={self.nbytes_loaded}{by_place})"
        )


def _few(names: Sequence[str]) -> str:
    """``names`` as Python writes a tuple, the first ones only."""
    shown = ", ".join(map(repr, names[:MAX_LISTED]))
    rest = len(names) - MAX_LISTED
    return f"({shown}{f', ... {rest} more' if rest > 0 else ',' if len(names) == 1 else ''})"
