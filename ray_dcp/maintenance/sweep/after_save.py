"""``SweepAfterSave``: removes what failed and replaced saves have left when the next one has committed."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from ray_dcp.errors import RayDcpError
from ray_dcp.format.names import parse_step_folder
from ray_dcp.lifetime import before_exit, process_ends
from ray_dcp.maintenance.sweep.removal import Sweeper, SweepPlan, delete_leftovers
from ray_dcp.maintenance.sweep.replaced import plan_replaced
from ray_dcp.store.location.urls import shown_url, split_url
from ray_dcp.wording import first_lines

logger = logging.getLogger(__name__)

_MAX_EXIT_S = 10.0
"""How long a process that ends waits for a sweep: most take milliseconds, but a bucket may be slow."""


class SweepAfterSave:
    """Sweeps a root in a thread of its own, one sweep at a time; no save waits for it, and none fails by it.

    ``attempts`` returns those that are under way and those that have failed for good, as far as they are known here:
    the latter need no grace. Only roots whose folders are steps are swept: anything may lie beside other checkpoints.
    From every checkpoint, step or not, the files of saves go that newer ones of the same id replaced: see ``replaced``.
    """

    def __init__(self, attempts: Callable[[], tuple[AbstractSet[str], AbstractSet[str]]]) -> None:
        self._attempts = attempts
        self._lock = threading.Lock()
        self._sweepers: dict[str, Sweeper] = {}
        self._touched: dict[str, set[str]] = {}
        self._due: dict[str, set[str]] = {}
        """Folders of checkpoints that were committed since they were last looked at, by root."""
        self._sweeping: threading.Thread | None = None
        self._pid = os.getpid()
        self._is_waited_for = False

    def save_ended(self, checkpoint_id: str, *, committed: bool) -> None:
        """A save is over; sweep its root when it has committed, and look at its folder again in any case."""
        root, folder = split_url(checkpoint_id)
        if self._pid != os.getpid():  # a fork: another thread of the parent may have had the lock
            self.__init__(self._attempts)  # type: ignore[misc]
        with self._lock:
            if parse_step_folder(folder) is not None:
                self._touched.setdefault(root, set()).add(folder)
            if not committed:
                return
            self._due.setdefault(root, set()).add(folder)
            if self._sweeping is None or not self._sweeping.is_alive():
                self._sweeping = threading.Thread(target=self._sweep_due, name="ray_dcp-sweep", daemon=True)
                self._sweeping.start()
                if not self._is_waited_for:
                    self._is_waited_for = True
                    before_exit(lambda: self.wait(_MAX_EXIT_S), turn=1)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no sweep is under way, or after ``timeout_s``."""
        sweeping = self._sweeping
        if sweeping is not None and self._pid == os.getpid():
            sweeping.join(timeout_s)

    def _sweep_due(self) -> None:
        """Sweep until no committed save is left that nobody has looked behind."""
        while True:
            with self._lock:
                if not self._due:
                    self._sweeping = None
                    return
                root, folders = self._due.popitem()
            plans = [functools.partial(self._plan_replaced, root, folder) for folder in sorted(folders)]
            if any(parse_step_folder(folder) is not None for folder in folders):
                plans.append(functools.partial(self._plan_sweep, root))
            for plan in plans:
                _carry_out(root, plan)

    def _plan_replaced(self, root: str, folder: str) -> SweepPlan:
        live, dead = self._attempts()
        return plan_replaced(root, folder, live_attempts=live, dead_attempts=dead)

    def _plan_sweep(self, root: str) -> SweepPlan:
        with self._lock:
            sweeper = self._sweepers.setdefault(root, Sweeper(root))
            touched = self._touched.pop(root, set())
        for folder in touched:
            sweeper.forget(folder)
        live, dead = self._attempts()
        return sweeper.plan(live_attempts=live, dead_attempts=dead)


def _carry_out(root: str, make_plan: Callable[[], SweepPlan]) -> None:
    """Delete what the plan says. Nothing is raised: the save that this runs behind is over."""
    try:
        plan = make_plan()
        report = delete_leftovers(plan)
    except RayDcpError as error:
        logger.warning("cannot look for leftovers of earlier saves under %s: %s", shown_url(root), error)
        return
    except Exception as error:
        if process_ends():
            return  # pools take no more work; what is not swept now is so behind another save
        logger.warning("looking for leftovers under %s failed: %r", shown_url(root), error, exc_info=True)
        return
    if report.deleted:
        logger.info("removed %d leftovers (%d bytes) of earlier saves", len(report.deleted), report.nbytes)
    for line in first_lines([*plan.unreadable, *(f"{failed.key}: {failed.message}" for failed in report.failed)]):
        logger.warning("leftovers of earlier saves stay under %s: %s", shown_url(root), line)
