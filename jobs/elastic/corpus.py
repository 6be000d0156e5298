"""Real text that is on every machine with Python: the modules of its own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def standard_library_bytes() -> torch.Tensor:
    """Return the top-level ``.py`` files of the standard library, by name, as one uint8 tensor."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no .py files in {folder}: this Python has no standard library to train on")
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def global_batch(
    text: torch.Tensor, *, seed: int, step: int, num_sequences: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and the next bytes of one step, ``[num_sequences, length]`` each.

    They depend on ``seed`` and ``step`` alone: whoever resumes at a step, on however many workers, trains on what
    an uninterrupted run would have trained on.
    """
    random = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - length - 1, (num_sequences,), generator=random)
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
