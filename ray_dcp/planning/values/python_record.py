"""The record of a Python object: what ``torch.save`` writes for it, and a third of that where no tensor is in it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.serialization
from torch.serialization import DEFAULT_PROTOCOL

from ray_dcp.format.names import PAYLOAD_ALIGNMENT
from ray_dcp.format.safe_pickle import plain_values
from ray_dcp.format.safe_pickle.portable_pickle import RenamingPickler, portable_reduce, renaming_dumps
from ray_dcp.format.scalar_record import PYTHON_SCALARS, scalar_record
from ray_dcp.format.zip_record import frame_pickle
from ray_dcp.planning.values.compact import compacted
from ray_dcp.planning.values.survey import Survey
from ray_dcp.torch_private import allowed_globals, user_allowed_globals


def python_record(value: Any, foreign: set[str] | None = None) -> bytes:
    """A record that ``torch.load`` turns into ``value``; it has only the tensors' own bytes, not those around a view.

    ``foreign`` gets the names of the classes and functions in it that a load will not make unless the user allows them.
    Raises ``HiddenPartError`` for what would be lost in it, and whatever pickling it raises.
    """
    if type(value) in PYTHON_SCALARS:
        return scalar_record(value)
    survey = Survey(value)
    if foreign is not None and not survey.named <= plain_values.PLAIN_NAMES:
        foreign |= {name for name in survey.named - plain_values.PLAIN_NAMES if not _is_allowed(name)}
    if survey.pickled is None:
        return _with_tensors(
            value, compacted(survey.tensors), pickle.Pickler if survey.is_portable else RenamingPickler
        )
    return frame_pickle(survey.pickled if survey.is_portable else renaming_dumps(value, DEFAULT_PROTOCOL))


def _is_allowed(name: str) -> bool:
    """Whether torch allows the class or function, or the user does."""
    return name in allowed_globals() or name in user_allowed_globals()


def _with_tensors(value: Any, replaced: Mapping[int, torch.Tensor], pickler: Any) -> bytes:
    """The bytes that ``torch.save`` writes, with the tensors of ``replaced`` in place of those with their ``id``."""

    class Replacing(pickler):
        def reducer_override(self, obj: Any) -> Any:
            replacement = replaced.get(id(obj))
            return portable_reduce(obj) if replacement is None else replacement.__reduce_ex__(DEFAULT_PROTOCOL)

    buffer = io.BytesIO()
    settings = {"save.compute_crc32": True, "save.storage_alignment": PAYLOAD_ALIGNMENT}
    pickling: Any = SimpleNamespace(__name__="pickle", Pickler=Replacing)
    with torch.utils.serialization.config.patch(settings):  # type: ignore[attr-defined]  # torch sets it on import
        torch.save(value, buffer, pickle_module=pickling)
    return buffer.getvalue()
