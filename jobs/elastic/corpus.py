"""Real text that is on every machine with Python: the modules of its own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch


def standard_library_bytes() -> torch.Tensor:
    """Return the top-level ``.py`` files of the standard library, by name, as one uint8 tensor."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no .py files in {folder}: this Python has no standard library to train on")
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Windows:
    """A text cut into samples of ``length`` bytes, each with the byte that follows."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def batch(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the next bytes of the samples ``numbers``, ``[len(numbers), length]`` each."""
        starts = [number * self._length for number in numbers]
        windows = torch.stack([self._text[start : start + self._length + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]
