"""Writing to an Arrow stream that goes up to a bucket in parts."""

from __future__ import annotations

from typing import Any

from pyarrow import ArrowException

from ray_dcp.progress import PROGRESS_NBYTES, advance
from ray_dcp.store.store import chunk_bytes
from ray_dcp.store.translate import store_errors

_PART_NBYTES = 10 << 20
"""What Arrow uploads as one part; it cannot be set."""


class StreamWriter:
    """Hands bytes to Arrow, which uploads parts in threads of its own while more is written.

    Arrow takes as much as it gets and holds it in memory until it is uploaded. So after so many parts this waits until
    all of them are, which is also where an upload that failed shows first.
    """

    def __init__(self, stream: Any, *, url: str, key: str, max_parallel: int) -> None:
        self._stream = stream
        self._nbytes = 0
        self._unseen = 0
        self._max_unseen = 2 * max_parallel * _PART_NBYTES
        self._url = url
        self._key = key

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        view = chunk_bytes(chunk)
        with store_errors("write", url=self._url, key=self._key, also=(ArrowException, ValueError)):
            # Arrow's write is whole or raises.
            for start in range(0, len(view), PROGRESS_NBYTES):
                piece = view[start : start + PROGRESS_NBYTES]
                self._stream.write(piece)
                self._unseen += len(piece)
                if self._unseen >= self._max_unseen:
                    self._stream.flush()
                    self._unseen = 0
                advance(len(piece))
        self._nbytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._nbytes
