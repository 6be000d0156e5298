"""Names of the files of a checkpoint. FORMAT.md is the text; nothing else spells these."""

from __future__ import annotations

import json
import operator
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from ray_dcp.errors import ConfigError, CorruptCheckpointError

METADATA = ".metadata"
"""DCP's pickled ``Metadata``. Its presence is the commit."""
MANIFEST = "manifest.parquet"
POINTER = "ray_dcp_pointer.json"
"""A file in a folder handed to Ray Train; it says where the checkpoint really lies, ``{"checkpoint_id": URL}``."""
SHARD_SUFFIX = ".distcp"
SAFETENSORS_SUFFIX = ".safetensors"
"""End of the names of safetensors files, another format that is read as checkpoints too."""
PAYLOAD_ALIGNMENT = 64
"""In bytes. Torch's zip writer aligns payloads to it within the record; records are aligned to it in the file."""
BLOCK_NBYTES = 1 << 20
"""Payload bytes under one checksum."""

_ATTEMPT = re.compile(r"(?P<started_ns>[0-9a-f]{16})[0-9a-f]{8}")
_SHARD = re.compile(r"__(?P<rank>\d+)_(?P<number>\d+)_(?P<attempt>[0-9a-f]+)\.distcp")
_ANYBODYS_SHARD = re.compile(r"__(?P<rank>\d+)_\d+(?:_[0-9a-f]+)?\.distcp")
_STEP = re.compile(r"step-(?P<step>\d+)")
_NAMED = re.compile(rb"(?:\.\./[^/\x00-\x1f]+/)?__\d+_\d+(?:_[0-9a-f]+)?\.distcp")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The parts of a shard file's name."""

    rank: int
    number: int
    attempt: str

    @property
    def key(self) -> str:
        return f"__{self.rank}_{self.number}_{self.attempt}{SHARD_SUFFIX}"


def parse_shard_file(key: str) -> ShardFile | None:
    """The parts of ``key``, or None when it does not name a shard file that ray_dcp wrote."""
    match = _SHARD.fullmatch(key)
    return ShardFile(int(match["rank"]), int(match["number"]), match["attempt"]) if match else None


def rank_of_shard_file(path: str) -> int | None:
    """The rank that wrote a shard file, by its name: ray_dcp's or torch's. None where that does not say."""
    match = _ANYBODYS_SHARD.search(path)
    return int(match["rank"]) if match else None


def shard_files_named_in(metadata: bytes) -> set[str]:
    """The keys of the shard files, ray_dcp's and torch's, that a pickled ``.metadata`` refers to.

    Found without unpickling: a pickle holds each name as it is, in one piece.
    """
    return {key.decode(errors="surrogateescape") for key in _NAMED.findall(metadata)}


def encode_pointer(checkpoint_id: str) -> bytes:
    """The content of the file ``POINTER``, which leads to the URL ``checkpoint_id``."""
    return json.dumps({"checkpoint_id": checkpoint_id}).encode()


def decode_pointer(content: bytes, *, file: str) -> str:
    """The place that a pointer leads to. Raises ``CorruptCheckpointError``, which names ``file``."""
    try:
        pointed_at = json.loads(content)["checkpoint_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"not a readable pointer: {error!r}", file=file) from error
    if not isinstance(pointed_at, str) or not pointed_at:
        raise CorruptCheckpointError(f"not a readable pointer: it leads to {pointed_at!r}", file=file)
    return pointed_at


def step_folder(step: int) -> str:
    """The folder of a step under a root: ``step-00000100``."""
    return f"step-{step:08d}"


def require_step(step: object) -> int:
    """``step`` as an int: Python's, or a whole number of numpy's or torch's. Raises ``ConfigError`` for all else."""
    is_bool = isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool")
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # what it is for
    except (TypeError, ValueError, RuntimeError):
        number = -1
    if is_bool or number < 0:
        raise ConfigError("step", f"{step!r} is not a step number; pass a whole number, 0 or more")
    return number


def parse_step_folder(name: str) -> int | None:
    """The step in a folder's name, or None when it is not that of a step folder."""
    match = _STEP.fullmatch(name)
    return int(match["step"]) if match else None


def new_attempt(others: Iterable[str] = ()) -> str:
    """Name an attempt that starts now: later than all of ``others``, even where the clock that named them is ahead."""
    latest_ns = max((started_ns(other) for other in others), default=0)
    return f"{max(time.time_ns(), latest_ns + 1):016x}{uuid.uuid4().hex[:8]}"


def started_ns(attempt: str) -> int:
    """The time at which an attempt began, in nanoseconds since the epoch; 0 where its name does not say."""
    match = _ATTEMPT.fullmatch(attempt)
    return int(match["started_ns"], 16) if match else 0


def is_newer(attempt: str, other: str) -> bool:
    """Whether ``attempt`` started after ``other``; of two that started at once one is the newer."""
    return attempt_order(attempt) > attempt_order(other)


def attempt_order(attempt: str) -> tuple[int, str]:
    """Sorts attempts by their start, and those that started at once in some way that is always the same."""
    return started_ns(attempt), attempt
