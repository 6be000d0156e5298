"""What one Python saves and another loads; each half runs as a program: ``python -m tests.interop.between_pythons``."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import hashlib
import pathlib
import sys
import uuid
import warnings
import zoneinfo
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import ray_dcp as dcp
from ray_dcp.format.metadata_file import encode_metadata
from ray_dcp.planning.values.python_record import python_record


class Color(enum.Enum):
    RED = "r"
    BLUE = 2


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "h": torch.arange(5, dtype=torch.bfloat16),
    "channels": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
}
VALUES: dict[str, Any] = {
    "path": (pathlib.Path("/a/b c"), pathlib.PurePosixPath("x")),
    "color": (Color.RED, [Color.BLUE]),
    "rights": (Rights.READ | Rights.WRITE, Rights.READ),
    "deque": (collections.deque([1, 2], 5),),
    "date": (datetime.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")), datetime.timedelta(1)),
    "numbers": (decimal.Decimal("1.5"), Fraction(1, 3), 1 << 3000, uuid.UUID(int=7, is_safe=uuid.SafeUUID.safe)),
    "numpy": (np.arange(3), np.array(["a", None], dtype=object), np.float32(1)),
    "frozen": (frozenset(["a"]), b"", range(3)),
}


def metadata() -> Metadata:
    """As a save makes it, with everything that may be in it."""
    properties = TensorProperties(torch.float32, memory_format=torch.channels_last)
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 4)))]
    described = {"w": TensorStorageMetadata(properties, torch.Size((3, 4)), chunks), "n": BytesStorageMetadata()}
    places = {MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 512),
              MetadataIndex("n"): _StorageInfo("__0_0.distcp", 512, 100)}  # fmt: skip
    stored = StorageMeta(checkpoint_id=pathlib.Path("/a/b"), save_id="5")
    return Metadata(described, {"w": ("w",), "n": ("n", 1)}, places, stored, "1.0.0")


def digests() -> list[str]:
    """Of what is written, which is the same whatever the Python: ``.metadata`` and records."""
    written = [encode_metadata(metadata()), *(python_record(VALUES[name]) for name in sorted(VALUES))]
    written.append(python_record([VALUES["color"], VALUES["path"], torch.ones(2)]))
    return [hashlib.sha256(content).hexdigest() for content in written]


def save(kind: str, place: str) -> None:
    saving = torch_dcp.save if kind == "torch" else dcp.save
    saving({**TENSORS, **VALUES}, checkpoint_id=place, no_dist=True)


def load(kind: str, place: str) -> None:
    """Raise unless everything comes back as it was, with nothing trusted but two classes of this module."""
    filled = {**{name: torch.full_like(one, float("nan")) for name, one in TENSORS.items()}, **dict.fromkeys(VALUES)}
    with torch.serialization.safe_globals([Color, Rights]):
        (torch_dcp.load if kind == "torch" else dcp.load)(filled, checkpoint_id=place, no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(filled[name], tensor), name
    for name, value in VALUES.items():
        assert repr(filled[name]) == repr(value), name


def main(command: str, *arguments: str) -> None:
    warnings.simplefilter("ignore")
    if command == "digests":
        print("\n".join(digests()))
    else:
        {"save": save, "load": load}[command](*arguments)


if __name__ == "__main__":
    # Pickles name the classes of this module, and a program's own module has another name.
    from tests.interop import between_pythons

    between_pythons.main(*sys.argv[1:])
