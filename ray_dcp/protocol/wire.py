"""What travels between ranks and coordinator: plain pickled messages, and user objects without their tensors."""

from __future__ import annotations

import io
import logging
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

logger = logging.getLogger(__name__)


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


def carry(*user_objects: Any) -> Carried | None:
    """Pickle planners, writers or readers, by value where the coordinator could not import their class.

    Tensors that they hold (a reused planner holds a whole state dict) arrive as meta tensors: planning needs shapes,
    never bytes. None when one of them cannot be pickled: it holds a lock, an open file, a process group.
    """
    buffer = io.BytesIO()
    try:
        _TensorlessPickler(buffer).dump(user_objects)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything; it then stays where it is
        logger.info("%s stay on rank 0: %s", ", ".join(type(item).__name__ for item in user_objects), error)
        return None
    return Carried(buffer.getvalue())


class _TensorlessPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _meta_tensor, (tuple(obj.shape), obj.dtype)
        return super().reducer_override(obj)


def _meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
