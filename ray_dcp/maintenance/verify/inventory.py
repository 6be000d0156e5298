"""What to verify of a checkpoint: its files, what lies where in them, and the damage that their lists show already.

Only small files and listings are read here. Torch is needed only where no manifest says what there is.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.catalog.committed import readings
from ray_dcp.catalog.explain import require_checkpoint
from ray_dcp.catalog.facts import is_safetensors
from ray_dcp.catalog.pointer import resolve_checkpoint_id
from ray_dcp.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StoreError,
    UnsafeDataError,
)
from ray_dcp.format.checksums import Check
from ray_dcp.format.manifest import Entry, Manifest, belongs_to, decode_manifest
from ray_dcp.format.names import (
    MANIFEST,
    METADATA,
    PAYLOAD_ALIGNMENT,
    SAFETENSORS_SUFFIX,
    SHARD_SUFFIX,
    parse_shard_file,
)
from ray_dcp.format.safe_pickle import metadata_rules
from ray_dcp.format.zip_record import MAX_ROW_NBYTES
from ray_dcp.maintenance.verify.findings import Fault, FilePlan, Item
from ray_dcp.store.location.urls import require_key, split_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store

_RANK_OF_FILE = re.compile(r"__(\d+)_\d+(_[0-9a-f]+)?\.distcp")


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What to verify, decided before anything large is read."""

    checkpoint_id: str
    """Place of the checkpoint, with pointers followed."""
    store: Store
    metadata: bytes
    manifest: bytes | None
    """The manifest file's content; None where no manifest belongs to ``metadata``."""
    files: Sequence[FilePlan]
    num_items: int
    """Number of items, those that cannot be looked at among them."""
    faults: Sequence[Fault] = ()
    notes: Sequence[str] = ()
    """What is odd but not a fault."""
    sample: float | None = None
    """The share of blocks to check; None for all."""
    seed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files; how many of them are read depends on the sample."""
        return sum(file.nbytes for file in self.files)


@dataclass(slots=True)
class _Found:
    """What the checkpoint's small files say."""

    metadata: bytes
    manifest_content: bytes | None = None
    manifest: Manifest | None = None
    manifest_missing: bool = False
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_verify(
    checkpoint_id: str | os.PathLike[str], *, sample: float | None = None, seed: int | None = None
) -> VerifyPlan:
    """Decide what to verify of a committed checkpoint, a pointer followed.

    ``sample`` is a share of the blocks, above 0 and below 1, chosen by ``seed``. Raises ``CheckpointNotFoundError``
    saying what is there instead, ``FormatVersionError`` for a newer format; damage is among the plan's faults.
    """
    if sample is not None and not 0 < sample < 1:
        raise ConfigError("sample", f"{sample} is not a share of the blocks: give one above 0 and below 1")
    location = resolve_checkpoint_id(checkpoint_id)
    store = open_store(location)
    try:
        require_checkpoint(store)
    except CheckpointNotFoundError:
        if not is_safetensors(location):
            raise
        return _plan_safetensors(location)
    found = _read_small_files(store)
    items = _manifest_items(found) if found.manifest is not None else _metadata_items(found)
    held = {one.key: one.nbytes for one in store.list()}
    by_file: Mapping[str, list[Item]] = defaultdict(list)
    for item in items:
        by_file[item.file].append(item)
    files = [_plan_file(store, key, of_file, held, found) for key, of_file in sorted(by_file.items())]
    found.notes += [
        f"{key} ({nbytes} bytes) belongs to no item of this checkpoint"
        for key, nbytes in held.items()
        if key.endswith(SHARD_SUFFIX) and key not in by_file
    ]
    return VerifyPlan(
        checkpoint_id=location,
        store=store,
        metadata=found.metadata,
        manifest=found.manifest_content,
        files=[file for file in files if file.items],
        num_items=len(items),
        faults=found.faults,
        notes=found.notes,
        sample=sample,
        seed=random.SystemRandom().randrange(1 << 32) if seed is None and sample is not None else seed or 0,
    )


def _plan_safetensors(location: str) -> VerifyPlan:
    """The plan for a folder of safetensors files, or one file. Only their headers can be wrong: that is a fault."""
    # Torch is needed to say what is in them, as below.
    from ray_dcp.reads.checkpoint import open_checkpoint

    try:
        opened = open_checkpoint(location)
    except CorruptCheckpointError as error:
        folder = open_store(split_url(location)[0] if location.endswith(SAFETENSORS_SUFFIX) else location)
        key = error.file.rpartition("/")[2]
        fault = Fault(key, error.offset, error.offset + error.nbytes, str(error), error.fqn)
        return VerifyPlan(location, folder, b"", None, (), 0, [fault])
    store = open_store(opened.checkpoint_id)
    assert opened.manifest is not None  # it is made from the headers
    entries = decode_manifest(opened.manifest, file=MANIFEST).entries
    by_file: Mapping[str, list[Item]] = defaultdict(list)
    for entry in entries:
        if entry.record_nbytes:
            by_file[entry.file].append(Item(entry.fqn, entry.offsets, None, entry.file, entry.record_offset,
                                            entry.record_nbytes, None, _NO_CHECKSUMS))  # fmt: skip
    held = {one.key: one.nbytes for one in store.list()}
    files = [FilePlan(key, held.get(key, items[-1].end), items) for key, items in sorted(by_file.items())]
    return VerifyPlan(opened.checkpoint_id, store, opened.metadata, None, files, len(entries))


_NO_CHECKSUMS = "it lies in a safetensors file, which has no checksums"


def _read_small_files(store: Store) -> _Found:
    found = _Found(b"")
    for metadata, content in readings(store):
        found = _Found(metadata)
        if content is None:
            found.manifest_missing = True
            return found
        try:
            manifest = decode_manifest(content, file=MANIFEST)
        except CorruptCheckpointError as error:
            found.faults.append(Fault(MANIFEST, 0, len(content), _why(error, MANIFEST)))
            return found
        try:
            belongs = belongs_to(manifest, found.metadata, file=METADATA)
        except CorruptCheckpointError as error:
            found.faults.append(Fault(METADATA, 0, len(found.metadata), _why(error, METADATA)))
            belongs = True
        if belongs:
            found.manifest_content, found.manifest = content, manifest
            found.faults += [] if found.faults else _refused(found.metadata)
            return found
    found.notes.append(f"{MANIFEST} belongs to another save, so {METADATA} and the records' own checksums count")
    return found


def _refused(metadata: bytes) -> list[Fault]:
    """The fault for which a load would refuse ``.metadata`` although it is whole, if there is one."""
    try:
        metadata_rules.require_allowed(metadata)
    except metadata_rules.NotAllowedError as error:
        return [
            Fault(METADATA, 0, len(metadata), f"asks to load {error}, which is not part of a checkpoint's metadata")
        ]
    except Exception as error:  # noqa: BLE001 - a pickle that makes no sense raises anything
        return [Fault(METADATA, 0, len(metadata), f"is not readable metadata: {type(error).__name__} {error}")]
    return []


def _why(error: Exception, file: str) -> str:
    return str(error).removesuffix(f" ({file})")


def _manifest_items(found: _Found) -> list[Item]:
    items = []
    assert found.manifest is not None
    for entry in found.manifest.entries:
        problem = _entry_problem(entry)
        if problem:
            found.faults.append(Fault(MANIFEST, 0, 0, problem, entry.fqn, entry.offsets, entry.rank))
        else:
            items.append(Item(entry.fqn, entry.offsets, entry.rank, entry.file, entry.record_offset,
                              entry.record_nbytes, entry))  # fmt: skip
    return items


def _entry_problem(entry: Entry) -> str:
    record_end, payload_end = entry.record_offset + entry.record_nbytes, entry.payload_offset + entry.payload_nbytes
    if not _is_key(entry.file):
        return f"the manifest names a file {entry.file!r} that cannot be one of its files"
    if min(entry.record_offset, entry.payload_nbytes, entry.record_nbytes - 1) < 0:
        return "the manifest gives its record no place"
    if entry.payload_nbytes and not entry.record_offset <= entry.payload_offset <= payload_end <= record_end:
        return "the manifest places its payload outside of its record"
    if not Check(entry.payload_nbytes, entry.block_crcs).is_complete:
        return f"the manifest has {len(entry.block_crcs)} block checksums for {entry.payload_nbytes} bytes"
    return ""


def _is_key(key: str) -> bool:
    try:
        require_key(key, url="", sibling=True)
    except StoreError:
        return False
    return True


def _metadata_items(found: _Found) -> list[Item]:
    # Only here is torch needed, and it takes seconds to import: the command line starts without it.
    from ray_dcp.format.metadata_file import decode_metadata

    try:
        metadata = decode_metadata(found.metadata, file=METADATA)
    except (CorruptCheckpointError, UnsafeDataError) as error:
        found.faults.append(Fault(METADATA, 0, len(found.metadata), _why(error, METADATA)))
        return []
    items: list[Item] = []
    placed = set()
    for index, info in (metadata.storage_data or {}).items():
        offsets = None if index.offset is None else tuple(index.offset)
        placed.add((index.fqn, offsets))
        item = _metadata_item(str(index.fqn), offsets, info)
        if isinstance(item, Fault):
            found.faults.append(item)
        else:
            items.append(item)
    for fqn, offsets in _chunks(metadata):
        if (fqn, offsets) not in placed:
            found.faults.append(Fault(METADATA, 0, len(found.metadata), "no place is given for it", fqn, offsets))
    if found.manifest_missing and any(parse_shard_file(item.file) for item in items):
        found.faults.append(Fault(MANIFEST, 0, 0, "it is missing; ray_dcp wrote one with these files"))
    return items


def _metadata_item(fqn: str, offsets: tuple[int, ...] | None, info: Any) -> Item | Fault:
    file, start, nbytes = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not isinstance(start, int) or not isinstance(nbytes, int):
        return Fault(METADATA, 0, 0, "no place is given for it", fqn, offsets)
    if not _is_key(file) or start < 0 or nbytes < 1:
        return Fault(METADATA, 0, 0, f"the place given for it is invalid: {nbytes} bytes at {start} of {file!r}",
                     fqn, offsets)  # fmt: skip
    matched = _RANK_OF_FILE.search(file)
    reason = ""
    if getattr(info, "transform_descriptors", None):
        reason = f"it was transformed by {', '.join(map(str, info.transform_descriptors))}"
    elif type(info).__name__ != "_StorageInfo":
        reason = _NO_CHECKSUMS
    return Item(fqn, offsets, int(matched[1]) if matched else None, file, start, nbytes, None, reason)


def _chunks(metadata: Any) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    for fqn, described in metadata.state_dict_metadata.items():
        chunks = getattr(described, "chunks", None)
        if chunks is None:
            yield fqn, None
        else:
            yield from ((fqn, tuple(chunk.offsets)) for chunk in chunks)


def _plan_file(store: Store, key: str, items: list[Item], held: Mapping[str, int], found: _Found) -> FilePlan:
    items = _apart(sorted(items, key=lambda item: (item.start, item.end)), found)
    nbytes = held.get(key)
    last = items[-1].end
    if nbytes is None:
        try:
            store.get(key, 0, 0)
        except ObjectNotFoundError:
            found.faults += [item.fault("its file is missing") for item in items]
            return FilePlan(key, 0, ())
        nbytes = last  # of a sibling checkpoint, or not listed yet; what lacks is seen when it is read
    short = [item for item in items if item.end > nbytes]
    found.faults += [
        item.fault(f"its file ends too early: it has {nbytes} bytes", max(item.begin, min(nbytes, item.end - 1)))
        for item in short
    ]
    if nbytes > last:
        if parse_shard_file(key) is not None:
            found.faults.append(Fault(key, last, nbytes, "bytes behind the last record, which ray_dcp did not write"))
        else:
            found.notes.append(f"{key}: {nbytes - last} bytes behind the last record belong to no item")
    own = not key.startswith("../")
    whole = [item for item in items if item.end <= nbytes]
    return FilePlan(key, nbytes, list(_with_padding(whole, found) if own else whole))


def _apart(items: Iterable[Item], found: _Found) -> list[Item]:
    """``items`` without those that have the same record as another one, and without those that lie across one.

    Records in a row begin at one place; only their bytes say what they share, and how.
    """
    kept: list[Item] = []
    first = 0
    for item in items:
        before = kept[-1] if kept else None
        if before is None or item.start >= before.end:
            first = len(kept)
            kept.append(item)
        elif (item.start, item.end) == (before.start, before.end):
            kept[-1] = dataclasses.replace(before, num_sharing=before.num_sharing + 1)
        elif item.start == before.start and item.nbytes <= MAX_ROW_NBYTES and not item.not_checkable:
            kept[first] = dataclasses.replace(kept[first], num_following=kept[first].num_following + 1)
            kept.append(dataclasses.replace(item, shared_nbytes=before.nbytes, first_nbytes=kept[first].nbytes))
        else:
            found.faults.append(item.fault(f"its record lies across that of {before.fqn}"))
    return kept


def _with_padding(items: Iterable[Item], found: _Found) -> Iterator[Item]:
    """Items with the padding before them. Other bytes between them are noted: as faults if ray_dcp wrote the file."""
    end = 0
    for item in items:
        gap = item.begin - end
        is_ours = parse_shard_file(item.file) is not None
        if is_ours and 0 < gap < PAYLOAD_ALIGNMENT:
            item = dataclasses.replace(item, padding=gap)
        elif is_ours and gap:
            found.faults.append(Fault(item.file, end, item.start, "bytes that belong to no record"))
        elif gap:
            found.notes.append(f"{item.file}: bytes {end} to {item.start} belong to no item")
        end = item.end
        yield item
