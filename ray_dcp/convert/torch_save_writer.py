"""Files of ``torch.save``, written one tensor at a time.

The pickle comes first in such a file, and names storages; here they are made only when their bytes are due.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

import torch
import torch.utils.serialization
from torch.serialization import DEFAULT_PROTOCOL

from ray_dcp.format.names import PAYLOAD_ALIGNMENT
from ray_dcp.store.store import ObjectWriter
from ray_dcp.torch_private import open_zipfile_writer


class LazyTensor:
    """Stands in a state dict for a contiguous CPU tensor; ``read`` makes it when its bytes are due."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], torch.Tensor]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.read = read

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduces as a tensor without elements does, with this one's storage, shape and strides."""
        rebuild, (storage, offset, _, _, *rest) = torch.empty(0, dtype=self.dtype).__reduce_ex__(DEFAULT_PROTOCOL)
        strides = torch.empty(self.shape, dtype=self.dtype, device="meta").stride()
        return rebuild, (_LazyStorage(self, storage), offset, self.shape, strides, *rest)


class _LazyStorage:
    def __init__(self, tensor: LazyTensor, like: Any) -> None:
        numel = torch.Size(tensor.shape).numel()
        self.read = tensor.read
        if isinstance(like, torch.storage.TypedStorage):
            self.kind, self.length = getattr(torch, like._pickle_storage_type()), numel
        else:
            self.kind, self.length = torch.UntypedStorage, numel * tensor.dtype.itemsize


class _StatePickler(pickle.Pickler):
    """Names storages as ``torch.save`` does, and remembers what fills each."""

    def __init__(self, buffer: IO[bytes]) -> None:
        super().__init__(buffer, protocol=DEFAULT_PROTOCOL)
        self.fill: list[Callable[[], torch.UntypedStorage]] = []
        self._keys: dict[int, str] = {}
        self._kept: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _LazyStorage):
            return "storage", obj.kind, self._key(lambda: obj.read().untyped_storage()), "cpu", obj.length
        if isinstance(obj, torch.storage.TypedStorage):
            kind, numel, storage = getattr(torch, obj._pickle_storage_type()), obj._size(), obj._untyped_storage
        elif isinstance(obj, torch.UntypedStorage):
            kind, numel, storage = torch.UntypedStorage, obj.nbytes(), obj
        else:
            return None
        if storage._cdata not in self._keys:  # several tensors of a Python value may share one
            self._kept.append(storage)
            self._keys[storage._cdata] = self._key(lambda: storage)
        return "storage", kind, self._keys[storage._cdata], "cpu", numel

    def _key(self, fill: Callable[[], torch.UntypedStorage]) -> str:
        self.fill.append(fill)
        return str(len(self.fill) - 1)


class _Sink:
    """What torch's zip writer needs of a file, on an ``ObjectWriter``. Once a write has failed, nothing is written."""

    def __init__(self, sink: ObjectWriter) -> None:
        self._sink = sink
        self._failed = False

    def write(self, chunk: Any) -> int:
        view = memoryview(chunk)
        if self._failed:
            return view.nbytes
        try:
            return self._sink.write(view)
        except BaseException:
            self._failed = True
            raise

    def flush(self) -> None:
        """Nothing is held back here."""


def write_torch_file(sink: ObjectWriter, state: Mapping[str, Any]) -> None:
    """Write ``state`` as ``torch.save`` would; one of its tensors (``LazyTensor``s) at a time is in memory."""
    buffer = io.BytesIO()
    pickler = _StatePickler(buffer)
    pickler.dump(state)
    settings = {"save.compute_crc32": True, "save.storage_alignment": PAYLOAD_ALIGNMENT}
    with (
        torch.utils.serialization.config.patch(settings),  # type: ignore[attr-defined]  # put there on import
        open_zipfile_writer(cast(IO[bytes], _Sink(sink))) as archive,
    ):
        _write_text(archive, "data.pkl", buffer.getvalue())
        _write_text(archive, ".format_version", b"1")
        _write_text(archive, ".storage_alignment", str(PAYLOAD_ALIGNMENT).encode())
        _write_text(archive, "byteorder", sys.byteorder.encode())
        for number, fill in enumerate(pickler.fill):
            storage = fill()
            archive.write_record(f"data/{number}", storage, storage.nbytes())
            del storage


def _write_text(archive: Any, name: str, content: bytes) -> None:
    archive.write_record(name, content, len(content))
