"""Small checkpoints that tests damage byte by byte, and what a load of them may say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ray_dcp as dcp
from ray_dcp import CheckpointException, LocalShards
from ray_dcp.errors import RayDcpError
from ray_dcp.format.manifest import Entry, decode_manifest
from tests.shardings import same_bits


def every(length: int, stride: int) -> range:
    """Places in a file: every one in `make nightly`, known ones a stride apart in `make test`."""
    return range(0, length, 1 if os.environ.get("RAY_DCP_MUTATIONS") else stride)


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(40, dtype=torch.bfloat16).reshape(8, 5),
        "parts": LocalShards((6,), {(0,): torch.arange(3.0), (3,): torch.arange(3.0, 6.0)}),
        "names": ["a", ("b", 1)],
        "step": torch.tensor(7),
    }


def template() -> dict[str, Any]:
    return {
        "w": torch.full((8, 5), float("nan"), dtype=torch.bfloat16),
        "parts": torch.full((6,), float("nan")),
        "names": "old",
        "step": torch.tensor(-1),
    }


def is_right(filled: dict[str, Any]) -> bool:
    expected = state() | {"parts": torch.arange(6.0)}
    return filled["names"] == expected["names"] and all(
        same_bits(filled[name], expected[name]) for name in ("w", "parts", "step")
    )


def load_failure(place: Any) -> CheckpointException | None:
    """How a load fails; where it does not, every value is right."""
    filled = template()
    try:
        dcp.load(filled, checkpoint_id=place, no_dist=True)
    except CheckpointException as error:
        return error
    assert is_right(filled)
    return None


def names_file(error: CheckpointException, name: str) -> bool:
    return isinstance(error.__cause__, RayDcpError) and name in str(error)


class Checkpoint:
    """One on disk whose bytes can be changed and changed back."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.files = {path.name: path.read_bytes() for path in place.iterdir()}
        self.shard = next((name for name in sorted(self.files) if name.endswith(".distcp")), "")

    def entries(self) -> list[Entry]:
        """What the manifest says, in file order."""
        entries = decode_manifest(self.files["manifest.parquet"], file="m").entries
        return sorted(entries, key=lambda entry: (entry.file, entry.record_offset))

    @contextmanager
    def holding(self, name: str, content: bytes) -> Iterator[None]:
        """Within it the file has this content."""
        (self.place / name).write_bytes(content)
        try:
            yield
        finally:
            (self.place / name).write_bytes(self.files[name])

    @contextmanager
    def flipped(self, name: str, at: int, flip: int) -> Iterator[None]:
        content = bytearray(self.files[name])
        content[at] ^= flip
        with self.holding(name, bytes(content)):
            yield

    def failure_with(self, name: str, at: int, flip: int) -> CheckpointException | None:
        with self.flipped(name, at, flip):
            return load_failure(self.place)
