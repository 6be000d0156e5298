"""What travels between ranks and coordinator: plain pickled messages, and user objects without their tensors."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from ray_dcp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CallId:
    """One save, load or barrier of one group: the same on all its ranks."""

    generation: int
    number: int
    """The how-manieth call of this generation; every rank counts its own and they must agree."""
    kind: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A user's planner, writer or reader on its way to the coordinator."""

    pickled: bytes

    def unpack(self) -> Any:
        return pickle.loads(self.pickled)


def encode(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(content: bytes) -> Any:
    """Undo ``encode``. Messages come from this run's own processes, never from files."""
    return pickle.loads(content)


def carry(role: str, user_object: Any) -> Carried:
    """Pickle a planner, writer or reader, by value where the coordinator could not import its class.

    Tensors that it holds (a reused planner holds a whole state dict) arrive as meta tensors: planning needs shapes,
    never bytes. Raises ``ConfigError`` naming the object when it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _TensorlessPickler(buffer).dump(user_object)
    except (pickle.PickleError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            role,
            f"{type(user_object).__name__} cannot be sent to the coordinator, which runs its global step: {error}. "
            "Open files, locks and connections in set_up_... or write_data, or leave them out in __getstate__",
        ) from error
    return Carried(buffer.getvalue())


class _TensorlessPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _meta_tensor, (tuple(obj.shape), obj.dtype)
        return super().reducer_override(obj)


def _meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
