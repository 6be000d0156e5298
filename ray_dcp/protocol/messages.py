"""What travels between ranks and coordinator: plain pickled messages, and user objects without their tensors."""

from __future__ import annotations

import io
import logging
import os
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallId:
    """One save, load or barrier of one rank: which of the other ranks' it belongs to, the coordinator finds out."""

    generation: int
    number: int
    """The how-manieth call of this rank in this generation."""
    kind: str
    checkpoint_id: str = ""
    """The place, as all ranks name it; empty where there is none, or where the ranks may name it differently."""

    @classmethod
    def named(cls, generation: int, number: int, kind: str, checkpoint_id: str) -> CallId:
        """With ``checkpoint_id`` where that is a place: what is none may be a mistake of one rank alone."""
        is_place = "://" in checkpoint_id or os.path.isabs(checkpoint_id)
        return cls(generation, number, kind, checkpoint_id if is_place else "")


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
