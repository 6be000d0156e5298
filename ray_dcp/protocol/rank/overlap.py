"""``staged``: waits for overlapped stagings before the state changes.

The steps of all torch optimizers wait from the first such staging on; where nothing is being staged that is a look at
an empty dict.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import wait
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ray_dcp.errors import ConfigError
from ray_dcp.protocol.rank.background import AsyncSaveResponse

_under_way: dict[AsyncSaveResponse, int] = {}
"""The saves that are being staged beside the program, or whose staging has failed, and the processes that do it."""


def note_staging(response: AsyncSaveResponse) -> None:
    """Have whoever waits for stagings wait for that of ``response``, too."""
    _have_steps_wait()
    _under_way[response] = os.getpid()

    def forget_unless_failed(_: Any) -> None:
        if response.staging_completion.exception() is None:
            _under_way.pop(response, None)

    response.staging_completion.add_done_callback(forget_unless_failed)


def wait_until_staged() -> None:
    """Return when nothing of this process is being staged. Raises the failure of a staging, once."""
    for response, pid in tuple(_under_way.items()):
        if pid != os.getpid():
            continue  # this is a fork: its parent stages
        failed = response.staging_completion.exception() is not None
        _under_way.pop(response, None)
        if failed and (failure := response.exception()) is not None:
            raise failure


@functools.cache
def _have_steps_wait() -> None:
    # For good: it cannot be taken off while a step, in another thread, goes through all hooks.
    register_optimizer_step_pre_hook(_before_any_step)


def _before_any_step(*_: Any) -> None:
    """Wait in the step of any optimizer; how a staging ended is told to whoever waits by ``staged``."""
    if _under_way:
        wait([one.staging_completion for one, pid in tuple(_under_way.items()) if pid == os.getpid()])


class Staged:
    """What ``staged`` returns: call it, or enter it, to wait; ``remove`` takes it off its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._hook: Any = None
        if optimizer is not None:
            self._hook = optimizer.register_step_pre_hook(_before_step)

    def __call__(self) -> None:
        wait_until_staged()

    wait = __call__

    def __enter__(self) -> None:
        wait_until_staged()

    def __exit__(self, *_: object) -> None:
        """Do nothing: it is the beginning of the block that waits."""

    def remove(self) -> None:
        """Have the optimizer wait no more."""
        if self._hook is not None:
            self._hook.remove()


def _before_step(*_: Any) -> None:
    if _under_way:
        wait_until_staged()


def staged(optimizer: torch.optim.Optimizer | None = None) -> Staged:
    """Wait for what ``async_save(..., overlap=True)`` still copies, before parameters change.

    With an ``optimizer`` each of its steps waits from now on, and raises the failure of a copy once, as
    ``CheckpointException``: call this once for each optimizer. A step without a save under way costs next to nothing.
    Steps of other torch optimizers wait, too, and raise nothing. Whatever else changes the state (an EMA, code of
    yours, an optimizer that is not torch's) waits by ``with dcp.staged():``, or ``dcp.staged().wait()``.
    """
    if optimizer is not None and not callable(getattr(optimizer, "register_step_pre_hook", None)):
        raise ConfigError("optimizer", f"{optimizer!r} is not a torch optimizer: it takes no step hooks")
    return Staged(optimizer)


__all__ = ["Staged", "note_staging", "staged", "wait_until_staged"]
