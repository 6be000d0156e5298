"""What failed saves leave behind, and its removal: decided first, deleted after.

Nothing that a committed checkpoint under the root refers to is ever a leftover, nor is any file that ray_dcp did not
write. Where one committed checkpoint cannot be read, nobody knows what it refers to: then nothing is deleted at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ray_dcp.errors import StoreError
from ray_dcp.format.manifest import metadata_digest
from ray_dcp.format.names import METADATA, started_ns
from ray_dcp.maintenance.sweep.leftovers import (
    Reference,
    UnneededFiles,
    find_unneeded,
    is_left_empty,
    list_folder,
    list_own_folders,
    look_at,
)
from ray_dcp.store.open import open_store
from ray_dcp.store.parallel import for_each_folder
from ray_dcp.store.store import Store, as_folders, get_or_none

GRACE_S = 3600.0
"""How long nothing of an attempt must have changed before it counts as failed: longer than any save pauses between
two of its files, and than any load takes."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no committed checkpoint needs."""

    key: str
    nbytes: int
    modified: float
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Files of one attempt that may turn out to be leftovers, but not yet."""

    folder: str
    num_files: int
    nbytes: int
    reason: str
    eligible: float | None
    """When they become leftovers, in seconds since the epoch; None while their save is known to be under way."""


@dataclass(frozen=True, slots=True)
class FolderLeftovers:
    """What to delete in one folder, as long as its ``.metadata`` is the one it was decided by."""

    folder: str
    commit: str | None
    """Digest of the folder's ``.metadata``; None where nothing is committed."""
    leftovers: Sequence[Leftover]
    """The files to delete; none where the folder itself, which is empty, is the leftover."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What ``delete_leftovers`` will delete under a root, and what it will not."""

    root: str
    grace_s: float
    folders: Sequence[FolderLeftovers]
    waiting: Sequence[Waiting]
    unreadable: Sequence[str]
    """Why committed checkpoints could not be read, a line each; where there are such, nothing is deleted."""

    @property
    def leftovers(self) -> list[Leftover]:
        return [leftover for folder in self.folders for leftover in folder.leftovers]

    @property
    def nbytes(self) -> int:
        """Bytes that will be free."""
        return sum(leftover.nbytes for leftover in self.leftovers)


@dataclass(frozen=True, slots=True)
class FailedDelete:
    """A leftover, or an empty folder, that is still there, and why."""

    key: str
    message: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What became of a plan."""

    deleted: Sequence[str] = ()
    nbytes: int = 0
    changed: Sequence[str] = ()
    """Keys kept, or gone already: they or their folder's ``.metadata`` have changed since the plan was made."""
    failed: Sequence[FailedDelete] = ()


def plan_sweep(
    root: str | os.PathLike[str],
    *,
    grace_s: float = GRACE_S,
    dead_attempts: AbstractSet[str] = frozenset(),
    live_attempts: AbstractSet[str] = frozenset(),
    now: float | None = None,
) -> SweepPlan:
    """Find the leftovers of failed saves in all folders under ``root``; nothing is changed.

    ``dead_attempts`` are known to have failed without a commit and wait for no grace; ``live_attempts`` are known to
    be under way and are let be, whatever their age.

    An age is what lies between ``now`` and the last sign of life of an attempt: its newest file, or its start as its
    name says it, whichever came later. The first is the store's clock and the second a rank's, so no clock that is
    behind alone makes a file look older than ``grace_s``.
    """
    return Sweeper(root).plan(grace_s=grace_s, dead_attempts=dead_attempts, live_attempts=live_attempts, now=now)


class Sweeper:
    """Plans sweeps of one root again and again, at the cost of what is new.

    A folder that was found committed and without leftovers is not looked at again until ``forget``. So call that for
    each folder that is being saved to; what other processes do to such folders is left to ``plan_sweep``.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = root
        self._clean: dict[str, frozenset[Reference]] = {}

    def forget(self, folder: str) -> None:
        """Look at ``folder`` again the next time."""
        self._clean.pop(folder, None)

    def plan(
        self,
        *,
        grace_s: float = GRACE_S,
        dead_attempts: AbstractSet[str] = frozenset(),
        live_attempts: AbstractSet[str] = frozenset(),
        now: float | None = None,
    ) -> SweepPlan:
        """Plan a sweep as ``plan_sweep`` does."""
        store = open_store(self._root)
        names = list_own_folders(store)
        self._clean = {name: references for name, references in self._clean.items() if name in names}
        found = look_at(store, [name for name in names if name not in self._clean])
        references = frozenset().union(*self._clean.values(), *(folder.references for folder in found))
        judge = _Judge(time.time() if now is None else now, grace_s, dead_attempts, live_attempts)
        unreadable = [folder.unreadable for folder in found if folder.unreadable]
        folders, waiting = [], []
        for folder in [] if unreadable else found:
            leftovers, too_young = judge.split(folder.name, find_unneeded(folder, references))
            waiting += too_young
            if leftovers or is_left_empty(folder):
                folders.append(FolderLeftovers(folder.name, folder.commit, leftovers))
            elif folder.metadata is not None and not too_young:
                self._clean[folder.name] = folder.references
        return SweepPlan(store.url, grace_s, folders, waiting, unreadable)


def delete_leftovers(plan: SweepPlan) -> SweepReport:
    """Delete what the plan says; what cannot be deleted is reported, and stops nothing else.

    A folder whose ``.metadata`` has changed since, and a file that has changed since, are left alone.
    """
    store = open_store(plan.root)
    reports = for_each_folder(plan.folders, lambda folder: _delete_in(store, folder))
    return SweepReport(
        deleted=[key for report in reports for key in report.deleted],
        nbytes=sum(report.nbytes for report in reports),
        changed=[key for report in reports for key in report.changed],
        failed=[failure for report in reports for failure in report.failed],
    )


class _Judge:
    """Says which of the files that nothing needs are old enough."""

    def __init__(self, now: float, grace_s: float, dead: AbstractSet[str], live: AbstractSet[str]) -> None:
        self._now = now
        self._grace_s = grace_s
        self._dead = dead
        self._live = live

    def split(self, folder: str, groups: Iterable[UnneededFiles]) -> tuple[list[Leftover], list[Waiting]]:
        leftovers: list[Leftover] = []
        waiting: list[Waiting] = []
        for group in groups:
            nbytes = sum(one.nbytes for one in group.files)
            if group.attempt in self._live:
                waiting.append(Waiting(folder, len(group.files), nbytes, "their save is under way", None))
            elif (eligible := self._eligible(group)) <= self._now:
                leftovers += [Leftover(one.key, one.nbytes, one.modified, group.reason) for one in group.files]
            else:
                waiting.append(Waiting(folder, len(group.files), nbytes, group.reason, eligible))
        return leftovers, waiting

    def _eligible(self, group: UnneededFiles) -> float:
        if group.attempt in self._dead:
            return 0.0
        signs = [one.modified or self._now for one in group.files]  # a store that does not say when: perhaps now
        latest = max(*signs, started_ns(group.attempt) / 1e9, min(group.replaced_at, self._now))
        return latest + self._grace_s


def _delete_in(store: Store, planned: FolderLeftovers) -> SweepReport:
    keys = [leftover.key for leftover in planned.leftovers]
    try:
        metadata = get_or_none(store, f"{planned.folder}/{METADATA}")
        if (None if metadata is None else metadata_digest(metadata)) != planned.commit:
            return SweepReport(changed=keys)
        now = list_folder(store, planned.folder)
    except StoreError as error:
        return SweepReport(failed=[FailedDelete(key, str(error)) for key in keys])
    if now.unreadable:
        return SweepReport(failed=[FailedDelete(key, now.unreadable) for key in keys])
    same = {(one.key, one.nbytes, one.modified) for one in (*now.stored, *now.temporaries)}
    deleted: list[Leftover] = []
    changed: list[str] = []
    failed: list[FailedDelete] = []
    for leftover in planned.leftovers:
        if (leftover.key, leftover.nbytes, leftover.modified) not in same:
            changed.append(leftover.key)
            continue
        try:
            store.delete(leftover.key)
            deleted.append(leftover)
        except StoreError as error:
            failed.append(FailedDelete(leftover.key, str(error)))
    folders = as_folders(store)
    if not keys and folders is not None:
        try:
            folders.delete_empty_folder(planned.folder)
        except StoreError as error:
            failed.append(FailedDelete(planned.folder, str(error)))
    return SweepReport([one.key for one in deleted], sum(one.nbytes for one in deleted), changed, failed)
