"""What tells one process from all others: an actor that Ray starts again is another process with the same handle."""

from __future__ import annotations

import os
import socket
import uuid

_TOKEN = uuid.uuid4().hex[:8]


def process_name() -> str:
    """Of this process, unlike that of any other ever. For people too."""
    return f"process {os.getpid()} on {socket.gethostname()} ({_TOKEN})"


def process_name_of(actor: object) -> str:
    """As ``process_name``, asked of an actor: Ray passes it the actor itself."""
    return process_name()
