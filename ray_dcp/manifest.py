"""``manifest.parquet``: one row a stored item, and facts about the whole checkpoint.

Torch does not know it; DuckDB and pandas can read it. It is written before ``.metadata`` and carries that
file's digest: a manifest whose digest differs belongs to a save that never committed (or that has replaced
it but not yet committed), and readers then go by ``.metadata`` alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored item: a chunk of a tensor, or one Python object (``dtype`` None)."""

    fqn: str
    offsets: tuple[int, ...] | None
    """Of the chunk in the whole tensor; None for a Python object."""
    sizes: tuple[int, ...] | None
    dtype: str | None
    """As torch prints it without the prefix: ``float32``, ``bfloat16``, ``float8_e4m3fn``."""
    file: str
    """Key relative to the checkpoint's folder."""
    record_offset: int
    record_nbytes: int
    payload_offset: int
    """Of the tensor's bytes in the file. A Python object's payload is its whole record."""
    payload_nbytes: int
    block_crcs: tuple[int, ...]
    """CRC-32 of each ``layout.BLOCK_NBYTES`` of the payload; none for an empty payload."""
    rank: int
    """The rank that wrote it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a save promises about its bytes."""

    entries: Sequence[Entry]
    world_size: int
    attempt: str
    metadata_digest: str
    """SHA-256 of the ``.metadata`` it belongs to, hex."""
    created: float
    """Seconds since the epoch, the coordinator's clock."""
    step: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """User metrics, JSON values."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """``torch`` and ``ray_dcp``."""
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(entry.record_nbytes for entry in self.entries)


def metadata_digest(metadata: bytes) -> str:
    """The digest by which a manifest names its ``.metadata``."""
    return hashlib.sha256(metadata).hexdigest()
