"""Steps that are in memory alone: what commits one, what ranks say of theirs, and which of them a run goes on from.

``docs/async_saves.md``, "Steps that never go to storage", has the rules.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_dcp.catalog.facts import CheckpointInfo
from ray_dcp.format.manifest import as_table, decode_manifest
from ray_dcp.format.names import MANIFEST, attempt_order
from ray_dcp.reads.checkpoint import OpenedCheckpoint
from ray_dcp.staging.memory_tier import KeptSave
from ray_dcp.store.location.urls import join_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptInMemory:
    """The last answer of a save in memory, by which it is committed: node agents keep it as it comes."""

    committed: Any
    """The answer of a save to storage: ``Metadata``, with what to warn of on rank 0."""
    opened: OpenedCheckpoint


@dataclass(frozen=True, slots=True)
class StepInMemory:
    """What a rank says of one save that its node has something of in memory."""

    place: str
    attempt: str
    has: frozenset[str]
    """The keys of the files that are there; ranks of other nodes read them from there, too."""
    step: int | None = None
    """None where this rank does not know whether the save is committed."""
    needs: frozenset[str] = frozenset()
    """The keys of all files of the checkpoint."""


@dataclass(frozen=True, slots=True)
class StepToLoad:
    """A step in memory that all ranks are to load."""

    place: str
    attempt: str
    step: int
    brought_by: int
    """The rank that says what it is: one that has the answer which commits it."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The answer to a look-up: the newest step in storage, and one in memory that is newer, if there is."""

    stored: CheckpointInfo | None
    in_memory: StepToLoad | None = None


class KeptSteps:
    """What a rank's node has of saves in memory, of which the rank can read the answers."""

    def __init__(self, kept: Iterable[KeptSave]) -> None:
        self.steps: list[StepInMemory] = []
        self._opened: dict[tuple[str, str], OpenedCheckpoint] = {}
        for save in kept:
            try:
                self.steps.append(self._of(save))
            except Exception as error:  # noqa: BLE001 - what cannot be read there is not loaded, and storage is
                logger.warning("what memory has of %s is of no use: %r", save.place, error)

    def opened(self, step: StepToLoad) -> OpenedCheckpoint | None:
        """The checkpoint of ``step``; None where this rank does not have it."""
        return self._opened.get((step.place, step.attempt))

    def _of(self, save: KeptSave) -> StepInMemory:
        has = frozenset(file.key for file in save.files)
        if not save.answer:
            return StepInMemory(save.place, save.attempt, has)
        opened: OpenedCheckpoint = pickle.loads(save.answer).opened  # of this run's own processes
        manifest = decode_manifest(opened.manifest or b"", file=join_url(save.place, MANIFEST))
        self._opened[save.place, save.attempt] = opened
        return StepInMemory(save.place, save.attempt, has, manifest.step, frozenset(as_table(manifest.entries).files))


def newest_whole(of_ranks: Sequence[Sequence[StepInMemory]], *, newer_than: int | None) -> StepToLoad | None:
    """The newest step that is committed in memory and of which their nodes have all files; None where there is none.

    Only one that is ``newer_than`` the newest in storage is worth it.
    """
    has: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for one in itertools.chain.from_iterable(of_ranks):
        has[one.place, one.attempt] |= one.has
    found: list[tuple[int, tuple[int, str], StepToLoad]] = []
    for rank, steps in enumerate(of_ranks):
        for one in steps:
            if one.step is None or (newer_than is not None and one.step <= newer_than):
                continue
            if one.needs <= has[one.place, one.attempt]:
                whole = StepToLoad(one.place, one.attempt, one.step, rank)
                found.append((one.step, attempt_order(one.attempt), whole))
    return max(found, key=lambda one: (one[0], one[1], -one[2].brought_by))[2] if found else None


__all__ = ["KeptInMemory", "KeptSteps", "Newest", "StepInMemory", "StepToLoad", "newest_whole"]
