"""``SweepAfterSave``: what failed saves have left goes when the next one under the same root has committed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from ray_dcp.errors import RayDcpError
from ray_dcp.layout import parse_step_folder
from ray_dcp.maintenance.sweep import Sweeper, delete_leftovers
from ray_dcp.storage.urls import shown_url, split_url

logger = logging.getLogger(__name__)


class SweepAfterSave:
    """Sweeps a root in a thread of its own, one sweep at a time; no save waits for it, and none fails by it.

    ``attempts`` returns those that are under way and those that have failed for good, as far as they are known here:
    the latter need no grace. Only roots whose folders are steps are swept: anything may lie beside other checkpoints.
    """

    def __init__(self, attempts: Callable[[], tuple[AbstractSet[str], AbstractSet[str]]]) -> None:
        self._attempts = attempts
        self._lock = threading.Lock()
        self._sweepers: dict[str, Sweeper] = {}
        self._touched: dict[str, set[str]] = {}
        self._sweeping: threading.Thread | None = None

    def save_ended(self, checkpoint_id: str, *, committed: bool) -> None:
        """A save is over; sweep its root when it has committed, and look at its folder again in any case."""
        root, folder = split_url(checkpoint_id)
        if parse_step_folder(folder) is None:
            return
        with self._lock:
            self._touched.setdefault(root, set()).add(folder)
            if not committed or (self._sweeping is not None and self._sweeping.is_alive()):
                return
            self._sweeping = threading.Thread(target=self._sweep, args=(root,), name="ray_dcp-sweep", daemon=True)
            self._sweeping.start()

    def wait(self) -> None:
        """Return when no sweep is under way."""
        with self._lock:
            sweeping = self._sweeping
        if sweeping is not None:
            sweeping.join()

    def _sweep(self, root: str) -> None:
        with self._lock:
            sweeper = self._sweepers.setdefault(root, Sweeper(root))
            touched = self._touched.pop(root, set())
        for folder in touched:
            sweeper.forget(folder)
        try:
            live, dead = self._attempts()
            plan = sweeper.plan(live_attempts=live, dead_attempts=dead)
            report = delete_leftovers(plan)
        except RayDcpError as error:
            logger.warning("cannot look for leftovers of failed saves under %s: %s", shown_url(root), error)
            return
        except Exception as error:
            logger.warning("looking for leftovers under %s failed: %r", shown_url(root), error, exc_info=True)
            return
        if report.deleted:
            logger.info("removed %d leftovers (%d bytes) of failed saves", len(report.deleted), report.nbytes)
        for line in [*plan.unreadable, *(f"{failed.key}: {failed.message}" for failed in report.failed)]:
            logger.warning("leftovers of failed saves stay under %s: %s", shown_url(root), line)
