"""ray_dcp without its checksums. It has no such switch: this is how its own functions are put out of work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ray_dcp.format import checksums


def _no_crc(content: checksums.Bytes, crc: int = 0) -> int:
    return 0


def _no_combined_crc(first: int, second: int, second_nbytes: int) -> int:
    return 0


_STAND_INS: Mapping[Any, Any] = {checksums.crc32: _no_crc, checksums.combined_crc: _no_combined_crc}
"""For the two that do the work; all others are made of these."""


@contextlib.contextmanager
def checksums_off() -> Iterator[None]:
    """In this process, ray_dcp takes 0 for the checksum of every value and record.

    What is saved meanwhile has 0 for all its checksums, so that a load passes them while they are off, and fails
    when they are on again.
    """
    _put_in_place(_STAND_INS)
    try:
        yield
    finally:
        _put_in_place({stand_in: real for real, stand_in in _STAND_INS.items()})


def _put_in_place(new_of_old: Mapping[Any, Any]) -> None:
    """In every module, since ``from ray_dcp.format.checksums import crc32`` leaves a name of its own behind."""
    new_of_id = {id(old): new for old, new in new_of_old.items()}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "ray_dcp"]:
        for name, value in list(vars(module).items()):
            if id(value) in new_of_id:
                setattr(module, name, new_of_id[id(value)])
