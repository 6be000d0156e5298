"""What tells one process from all others: an actor that Ray starts again is another process with the same handle."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable
from typing import Any

from ray_dcp.cluster.ray_private import private
from ray_dcp.errors import ForkedProcessError

logger = logging.getLogger(__name__)

_connected_parent: int | None = None
"""The process from which this one was forked, if that was connected to Ray then."""
_TOKEN = uuid.uuid4().hex[:8]


def process_name() -> str:
    """A name for this process, unlike that of any other ever. People can read it, too."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_TOKEN})"


def process_name_of(actor: object) -> str:
    """``process_name``, in the form in which an actor is asked for it: Ray passes it the actor itself."""
    return process_name()


def before_actor_ends(finish: Callable[[], None]) -> None:
    """Have ``finish`` called when the actor that this process is ends by itself, while Ray still carries messages.

    It may leave by ``sys.exit`` or ``exit_actor``, or nobody may hold its handle any more. Python's own hooks come too
    late: Ray has gone by then, and whoever waits for an answer of another actor waits in vain.
    """
    try:
        worker: Any = private("global_worker")
    except ImportError as error:
        logger.warning("when this actor ends by itself, nobody is told of its saves under way: %r", error)
        return
    actor_class: Any = type(getattr(worker, "actors", {}).get(worker.actor_id))  # one that Ray makes of the user's
    users = getattr(actor_class, "__ray_shutdown__", None)

    def shut_down(actor: Any) -> None:
        try:
            finish()
        finally:
            if users is not None:
                users(actor)

    if actor_class is not type(None):
        actor_class.__ray_shutdown__ = shut_down


def require_own_connection(pid: int | None = None) -> None:
    """Raise ``ForkedProcessError`` where this process has only a copy of its parent's connection to Ray.

    Whatever it asks Ray is never answered. ``pid`` is the process in which something was made that needs Ray.
    """
    parent = pid if pid not in (None, os.getpid()) else _connected_parent
    if parent is not None:
        raise ForkedProcessError(
            "Ray, through which ranks coordinate, does not answer a fork. Start processes with multiprocessing's "
            '"spawn" method, or pass no_dist=True for a save or load of this process alone',
            pid=parent,
        )


def _remember_connection() -> None:
    global _connected_parent
    ray = sys.modules.get("ray")
    # In the parent: a fork that connects by itself, since its parent did not, is a process like any other.
    if _connected_parent is None and ray is not None and ray.is_initialized():
        _connected_parent = os.getpid()


def _forget_own_connection() -> None:
    global _connected_parent
    if _connected_parent == os.getpid():
        _connected_parent = None


os.register_at_fork(before=_remember_connection, after_in_parent=_forget_own_connection)
