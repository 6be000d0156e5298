"""What lies under a root that no committed checkpoint needs. Nothing is judged or changed here.

Which files a checkpoint refers to is read off the bytes of its ``.metadata``, once its manifest vouches for them: that
needs neither torch nor unpickling.
"""

from __future__ import annotations

import dataclasses
import pickletools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

from ray_dcp.errors import CorruptCheckpointError, FormatVersionError, StoreError
from ray_dcp.format.manifest import belongs_to, decode_facts, decode_manifest, metadata_digest
from ray_dcp.format.names import MANIFEST, METADATA, parse_shard_file, parse_step_folder, shard_files_named_in
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.parallel import for_each_folder
from ray_dcp.store.store import Store, StoredObject, as_folders, get_or_none

_NO_ATTEMPT = ""
_ATTEMPT_IN_METADATA = re.compile(rb"[0-9a-f]{24}")
Reference = tuple[str, str]
"""A folder, and an attempt whose files in it are needed."""


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """One folder as it was found; ``metadata`` is None where nothing is committed in it."""

    name: str
    stored: Sequence[StoredObject]
    temporaries: Sequence[StoredObject]
    metadata: bytes | None = None
    manifest_attempt: str = _NO_ATTEMPT
    """The attempt that the manifest names in a folder without commit; empty where no manifest can be read."""
    references: frozenset[Reference] = frozenset()
    unreadable: str = ""

    @property
    def commit(self) -> str | None:
        return None if self.metadata is None else metadata_digest(self.metadata)


@dataclass(frozen=True, slots=True)
class UnneededFiles:
    """Files that are leftovers together or not at all: those of one attempt, or one temporary file."""

    attempt: str
    files: Sequence[StoredObject]
    reason: str
    replaced_at: float = 0.0
    """The last time when a load may have begun to read them, in seconds since the epoch; 0 where no load can have."""


def list_own_folders(store: Store) -> list[str]:
    """The folders of a root, without links: under their names the files of other folders show."""
    folders = as_folders(store)
    return [name for name in store.list_folders() if folders is None or not folders.is_link(name)]


def look_at(store: Store, names: Sequence[str]) -> list[FoundFolder]:
    """What is in these folders, and what their checkpoints refer to. What cannot be read is said in ``unreadable``."""
    # All listings before any .metadata: a save that commits meanwhile then has its files found, and found needed.
    listed = for_each_folder(names, lambda name: list_folder(store, name))
    return for_each_folder(listed, lambda folder: _with_commit(store, folder))


def list_folder(store: Store, name: str) -> FoundFolder:
    """The files of a folder."""
    try:
        folders = as_folders(store)
        temporaries = folders.list_temporaries(name) if folders is not None else ()
        return FoundFolder(name, store.list(name), temporaries)
    except StoreError as error:
        return FoundFolder(name, (), (), unreadable=str(error))


def _with_commit(store: Store, folder: FoundFolder) -> FoundFolder:
    """``folder`` with what is committed in it, and what that refers to."""
    try:
        metadata = get_or_none(store, f"{folder.name}/{METADATA}")
        manifest = get_or_none(store, f"{folder.name}/{MANIFEST}")
        if metadata is None:
            return dataclasses.replace(folder, manifest_attempt=_attempt_of(manifest))
        named = _named_files(join_url(store.url, folder.name), metadata, manifest)
    except (CorruptCheckpointError, FormatVersionError, StoreError) as error:
        return dataclasses.replace(folder, unreadable=folder.unreadable or str(error))
    return dataclasses.replace(folder, metadata=metadata, references=_references(folder.name, metadata, named))


def _attempt_of(manifest: bytes | None) -> str:
    if manifest is not None:
        with suppress(CorruptCheckpointError, FormatVersionError):
            return decode_facts(manifest, file=MANIFEST).attempt
    return _NO_ATTEMPT


def _named_files(checkpoint_id: str, metadata: bytes, manifest: bytes | None) -> set[str]:
    """The shard files that a committed checkpoint names. Raises where it cannot be told that these are all."""
    file = join_url(checkpoint_id, METADATA)
    named = shard_files_named_in(metadata)
    if manifest is not None:
        manifest_file = join_url(checkpoint_id, MANIFEST)
        if belongs_to(decode_facts(manifest, file=manifest_file), metadata, file):
            # The manifest says the same, and its rows take long to decode.
            return named or {entry.file for entry in decode_manifest(manifest, file=manifest_file).entries}
    _require_whole_pickle(metadata, file)
    return named


def _require_whole_pickle(metadata: bytes, file: str) -> None:
    is_metadata = False
    end = 0
    try:
        for opcode, argument, position in pickletools.genops(metadata):
            is_metadata |= isinstance(argument, str) and argument.rpartition(" ")[2] == "Metadata"
            end = (position or 0) + 1 if opcode.name == "STOP" else 0
    except Exception as error:
        raise CorruptCheckpointError(f"is not readable metadata: {type(error).__name__} {error}", file=file) from error
    if not is_metadata or end != len(metadata):
        raise CorruptCheckpointError("is not readable metadata", file=file)


def _references(folder: str, metadata: bytes, named: AbstractSet[str]) -> frozenset[Reference]:
    """What a checkpoint needs, by attempt and not by file: a name damaged in one place is still found in others."""
    found = {(folder, attempt.decode()) for attempt in _ATTEMPT_IN_METADATA.findall(metadata)}
    for key in named:
        where, _, name = key.removeprefix("../").rpartition("/")
        shard = parse_shard_file(name)
        if shard is not None:
            found.add((where or folder, shard.attempt))
    return frozenset(found)


def find_unneeded(folder: FoundFolder, references: AbstractSet[Reference]) -> Iterator[UnneededFiles]:
    """What no committed checkpoint needs, in the order in which it should go."""
    own = {one.key.removeprefix(f"{folder.name}/"): one for one in folder.stored}
    unneeded: Mapping[str, list[StoredObject]] = defaultdict(list)
    for name, one in own.items():
        shard = parse_shard_file(name)
        if shard is not None and (folder.name, shard.attempt) not in references:
            unneeded[shard.attempt].append(one)
    committed = folder.metadata is not None
    if folder.manifest_attempt and MANIFEST in own:
        # First: a manifest without its shard files would look like a save that lacks nothing but its commit.
        unneeded[folder.manifest_attempt].insert(0, own[MANIFEST])
    replaced_at = 0.0
    if committed:
        # Where no listing says when it was committed: perhaps now.
        replaced_at = (own[METADATA].modified if METADATA in own else 0.0) or float("inf")
    reason = "not part of the checkpoint that is committed here" if committed else "of a save that never committed"
    for attempt, files in unneeded.items():
        yield UnneededFiles(attempt, files, reason, replaced_at)
    for temporary in folder.temporaries:
        yield UnneededFiles(_NO_ATTEMPT, [temporary], "left by a process that died while it wrote it")


def is_left_empty(folder: FoundFolder) -> bool:
    """Whether ``folder`` is a step's folder without anything in it: a save failed before its first file."""
    return bool(parse_step_folder(folder.name) is not None and not folder.stored and not folder.temporaries)
