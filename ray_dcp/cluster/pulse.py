"""``Pulse``: while a rank works on a save or load, the coordinator hears how far it is, and the rank when it may stop.

It is a thread of the rank's process. While no call is worked on it sleeps, unless the process has to show that it
lives; a save that is over within the first interval never sees it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ray_dcp.cluster.link import CoordinatorLink
from ray_dcp.protocol.exception import CheckpointException
from ray_dcp.protocol.messages import CallId
from ray_dcp.protocol.rank.remote_call import RemoteCall

logger = logging.getLogger(__name__)

_MIN_INTERVAL_S = 0.25
_INTERVAL_S_PER_RANK = 0.002
"""The coordinator takes some hundred messages a second: with many ranks each tells less often."""
_BEATS_A_TIMEOUT = 8


@dataclass(frozen=True, slots=True)
class _Watched:
    call_id: CallId
    call: weakref.ref[RemoteCall]


class Pulse:
    """The pulse of one rank in one group. ``member`` is given where the process itself must show that it lives."""

    def __init__(
        self, link: CoordinatorLink, *, rank: int, world_size: int, member: str | None, heartbeat_timeout_s: float
    ) -> None:
        self._link = link
        self._rank = rank
        self._member = member
        self._interval_s = max(_MIN_INTERVAL_S, _INTERVAL_S_PER_RANK * world_size)
        self._beat_s = heartbeat_timeout_s / _BEATS_A_TIMEOUT
        self._watched: list[_Watched] = []
        self._wake = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None
        if member is not None:
            self._start()

    def watch(self, call_id: CallId, call: RemoteCall) -> None:
        """Tell of ``call`` for as long as somebody holds it."""
        with self._wake:
            self._watched.append(_Watched(call_id, weakref.ref(call)))
            self._start()
            self._wake.notify()

    def end(self) -> None:
        """Stop; the thread is gone soon afterwards."""
        with self._wake:
            self._ended = True
            self._wake.notify()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ray_dcp-pulse", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._wait_for_work():
            if not self._link.is_connected:
                return  # this process has left the cluster
            try:
                self._beat()
                self._tell_progress()
            except Exception as error:
                logger.warning("cannot tell the coordinator of this rank's progress: %r", error, exc_info=True)

    def _wait_for_work(self) -> bool:
        """Sleep for an interval, for as long as there is nothing to tell; False at the end."""
        with self._wake:
            self._watched = [one for one in self._watched if _goes_on(one.call())]
            if not self._watched and self._member is None:
                self._wake.wait_for(lambda: self._watched or self._ended)
            interval_s = self._interval_s if self._watched else self._beat_s
            if self._member is not None:
                interval_s = min(interval_s, self._beat_s)
            self._wake.wait_for(lambda: self._ended, timeout=interval_s)
            return not self._ended

    def _beat(self) -> None:
        if self._member is not None:
            self._link.handle.heartbeat.remote(self._member)

    def _tell_progress(self) -> None:
        """Tell of every call that is worked on; interrupt those that have failed elsewhere."""
        asked = {}
        for one in list(self._watched):
            call = one.call()
            phase = call.progress.phase if call is not None else None
            if call is not None and phase is not None:
                mark, nbytes = call.progress.mark, call.progress.nbytes
                reference = self._link.handle.report_progress.remote(one.call_id, self._rank, str(phase), mark, nbytes)
                asked[reference] = call
        deadline = time.monotonic() + self._interval_s
        while asked and (left_s := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(asked), num_returns=1, timeout=left_s)
            for reference in done:
                _interrupt(asked.pop(reference), reference)


def _goes_on(call: RemoteCall | None) -> bool:
    return call is not None and not (call.failed and call.progress.phase is None)


def _interrupt(call: RemoteCall, reference: Any) -> None:
    try:
        failure: CheckpointException | None = ray.get(reference).answer
    except RayError:
        return  # whoever waits for an answer of the coordinator deals with that
    if failure is not None:
        call.progress.interrupt(call.as_failed(failure))
