"""What a checkpoint leaves behind in its own folder when it is saved again, and again.

The rule: behind a commit the files of two attempts stay, those of the checkpoint and those of the newest one before it,
which somebody may have opened just before and be reading still. A load therefore has from one commit of an id to the
next but one; a slower one fails, by name, and finds the newer checkpoint when it is made again. So however often an id
is saved, it takes the room of two. ``ray-dcp prune`` removes the last old one, too.

Only files of attempts older than the committed one are looked at: a newer one is a save under way. Another checkpoint
beside this one may refer to its files: what any ``.metadata`` there names stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ray_dcp.errors import ConfigError, StoreError
from ray_dcp.format.names import METADATA, attempt_order, parse_shard_file
from ray_dcp.maintenance.sweep.leftovers import FoundFolder, list_folder, list_own_folders, look_at
from ray_dcp.maintenance.sweep.removal import FolderLeftovers, Leftover, SweepPlan
from ray_dcp.store.open import open_store
from ray_dcp.store.parallel import for_each_folder
from ray_dcp.store.store import Store, StoredObject, as_folders, get_or_none

_MAX_SIBLINGS = 2000
"""Beside more folders than this nothing is removed behind a save: each would have to be looked at."""
_REASON = "replaced by newer saves of this checkpoint"


def plan_replaced(
    root: str,
    folder: str,
    *,
    live_attempts: AbstractSet[str] = frozenset(),
    dead_attempts: AbstractSet[str] = frozenset(),
) -> SweepPlan:
    """What nobody needs any more of the checkpoint in ``folder`` under ``root``, which has just been committed.

    ``live_attempts`` are known to be under way, ``dead_attempts`` to have failed. Raises ``StoreError``.
    """
    nothing = SweepPlan(root, 0.0, [], [], [])
    try:
        store = open_store(root)
    except ConfigError:
        return nothing  # the checkpoint is a whole bucket: there is no root above it
    folders = as_folders(store)
    if folders is not None and folders.is_link(folder):
        return nothing  # others may refer to its files by its real name
    if len(_by_attempt(list_folder(store, folder))) < 2:
        return nothing  # nearly always, and then nothing has been read
    (found,) = look_at(store, [folder])
    current = {attempt_order(attempt) for name, attempt in found.references if name == folder}
    if found.unreadable or not current:
        return nothing
    files = _by_attempt(found)
    older = sorted((a for a in files if attempt_order(a) < min(current)), key=attempt_order)
    replaced = [attempt for attempt in older if attempt not in dead_attempts][-1:]
    unneeded = _without_references(store, folder, set(older).difference(replaced, live_attempts))
    leftovers = [
        Leftover(one.key, one.nbytes, one.modified, _REASON) for attempt in sorted(unneeded) for one in files[attempt]
    ]
    planned = [FolderLeftovers(folder, found.commit, leftovers)] if leftovers else []
    return SweepPlan(store.url, 0.0, planned, [], [])


def _by_attempt(folder: FoundFolder) -> Mapping[str, Sequence[StoredObject]]:
    files: dict[str, list[StoredObject]] = defaultdict(list)
    for one in folder.stored:
        shard = parse_shard_file(one.key.removeprefix(f"{folder.name}/"))
        if shard is not None:
            files[shard.attempt].append(one)
    return files


def _without_references(store: Store, folder: str, attempts: AbstractSet[str]) -> set[str]:
    """Those of ``attempts`` that no checkpoint beside ``folder`` names."""
    siblings = [name for name in list_own_folders(store) if name != folder] if attempts else []
    if len(siblings) > _MAX_SIBLINGS:
        return set()
    named = for_each_folder(siblings, lambda name: _named_in(store, name, attempts))
    return set(attempts).difference(*named)


def _named_in(store: Store, name: str, attempts: Iterable[str]) -> Sequence[str]:
    """Those of ``attempts`` that a checkpoint names: a pickle holds each name as it is, in one piece."""
    try:
        metadata = get_or_none(store, f"{name}/{METADATA}") or b""
    except StoreError:
        return list(attempts)  # it cannot be told what this one needs
    return [attempt for attempt in attempts if attempt.encode() in metadata]
