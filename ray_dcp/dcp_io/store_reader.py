"""``StoreReader``: DCP's ``StorageReader`` on a ``Store``."""

from __future__ import annotations

import io
import os
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ray_dcp.dcp_io.box import read_box
from ray_dcp.dcp_io.metadata_file import decode_metadata, decode_python
from ray_dcp.dcp_io.opened import OpenedCheckpoint, open_checkpoint
from ray_dcp.dcp_io.record import verify_blocks
from ray_dcp.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    ObjectTooShortError,
    StoreError,
)
from ray_dcp.layout import BLOCK_NBYTES, MANIFEST, METADATA
from ray_dcp.manifest import Entry, decode_manifest
from ray_dcp.storage.open import open_store
from ray_dcp.storage.store import Store


class NamedBytes(io.BytesIO):
    """A stored Python object on its way to the planner; ``name`` is its file, as opened files have it."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


class StoreReader(StorageReader):
    """Reads any checkpoint of ray_dcp or of torch's file system writers from a path or URL.

    Each value is checked before it counts: by the manifest's block checksums, or by the records' own zip CRCs
    where torch wrote them. Also usable with ``torch.distributed.checkpoint.load``.
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str] | None = None, *, trusted: bool = False) -> None:
        super().__init__()
        self.checkpoint_id = os.fspath(checkpoint_id) if checkpoint_id is not None else ""
        self.trusted = trusted
        self.nbytes_read = 0
        self.nbytes_loaded = 0
        self._opened: OpenedCheckpoint | None = None
        self._store: Store | None = None
        self._storage_data: Mapping[Any, _StorageInfo] = {}
        self._entries: dict[tuple[str, int], Entry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
        self._opened = None

    def adopt(self, opened: OpenedCheckpoint) -> None:
        """Read what the coordinator has opened, instead of looking again."""
        self._opened = opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise CheckpointNotFoundError(self.checkpoint_id, "per-rank metadata is not supported")
        if self._opened is None:
            self._opened = open_checkpoint(self.checkpoint_id)
        metadata = decode_metadata(
            self._opened.metadata,
            file=self._file(METADATA),
            trusted=self.trusted,
            digest_checked=self._opened.manifest is not None,
        )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        assert self._opened is not None, "read_metadata comes first"
        if metadata.storage_data is None:
            raise CorruptCheckpointError("does not say where its items lie", file=self._file(METADATA))
        self._store = open_store(self._opened.checkpoint_id)
        self._storage_data = metadata.storage_data
        self._entries = {}
        if self._opened.manifest is not None:
            manifest = decode_manifest(self._opened.manifest, file=self._file(MANIFEST))
            self._entries = {(entry.file, entry.record_offset): entry for entry in manifest.entries}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and hand it its Python objects; file after file, in file order."""
        by_record: dict[tuple[str, int], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            info = self._info(item)
            by_record[info.relative_path, info.offset].append(item)
        for place in sorted(by_record):
            self._read_record(place, by_record[place], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            open_store(checkpoint_id)
        except StoreError:
            return False
        return True

    def _info(self, item: ReadItem) -> _StorageInfo:
        info = self._storage_data.get(item.storage_index)
        # Damage may leave one without all its parts; a user's own writer may have put something else.
        if not isinstance(info, _StorageInfo) or not {"relative_path", "offset", "length"} <= vars(info).keys():
            raise CorruptCheckpointError(
                f"names no place for the chunk at {item.storage_index.offset}",
                file=self._file(METADATA),
                fqn=item.storage_index.fqn,
            )
        return info

    def _read_record(self, place: tuple[str, int], items: list[ReadItem], planner: LoadPlanner) -> None:
        entry = self._entries.get(place)
        if items[0].type == LoadItemType.BYTE_IO:
            content = self._python_record(items[0], entry)
            for item in items:
                planner.load_bytes(item, NamedBytes(content, self._file(place[0])))
        elif entry is not None:
            for item in items:
                target = _target(planner, item)
                self.nbytes_read += read_box(self._get_verified, entry, item, target, file=self._file(place[0]))
                self._count_loaded(planner, item, target)
        else:
            whole = self._torch_tensor(items[0])
            for item in items:
                target = _target(planner, item)
                target.copy_(narrow_tensor_by_index(whole, item.storage_offsets, item.lengths))
                self._count_loaded(planner, item, target)

    def _count_loaded(self, planner: LoadPlanner, item: ReadItem, target: torch.Tensor) -> None:
        planner.commit_tensor(item, target)
        self.nbytes_loaded += target.nbytes

    def _get_verified(self, entry: Entry, start: int, nbytes: int, first_block: int) -> bytes:
        """Payload bytes from a block's start on, each block checked."""
        content = self._get(entry.file, entry.payload_offset + start, nbytes, entry.fqn)
        last_block = first_block + -(-nbytes // BLOCK_NBYTES)
        verify_blocks(
            memoryview(content),
            entry.block_crcs[first_block:last_block],
            file=self._file(entry.file),
            fqn=entry.fqn,
            offset=entry.payload_offset + start,
        )
        return content

    def _python_record(self, item: ReadItem, entry: Entry | None) -> bytes:
        info = self._info(item)
        if entry is not None:
            content = self._get_verified(entry, 0, entry.payload_nbytes, 0)
        else:
            content = self._transformed(
                item, self._get(info.relative_path, info.offset, info.length, item.dest_index.fqn)
            )
            self._verify_zip(content, item)
        self.nbytes_read += len(content)
        self.nbytes_loaded += len(content)
        return content

    def _torch_tensor(self, item: ReadItem) -> torch.Tensor:
        """The whole stored chunk of a record that has no manifest entry, by its own zip CRCs."""
        info = self._info(item)
        fqn = item.storage_index.fqn
        content = self._transformed(item, self._get(info.relative_path, info.offset, info.length, fqn))
        self.nbytes_read += len(content)
        self._verify_zip(content, item)
        loaded = decode_python(io.BytesIO(content), file=self._file(info.relative_path), fqn=fqn, trusted=False)
        if not isinstance(loaded, torch.Tensor):
            raise CorruptCheckpointError(
                f"holds a {type(loaded).__name__} instead of a tensor", file=self._file(info.relative_path), fqn=fqn
            )
        return loaded

    def _verify_zip(self, content: bytes, item: ReadItem) -> None:
        """Raise when a zip entry fails its CRC.

        Old pickles that are no zip file have none to check, nor has what torch wrote with its checksums turned off
        (``torch.serialization.set_crc32_options(False)``): it then puts 0 for all of them.
        """
        info = self._info(item)
        try:
            if not zipfile.is_zipfile(io.BytesIO(content)):
                return
            with zipfile.ZipFile(io.BytesIO(content)) as record:
                has_checksums = any(stored.CRC for stored in record.infolist())
                damaged = record.testzip() if has_checksums else None
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError) as error:
            damaged = str(error) or type(error).__name__
        if damaged:
            raise CorruptCheckpointError(
                f"stored bytes fail their checksum ({damaged})",
                file=self._file(info.relative_path),
                fqn=item.storage_index.fqn,
                offset=info.offset,
                nbytes=info.length,
            )

    def _transformed(self, item: ReadItem, content: bytes) -> bytes:
        """``content`` as it was before the writer's stream transforms (torch's ``_extensions``), if any."""
        descriptors = self._info(item).transform_descriptors
        if not descriptors:
            return content
        stream: Any = io.BytesIO(content)
        for extension in ExtensionRegistry().from_descriptor_list(descriptors):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        return bytes(stream.read())

    def _get(self, key: str, offset: int, nbytes: int, fqn: str) -> bytes:
        assert self._store is not None
        try:
            return self._store.get(key, offset, nbytes)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(
                "its file is missing", file=self._file(key), fqn=fqn, offset=offset, nbytes=nbytes
            ) from error
        except ObjectTooShortError as error:
            raise CorruptCheckpointError(
                "its file ends too early", file=self._file(key), fqn=fqn, offset=offset, nbytes=nbytes
            ) from error

    def _file(self, key: str) -> str:
        location = self._opened.checkpoint_id if self._opened is not None else self.checkpoint_id
        return f"{location.rstrip('/')}/{key}"


def _target(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise CorruptCheckpointError(
            f"the planner gives a tensor of shape {tuple(target.shape)} for a read of {tuple(item.lengths)}",
            file="",
            fqn=item.dest_index.fqn,
        )
    return target
