"""From what the operating system and Arrow raise to this package's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray_dcp.errors import (
    NotAFolderError,
    ObjectNotFoundError,
    ObjectTooShortError,
    RayDcpError,
    StoreError,
    StorePermissionError,
)


@contextmanager
def store_errors(doing: str, *, url: str, key: str = "", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn ``OSError`` (and ``also``) of the block into the matching ``StoreError``, with the cause chained.

    ``doing`` finishes the sentence "cannot ...". Errors of this package pass unchanged.
    """
    foreign: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except RayDcpError:
        raise
    except foreign as error:
        raise as_store_error(error, doing, url=url, key=key) from error


def as_store_error(error: Exception, doing: str, *, url: str, key: str) -> StoreError:
    """The ``StoreError`` that says what ``error`` says; the caller raises it ``from`` that error."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    message = f"cannot {doing}: {reason}"
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(message, url=url, key=key)
    if isinstance(error, NotADirectoryError):
        return NotAFolderError(message, url=url, key=key)
    if isinstance(error, PermissionError) or "ACCESS_DENIED" in reason:
        return StorePermissionError(message, url=url, key=key)
    return StoreError(message, url=url, key=key)


def require_range(*, url: str, key: str, held: int, offset: int, nbytes: int | None) -> int:
    """How many bytes to read from ``offset`` of an object of ``held`` bytes.

    Raises ``ObjectTooShortError`` where it ends before.
    """
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise StoreError(f"not a byte range: offset {offset}, nbytes {nbytes}", url=url, key=key)
    if offset + (nbytes or 0) > held:
        end = offset + (nbytes or 0)
        raise ObjectTooShortError(
            f"the object ends too early: it has {held} bytes, bytes {offset} to {end} were asked for, "
            f"{end - held} are missing",
            url=url,
            key=key,
        )
    return held - offset if nbytes is None else nbytes
