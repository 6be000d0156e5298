"""Copying a checkpoint to another place, every byte checked on its way.

Decided first (``plan_copy``), then done (``copy_checkpoint``): shard files, then the manifest, then ``.metadata``, so
that the copy is there as a whole or not at all.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from ray_dcp.catalog.committed import is_committed
from ray_dcp.catalog.explain import root_exists
from ray_dcp.errors import ConfigError, CorruptCheckpointError, StoreError
from ray_dcp.format.names import MANIFEST, METADATA, POINTER
from ray_dcp.maintenance.verify.findings import Fault, FilePlan, Unchecked
from ray_dcp.maintenance.verify.inventory import VerifyPlan, plan_verify
from ray_dcp.maintenance.verify.pieces import (
    NUM_READERS,
    READ_NBYTES,
    CheckedPiece,
    FilePiece,
    check_piece,
    every_byte,
    read_ahead,
)
from ray_dcp.maintenance.verify.verification import Tally, inspect_all
from ray_dcp.store.location.place import absolute
from ray_dcp.store.location.urls import join_url, shown_url, split_url
from ray_dcp.store.open import open_store
from ray_dcp.store.store import Store, as_folders, get_or_none, traits_of
from ray_dcp.wording import joined

_MAX_NAMED_FILES = 5


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What to copy, and what is in its way."""

    source: VerifyPlan
    destination: str
    replaced_metadata: bytes | None = None
    """The ``.metadata`` of the checkpoint that is committed there; None where no checkpoint is."""
    replaced_files: Sequence[str] = ()
    """Keys of files there that have the names of files to be copied."""
    is_new_folder: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are copied, ``.metadata`` and the manifest among them."""
        small = len(self.source.metadata) + len(self.source.manifest or b"")
        return self.source.nbytes + small


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was copied."""

    source: str
    """Place of the checkpoint that was copied, with pointers followed."""
    destination: str
    num_files: int
    """Number of files, ``.metadata`` and the manifest among them."""
    nbytes: int
    num_blocks_checked: int
    """Number of runs of bytes under one checksum; each was right."""
    replaced: bool
    """Whether another checkpoint was committed there."""
    seconds: float
    unchecked: Sequence[Unchecked] = ()
    """Items that were copied as they are: nothing says what their bytes should be."""


def plan_copy(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], *, overwrite: bool = False
) -> CopyPlan:
    """Decide what to copy of a committed checkpoint, a pointer followed.

    Raises ``CheckpointNotFoundError`` where there is none, ``CorruptCheckpointError`` where what lists its files
    shows damage already, and ``ConfigError`` where it needs files of another checkpoint, or where something is in the
    way at ``destination`` and ``overwrite`` does not say to replace it.
    """
    plan = plan_verify(source)
    _require_own_files(plan)
    if plan.faults:
        raise _damaged(plan, plan.faults)
    place = absolute(destination, setting="DESTINATION")
    store = open_store(place)
    if store.url.rstrip("/") == plan.store.url.rstrip("/"):
        raise ConfigError("DESTINATION", f"{shown_url(place)} is the checkpoint that is to be copied")
    is_new_folder = not root_exists(store)
    held = {one.key for one in store.list()}
    if POINTER in held:
        raise ConfigError("DESTINATION", f"{shown_url(place)} has a pointer to another place; pass another folder")
    replaced = store.get(METADATA) if is_committed(store) else None
    in_the_way = [file.key for file in plan.files if file.key in held]
    if replaced is not None and not overwrite:
        raise ConfigError("DESTINATION", f"a checkpoint is committed at {shown_url(place)}; --overwrite replaces it")
    if in_the_way and not overwrite:
        raise ConfigError(
            "DESTINATION",
            f"{shown_url(place)} has a file {in_the_way[0]} already, perhaps of a killed copy; --overwrite replaces it",
        )
    return CopyPlan(plan, place, replaced, in_the_way, is_new_folder)


def copy_checkpoint(plan: CopyPlan, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> CopyReport:
    """Copy what ``plan`` says; when this returns, the copy is committed and durable.

    ``on_bytes`` is called with the size of each piece that has been written. Raises ``CorruptCheckpointError`` at the
    first bytes that are not as they were written, ``StoreError`` where a store fails; whatever is raised, files that
    were copied are removed again and nothing new is committed.

    A checkpoint that is replaced stays until the commit, unless files of both have the same names: then it goes first.
    """
    began = time.monotonic()
    source, store = plan.source, open_store(plan.destination)
    tally = Tally()
    written: list[str] = []
    with _cleaned_up(plan, store, written):
        if plan.replaced_files:
            _require_another_place(source, store)
            store.delete(METADATA)
            for key in plan.replaced_files:
                store.delete(key)
        for file in source.files:
            _copy_file(plan, file, store, tally, written, on_bytes)
        if source.manifest is not None:
            written.append(MANIFEST)
            store.put(MANIFEST, source.manifest)
        store.put(METADATA, source.metadata, last_look=lambda: _require_as_planned(plan, store))
    if source.manifest is None:
        store.delete(MANIFEST)  # of the one that was replaced
    on_bytes(len(source.metadata) + len(source.manifest or b""))
    return CopyReport(
        source=source.checkpoint_id,
        destination=plan.destination,
        num_files=len(source.files) + 1 + (source.manifest is not None),
        nbytes=plan.nbytes,
        num_blocks_checked=tally.num_blocks_checked,
        replaced=plan.replaced_metadata is not None,
        seconds=time.monotonic() - began,
        unchecked=tally.unchecked,
    )


def _copy_file(plan: CopyPlan, file: FilePlan, store: Store, tally: Tally, written: list[str],
               on_bytes: Callable[[int], None]) -> None:  # fmt: skip
    """Read ahead, check, and write in order. ``written`` has the file's key as soon as it may be there."""
    source = plan.source
    large = list(inspect_all(source, [file], READ_NBYTES))
    tally.add_inspected(large)
    _require_whole(source, tally)

    def read(piece: FilePiece) -> tuple[CheckedPiece, memoryview]:
        view = memoryview(bytearray(piece.nbytes))
        return check_piece(source.store, piece, view), view

    with store.put_new(file.key) as sink:
        written.append(file.key)  # leaving the block may fail and leave it there
        pieces = every_byte(file, {record.item.begin: record for record in large}, READ_NBYTES)
        with closing(read_ahead(read, pieces, max_ahead=NUM_READERS)) as ended:
            for checked, view in ended:
                tally.add(checked)
                _require_whole(source, tally)
                sink.write(view)
                on_bytes(len(view))
        if sink.tell() != file.nbytes:
            raise StoreError(
                f"{sink.tell()} of {file.nbytes} bytes were copied", url=shown_url(store.url), key=file.key
            )


@contextmanager
def _cleaned_up(plan: CopyPlan, store: Store, written: Sequence[str]) -> Iterator[None]:
    """Put the place back as it was, where the block fails before its commit."""
    manifest = get_or_none(store, MANIFEST)
    try:
        yield
    except BaseException:
        # A put that raised may have got through; then all it needs must stay. Nor is it known if the store is away.
        with suppress(StoreError):
            if get_or_none(store, METADATA) != plan.source.metadata:
                _remove(plan, store, written, manifest)
        raise


def _remove(plan: CopyPlan, store: Store, written: Sequence[str], manifest: bytes | None) -> None:
    for key in reversed(written):
        if key == MANIFEST and manifest is not None:
            store.put(MANIFEST, manifest)
        else:
            store.delete(key)
    folder, name = split_url(store.url)
    if plan.is_new_folder and traits_of(store).folders:
        parent = as_folders(open_store(folder))
        if parent is not None:
            parent.delete_empty_folder(name)


def _require_another_place(source: VerifyPlan, store: Store) -> None:
    """Raise ``ConfigError`` where both places are one, whatever their names: what is to be copied would be deleted."""
    probe = f"ray_dcp_probe_{uuid.uuid4().hex}"
    store.put(probe, b"")
    try:
        is_same = get_or_none(source.store, probe) is not None
    finally:
        store.delete(probe)
    if is_same:
        raise ConfigError("DESTINATION", f"{shown_url(store.url)} is the checkpoint that is to be copied")


def _require_as_planned(plan: CopyPlan, store: Store) -> None:
    found = get_or_none(store, METADATA)
    expected = None if plan.replaced_files else plan.replaced_metadata
    if found != expected:
        raise StoreError("somebody else has saved a checkpoint there meanwhile", url=shown_url(store.url))


def _require_own_files(plan: VerifyPlan) -> None:
    named = [f"{item.fqn} ({item.file})" for file in plan.files for item in file.items if _is_elsewhere(item.file)]
    named += [f"{fault.fqn} ({fault.file})" for fault in plan.faults if _is_elsewhere(fault.file)]
    if named:
        raise ConfigError(
            "CKPT",
            f"{shown_url(plan.checkpoint_id)} needs files of other checkpoints, and a copy would not have them: "
            f"{joined(named, most=_MAX_NAMED_FILES)}. Load it and save it anew instead",
        )


def _is_elsewhere(key: str) -> bool:
    return key.startswith("../")


def _require_whole(source: VerifyPlan, tally: Tally) -> None:
    if tally.faults:
        raise _damaged(source, tally.faults)


def _damaged(plan: VerifyPlan, faults: Sequence[Fault]) -> CorruptCheckpointError:
    first = faults[0]
    file = shown_url(join_url(plan.checkpoint_id, first.file))
    message = f"{first.problem}; nothing was copied"
    return CorruptCheckpointError(
        message, file=file, fqn=first.fqn, offset=first.start, nbytes=max(0, first.end - first.start)
    )
