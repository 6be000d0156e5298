"""What goes wrong with staging buffers; the tree of all errors is in ``ray_dcp.errors``.

It stands here since ``errors`` is as long as a module may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray_dcp.errors import RayDcpError
from ray_dcp.wording import counted, first_lines, ranks_text

_MAX_TORN = 5


class StagingError(RayDcpError):
    """Base of what goes wrong with the shared memory that asynchronous saves copy into."""


class StagingMemoryError(StagingError):
    """There is no memory for a staging buffer of ``nbytes``; ``available_nbytes`` is what there was, None if unknown.

    Example: the buffers of a rank take twice what it saves, and its container may not have so much.
    """

    def __init__(self, *, nbytes: int, available_nbytes: int | None, reason: str) -> None:
        there = "" if available_nbytes is None else f", {available_nbytes} bytes are available"
        super().__init__(f"no memory for a staging buffer of {nbytes} bytes{there}: {reason}")
        self.nbytes = nbytes
        self.available_nbytes = available_nbytes


class StagingLostError(StagingError):
    """The staging buffer that another process named ``path`` is not there any more.

    Example: the process has ended, and another one has its number now.
    """

    def __init__(self, *, path: str, reason: str) -> None:
        super().__init__(f"no staging buffer at {path}: {reason}")
        self.path = path


class StagingBusyError(StagingError, TimeoutError):
    """All ``num_buffers`` staging buffers were in use for ``waited_s`` seconds, by saves that are not written yet."""

    def __init__(self, *, num_buffers: int, waited_s: float) -> None:
        super().__init__(
            f"all {num_buffers} staging buffers were in use for {waited_s:g} s, by saves that are not written yet"
        )
        self.num_buffers = num_buffers
        self.waited_s = waited_s


class SavesInFlightError(StagingError):
    """An asynchronous save was to begin while ``max_in_flight`` others of ``busy_ranks`` were not committed yet.

    Raised on all ranks alike, and only where that was asked for (``when_busy="error"``). Example: a checkpoint takes
    longer to write than training takes from one save to the next.
    """

    def __init__(self, *, max_in_flight: int, busy_ranks: Sequence[int]) -> None:
        are = "is" if max_in_flight == 1 else "are"
        super().__init__(
            f"{counted(max_in_flight, 'asynchronous save')} of {ranks_text(busy_ranks)} {are} not committed yet, "
            "as many as max_in_flight allows. Save less often, or wait for one (response.result(), manager.wait())"
        )
        self.max_in_flight = max_in_flight
        self.busy_ranks = tuple(busy_ranks)


class SaveSkippedError(SavesInFlightError):
    """What the response of a save that was skipped gives in place of a result: nothing was saved, on no rank.

    It is raised by nothing but a look at that response (``when_busy="skip"``).
    """


class TornStagingError(StagingError):
    """The tensors ``names`` were changed in place while they were copied beside the training; nothing is committed.

    Example: ``async_save(..., overlap=True)`` without ``staged(optimizer)``, and a step that is done before the copy.
    """

    def __init__(self, names: Sequence[str]) -> None:
        listed = ", ".join(first_lines(names, most=_MAX_TORN, kept_in=".names"))
        super().__init__(
            f"changed in place while they were copied (overlap=True): {listed}. Register ray_dcp.staged(optimizer), or "
            "wait for response.staging_completion before anything changes the state"
        )
        self.names = tuple(names)


class StepNotKeptError(StagingError):
    """What the response of a save in memory gives in place of a result where the step could not be kept there.

    ``reason`` is why. It is raised by nothing but a look at that response: an older step is what a run goes on from.
    Example: no agent runs on the node of a rank (``RAY_DCP_AGENTS=0``).
    """

    def __init__(self, *, reason: str) -> None:
        super().__init__(f"this step is not kept in memory: {reason}")
        self.reason = reason


__all__ = [
    "TornStagingError",
    "SaveSkippedError",
    "SavesInFlightError",
    "StagingBusyError",
    "StagingError",
    "StagingLostError",
    "StagingMemoryError",
    "StepNotKeptError",
]
