"""The commit of a checkpoint: the one step that readers see, and the checks that it is taken once, and rightly.

::

    begin     name the attempt: its files are new, with later names than all that are there
    (shard files are written by all ranks, and durable)
    put       manifest.parquet, then .metadata: a checkpoint is committed where .metadata is
    give_up   from now on this attempt puts nothing more

Nothing that is committed is touched before ``.metadata`` takes the place of its predecessor, so the old checkpoint or
the new one is there at any moment. Right before each of the two becomes visible the attempt takes a last look: it must
not have been given up, no newer attempt may have begun to write, and its own files must still be there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from ray_dcp.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    ObjectNotFoundError,
    StoreError,
    SupersededError,
)
from ray_dcp.format.manifest import decode_facts, metadata_digest
from ray_dcp.format.names import (
    MANIFEST,
    METADATA,
    attempt_order,
    is_newer,
    new_attempt,
    parse_shard_file,
    shard_files_named_in,
)
from ray_dcp.store.store import Store, StoredObject, get_or_none
from ray_dcp.trace_points import Point, reached


class Commit:
    """The commit of one attempt at one checkpoint.

    ``give_up`` may be called from another thread; everything else is called in order.
    """

    def __init__(self, attempt: str = "") -> None:
        """``attempt`` is the name that rank 0 has chosen, which it gives again to a coordinator that starts over."""
        self.attempt = attempt
        self.world_size = 0
        self.may_have_happened = False
        """Whether ``put`` has got as far as putting ``.metadata``, whether or not that worked."""
        self._given_up = False

    def begin(self, store: Store, world_size: int) -> None:
        """Settle the attempt's name. Raises ``StoreError`` where the place itself is wrong (a file, no permission)."""
        seen = _attempts_in(store, store.list())
        if not self.attempt or any(is_newer(other, self.attempt) for other in seen):
            self.attempt = new_attempt(seen)
        self.world_size = world_size

    def begin_in_memory(self, world_size: int) -> None:
        """Settle it for what no store is to know of: it has the name that rank 0 has chosen."""
        self.attempt = self.attempt or new_attempt()
        self.world_size = world_size

    def put(self, store: Store, metadata: bytes, manifest: Callable[[], bytes], files: Collection[str]) -> None:
        """Commit ``metadata``, whose values lie in ``files``. Does nothing where it is committed already.

        Raises ``SupersededError`` where a newer attempt has begun to write, ``StoreError`` where this one was given up
        or the store fails: then either the whole checkpoint is there or its predecessor is.
        """

        def last_look() -> None:
            self._require_newest(store, files)

        self.may_have_happened = get_or_none(store, METADATA) == metadata
        if not self.may_have_happened:
            store.put(MANIFEST, manifest(), last_look=last_look)
            reached(Point.BETWEEN_MANIFEST_AND_METADATA)
            self.may_have_happened = True
            store.put(METADATA, metadata, last_look=last_look)
        reached(Point.AFTER_METADATA)

    def give_up(self) -> None:
        """Refuse to commit from now on, also in a ``put`` that is under way."""
        self._given_up = True

    def _require_newest(self, store: Store, files: Collection[str]) -> None:
        if self._given_up:
            raise StoreError("this save was given up before its commit", url=store.url)
        listed = store.list()
        newest = max(_attempts_in(store, listed), key=attempt_order, default="")
        if newest and is_newer(newest, self.attempt):
            raise SupersededError(
                checkpoint_id=store.url, attempt=self.attempt, newer=newest, world_size=self.world_size
            )
        # Somebody may have deleted a file of this attempt since it was written.
        for key in sorted(set(files) - {one.key for one in listed}):
            store.get(key, 0, 0)  # raises unless it is there, only not listed yet


def committed_by(store: Store, attempt: str) -> bytes | None:
    """The ``.metadata`` that is committed now if it is that of ``attempt``, else None.

    Its own shard files tell: the manifest is already a newer attempt's right before that commits. One without any is
    told by the manifest.
    """
    metadata = get_or_none(store, METADATA)
    named = (parse_shard_file(key) for key in shard_files_named_in(metadata or b""))
    attempts = {shard.attempt for shard in named if shard is not None}
    if metadata is None or attempts:
        return metadata if attempt in attempts else None
    with suppress(ObjectNotFoundError, CorruptCheckpointError, FormatVersionError):
        facts = decode_facts(store.get(MANIFEST), file=MANIFEST)
        if (facts.attempt, facts.metadata_digest) == (attempt, metadata_digest(metadata)):
            return metadata
    return None


def _attempts_in(store: Store, listed: Sequence[StoredObject]) -> list[str]:
    """The attempts that have shard files or the manifest there: a bucket's listing may show new files late."""
    attempts = [shard.attempt for stored in listed if (shard := parse_shard_file(stored.key)) is not None]
    # A manifest that cannot be read is about to be replaced.
    with suppress(ObjectNotFoundError, CorruptCheckpointError, FormatVersionError):
        attempts.append(decode_facts(store.get(MANIFEST), file=MANIFEST).attempt)
    return attempts
