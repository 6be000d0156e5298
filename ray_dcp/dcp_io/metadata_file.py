"""Reading ``.metadata`` and stored Python objects without running what they say.

Torch reads ``.metadata`` with a plain ``pickle.load``, which runs any code that the file names. Here only DCP's own
metadata classes, ``torch.Size``, dtypes and plain containers are let in.
"""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.errors import CorruptCheckpointError, UnsafeDataError

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.hf_storage": {"_HFStorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "complex", "bytearray", "slice", "range"},
    # StorageMeta.checkpoint_id is a Path where the caller passed one.
    "pathlib": {"PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            if name in ("WindowsPath", "PureWindowsPath"):
                return str  # a Windows path cannot be made elsewhere; only its text matters
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _NotAllowedError(f"{module}.{name}")


class _NotAllowedError(Exception):
    pass


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as torch stores it."""
    return pickle.dumps(metadata)


def decode_metadata(content: bytes, *, file: str) -> Metadata:
    """The ``Metadata`` in ``content``; ``file`` is where it came from, for messages.

    Raises ``UnsafeDataError`` when it names anything but metadata classes, ``CorruptCheckpointError`` when it is
    no metadata at all. Nothing it names is run.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except _NotAllowedError as error:
        raise UnsafeDataError(
            f"asks to load {error}, which is no part of a checkpoint's metadata; it was not loaded", file=file
        ) from None
    except Exception as error:
        raise CorruptCheckpointError(f"is no readable metadata: {error}", file=file) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CorruptCheckpointError(f"holds a {type(metadata).__name__} instead of metadata", file=file)
    return metadata


def decode_python(content: io.BytesIO, *, file: str, fqn: str, trusted: bool) -> Any:
    """The Python object that ``torch.save`` put into ``content``.

    With ``trusted`` anything is loaded, running what it says. Without it only tensors, plain containers, numpy
    arrays and what the user allowed by ``torch.serialization.add_safe_globals``; else ``UnsafeDataError``.
    """
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(content, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise CorruptCheckpointError(f"cannot be unpickled: {error}", file=file, fqn=fqn) from error
        raise UnsafeDataError(
            "holds a Python object outside the allow-list, and loading it could run code: "
            f"{_first_line(error)}. Allow its class with torch.serialization.add_safe_globals, "
            "or pass trusted=True if you trust whoever wrote this checkpoint",
            file=file,
            fqn=fqn,
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CorruptCheckpointError(f"cannot be read: {_first_line(error)}", file=file, fqn=fqn) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "global" in line]
    return (named or lines or [type(error).__name__])[0]


def _numpy_globals() -> list[Any]:
    """What numpy arrays and scalars of plain dtypes pickle as: random states hold them."""
    dtypes = [type(np.dtype(kind)) for kind in "?bhilqBHILQefdgFDG"]
    multiarray = importlib.import_module("numpy._core.multiarray")
    return [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, *dtypes]
