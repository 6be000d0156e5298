"""The record of a Python object: what ``torch.save`` writes for it, and a third of that where no tensor is in it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.utils.serialization
from torch.serialization import DEFAULT_PROTOCOL

from ray_dcp.layout import PAYLOAD_ALIGNMENT
from ray_dcp.zip_record import frame_pickle

_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))


def python_record(value: Any) -> bytes:
    """A record that ``torch.load`` turns into ``value``. Raises whatever pickling it raises."""
    if type(value) in _PLAIN:
        return frame_pickle(pickle.dumps(value, DEFAULT_PROTOCOL))
    buffer = io.BytesIO()
    try:
        _TensorlessPickler(buffer, DEFAULT_PROTOCOL).dump(value)
    except _HoldsTensorsError:
        return _with_tensors(value)
    return frame_pickle(buffer.getvalue())


class _HoldsTensorsError(Exception):
    pass


class _TensorlessPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        """``torch.save`` puts storages, classes of modules and what else it names beside the pickle."""
        if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            raise _HoldsTensorsError


def _with_tensors(value: Any) -> bytes:
    buffer = io.BytesIO()
    settings = {"save.compute_crc32": True, "save.storage_alignment": PAYLOAD_ALIGNMENT}
    with torch.utils.serialization.config.patch(settings):  # type: ignore[attr-defined]  # put there on import
        torch.save(value, buffer)
    return buffer.getvalue()
