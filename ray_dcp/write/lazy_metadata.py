"""The ``Metadata`` of a committed checkpoint, kept as it is stored until somebody looks into it."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ray_dcp.format.metadata_file import decode_metadata
from ray_dcp.gc_pause import collector_paused


class CommittedMetadata(Metadata):
    """Metadata that is decoded when it is first looked at, and a plain ``Metadata`` from then on.

    Every rank is given the metadata of the whole checkpoint when a save ends, and few look at it.
    """

    def __init__(self, encoded: bytes, file: str) -> None:
        own = object.__getattribute__(self, "__dict__")
        own["_encoded"], own["_file"] = encoded, file

    def __getattribute__(self, name: str) -> Any:
        if name in _LOOKS_INSIDE:
            _decode(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _decode(self)
        setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        _decode(self)
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]  # like Metadata's

    def __repr__(self) -> str:
        _decode(self)
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = object.__getattribute__(self, "__dict__")
        return CommittedMetadata, (own["_encoded"], own["_file"])


_LOOKS_INSIDE = frozenset((*Metadata.__dataclass_fields__, "__dict__"))


def _decode(committed: CommittedMetadata) -> None:
    own = object.__getattribute__(committed, "__dict__")
    if "_encoded" in own:
        with collector_paused():
            metadata = decode_metadata(own["_encoded"], file=own["_file"], digest_checked=True)
        own.clear()
        own.update(metadata.__dict__)
        object.__setattr__(committed, "__class__", Metadata)
