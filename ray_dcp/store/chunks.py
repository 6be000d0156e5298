"""What a writer accepts, as flat bytes."""

from __future__ import annotations


def chunk_bytes(chunk: bytes | bytearray | memoryview) -> memoryview:
    """``chunk`` as flat bytes, not copied."""
    view = memoryview(chunk)
    # cast() refuses a shape that has a zero in it.
    return view.cast("B") if view.nbytes else memoryview(b"")
