"""Files of ``torch.save``, read one tensor at a time.

The pickle is loaded onto the meta device, which tells where each storage lies; then byte ranges are read from the
store, whichever it is.
"""

from __future__ import annotations

import bisect
import copy
import io
import math
import mmap
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from ray_dcp.errors import CorruptCheckpointError, ObjectTooShortError, StateDictError
from ray_dcp.format.checksums import Check, RunningCheck
from ray_dcp.format.metadata_file import decode_python
from ray_dcp.planning.values.containers import Containers, containers_of
from ray_dcp.planning.values.flat import LEAVES, flat_state, unstorable_names
from ray_dcp.store.location.urls import join_url
from ray_dcp.store.reading import get_into
from ray_dcp.store.store import Store
from ray_dcp.torch_private import neg_view
from ray_dcp.wording import first_line_of

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_MIN_MAPPED_NBYTES = 1 << 20
_CHECKED_AT_ONCE_NBYTES = 4 << 20


def is_torch_file(store: Store, key: str) -> bool:
    """Whether a file of ``torch.save`` is there. Raises ``ObjectNotFoundError`` where there is no file.

    Raises ``CorruptCheckpointError`` for one that torch before 1.6 wrote, which can only be read whole.
    """
    try:
        head = store.get(key, 0, len(_ZIP))
    except ObjectTooShortError:
        return False
    if head[:1] == _PICKLE and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CorruptCheckpointError(
            "not a zip file but a pickle, as torch before 1.6 wrote: load it and torch.save it again",
            file=join_url(store.url, key),
        )
    return head == _ZIP


class StoredFile(io.RawIOBase):
    """An object of a store as a file to read from anywhere."""

    def __init__(self, store: Store, key: str, nbytes: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = min(len(view), max(0, self._nbytes - self._at))
        view[:nbytes] = self._store.get(self._key, self._at, nbytes)
        self._at += nbytes
        return nbytes


class TorchFile:
    """The state dict in a file of ``torch.save``, flattened as DCP does it; nothing that the file says is run."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._where = join_url(store.url, key)
        self._nbytes = next((one.nbytes for one in store.list() if one.key == key), 0)
        with self._corrupt_unless_whole(), zipfile.ZipFile(self._open()) as archive:
            self._records = sorted(archive.infolist(), key=lambda record: record.header_offset)
            self._has_checksums = any(record.CRC for record in self._records)
            self._require_byte_order(archive)
        try:
            state = decode_python(self._open(), file=self._where, fqn="", trusted=False, map_location="meta")
        except StateDictError as error:
            raise StateDictError(f"{self._where}: {error}") from error
        if not isinstance(state, Mapping):
            raise StateDictError(f"{self._where} holds a {type(state).__name__}; only a dict of names can be converted")
        try:
            leaves, paths = flat_state(state)
            self.containers: Containers = containers_of(state)
        except StateDictError as error:
            raise StateDictError(f"{self._where}: {first_line_of(error)}", error.problems) from error
        except RecursionError as error:
            raise StateDictError(f"{self._where}: it contains itself, or is nested too deep") from error
        self.leaves: dict[str, Any] = leaves
        """The values by name: tensors without their content, and Python values whose tensors have none."""
        self.paths: dict[str, tuple[str | int, ...]] = paths
        problems = unstorable_names(leaves)
        problems += [f"{name}: {problem}" for name, leaf in leaves.items() for problem in _problems(leaf)]
        if problems:
            raise StateDictError(f"{self._where} holds values that cannot be converted", problems)

    def read_tensor(self, name: str) -> torch.Tensor:
        return self._with_values(self.leaves[name], name)

    def read_python(self, name: str) -> Any:
        return self._filled(self.leaves[name], name)

    def _filled(self, value: Any, name: str) -> Any:
        """``value``, or a copy of it with the tensors in it read, whatever holds them."""
        found = _TensorsIn(value).tensors
        if not found:
            return value
        # A copy looks up what has been copied already: there it finds each tensor with its values.
        return copy.deepcopy(value, {id(tensor): self._like(tensor, name) for tensor in found})

    def _like(self, empty: torch.Tensor, name: str) -> torch.Tensor:
        read = self._with_values(empty, name)
        if isinstance(empty, torch.nn.Parameter):
            return torch.nn.Parameter(read, empty.requires_grad)
        return read.requires_grad_(empty.requires_grad)

    def _with_values(self, empty: torch.Tensor, name: str) -> torch.Tensor:
        itemsize, storage = empty.dtype.itemsize, empty.untyped_storage()
        if not empty.numel():
            return empty_tensor(empty.shape, empty.dtype)
        steps = zip(empty.shape, empty.stride(), strict=True)
        numel = sum((size - 1) * stride for size, stride in steps) + 1
        start, nbytes = int(empty.storage_offset()) * itemsize, numel * itemsize
        if start + nbytes > storage.nbytes():
            raise CorruptCheckpointError("reaches past the end of its storage", file=self._where, fqn=name)
        offset: Any = storage._checkpoint_offset
        held = self._read(offset, storage.nbytes(), start, nbytes, name)
        stored = held.view(empty.dtype).as_strided(empty.shape, empty.stride())
        stored = stored.conj() if empty.is_conj() else stored
        stored = neg_view(stored) if empty.is_neg() else stored
        is_plain = stored.is_contiguous() and not (stored.is_conj() or stored.is_neg())
        return stored if is_plain else empty_tensor(empty.shape, empty.dtype).copy_(stored)

    def _read(self, offset: int, storage_nbytes: int, start: int, nbytes: int, name: str) -> torch.Tensor:
        """Read ``nbytes`` from ``start`` of the storage at ``offset``; checked where that is all of it."""
        record = self._records[bisect.bisect(self._records, offset, key=lambda one: one.header_offset) - 1]
        if record.compress_type != zipfile.ZIP_STORED or record.file_size < storage_nbytes:
            raise CorruptCheckpointError(
                f"its storage has {storage_nbytes} bytes, of which {record.file_size} are there",
                file=self._where,
                fqn=name,
            )
        held = empty_tensor((nbytes,), torch.uint8)
        view, damage = memoryview(cast(Any, held.numpy())), None
        is_all = self._has_checksums and nbytes == record.file_size
        check = RunningCheck(Check.of_whole(nbytes, record.CRC) if is_all else Check(nbytes, None))
        for at in range(0, nbytes, _CHECKED_AT_ONCE_NBYTES):
            piece = view[at : at + _CHECKED_AT_ONCE_NBYTES]
            try:
                get_into(self._store, self._key, offset + start + at, [piece])
            except ObjectTooShortError as error:
                raise CorruptCheckpointError("its file ends too early", file=self._where, fqn=name) from error
            damage = check.damage(piece, at)
        if damage is not None:
            raise CorruptCheckpointError(
                "stored bytes fail their checksum", file=self._where, fqn=name, offset=offset, nbytes=nbytes
            )
        return held

    def _open(self) -> io.BufferedReader:
        return io.BufferedReader(StoredFile(self._store, self._key, self._nbytes), 1 << 20)

    def _require_byte_order(self, archive: zipfile.ZipFile) -> None:
        for record in self._records:
            if record.filename.endswith("/byteorder") and archive.read(record) != sys.byteorder.encode():
                raise CorruptCheckpointError("was written in another byte order than this machine's", file=self._where)

    @contextmanager
    def _corrupt_unless_whole(self) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
            # The last is what ``zipfile`` raises for a compression that it does not know.
            raise CorruptCheckpointError(f"not a readable zip file: {error}", file=self._where) from error


class _TensorsIn(pickle.Pickler):
    """Finds the tensors in a value by pickling it, since a pickler is shown every object."""

    def __init__(self, value: Any) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.has_storages = False
        self.dump(value)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return str, ()
        if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            self.has_storages = True
            return str, ()
        return NotImplemented


def _problems(leaf: Any) -> Iterator[str]:
    if isinstance(leaf, torch.Tensor):
        problem = _problem(leaf)
        if problem:
            yield problem
    elif type(leaf) not in LEAVES:
        found = _TensorsIn(leaf)
        yield from (f"in a {type(leaf).__name__}, {problem}" for one in found.tensors if (problem := _problem(one)))
        if found.has_storages:
            yield f"in a {type(leaf).__name__}, a storage without its tensor"


def _problem(tensor: torch.Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout} has no rectangular values"
    if tensor.is_quantized:
        return "a quantized tensor"
    if getattr(tensor.untyped_storage(), "_checkpoint_offset", None) is None:
        return "a meta tensor has no values"
    return None


def empty_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU tensor in a storage of its own; what its values are is not defined.

    Torch's own come from malloc, and glibc keeps many of those up to 32 MiB that are made and dropped one by one: an
    aligned allocation does not fit into the gap that the one before has left.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _MIN_MAPPED_NBYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(dtype).view(tuple(shape))
