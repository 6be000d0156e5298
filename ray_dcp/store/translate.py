"""Turns what the operating system and Arrow raise into this package's errors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ray_dcp.errors import (
    NotAFolderError,
    ObjectNotFoundError,
    ObjectTooShortError,
    RayDcpError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from ray_dcp.wording import format_nbytes

_AWS_ERROR = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during")
_CURL_CODE = re.compile(r"curlCode: (\d+)")
_GOOGLE_ERROR = re.compile(r"google::cloud::Status\((\w+):")
_DENIED = {
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "MISSING_AUTHENTICATION_TOKEN",
    "SIGNATURE_DOES_NOT_MATCH",
    "UNRECOGNIZED_CLIENT",
    # Google's words
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
}
_GONE = {"NO_SUCH_KEY", "RESOURCE_NOT_FOUND"}
_PASSING = {
    "INTERNAL_FAILURE",
    "NETWORK_CONNECTION",
    "REQUEST_EXPIRED",
    "REQUEST_TIMEOUT",
    "SERVICE_UNAVAILABLE",
    "SLOW_DOWN",
    "THROTTLING",
    # Google's words
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
}
_PASSING_STATUSES = {408, 429, *range(500, 600)} - {501, 505}
_LASTING_CURL_CODES = {1, 3, 58, 59, 60, 66, 77, 80, 82, 83, 90, 91}
"""Codes of failures that the URL or the certificates cause, and that do not pass by themselves."""
_PASSING_NUMBERS = {
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
}


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
    message = f"cannot {doing}: {reason}{_room(error, url)}{_in_the_way(error, url, key)}"
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(message, url=url, key=key)
    if isinstance(error, NotADirectoryError):
        return NotAFolderError(message, url=url, key=key)
    word, _ = _service_error(reason)
    if isinstance(error, PermissionError) or word in _DENIED:
        return StorePermissionError(message, url=url, key=key)
    if word in _GONE:
        return ObjectNotFoundError(message, url=url, key=key)
    return StoreError(message, url=url, key=key)


def _in_the_way(error: Exception, url: str, key: str) -> str:
    """Says which file lies where a folder should be."""
    if not isinstance(error, NotADirectoryError) or "://" in url:
        return ""
    path = os.path.join(url, key)
    while path != os.path.dirname(path) and not os.path.lexists(path):
        path = os.path.dirname(path)
    return "" if os.path.isdir(path) else f": {path} is a file, give a folder or another place"


def _room(error: Exception, url: str) -> str:
    """Says of a full disk how much was needed, where whoever raised the error has said so, and how much is free."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) or "://" in url:
        return ""
    needed = getattr(error, "needed_nbytes", None)
    told = "" if needed is None else f"{format_nbytes(needed)} needed, "
    folder = url
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        there = os.statvfs(folder)
    except OSError:
        return f" ({told}free room unknown)"
    if there.f_files and not there.f_favail:
        return f" ({told}no inode free: too many files)"
    quota = "; your quota may be less" if error.errno == errno.EDQUOT else ""  # type: ignore[attr-defined]
    return f" ({told}{format_nbytes(there.f_bavail * there.f_frsize)} free{quota})"


def is_transient(error: BaseException) -> bool:
    """Whether what ``error`` tells of may pass by itself: a connection, a time-out, a service that has too much to do.

    Looks at what the ``StoreError`` was raised from. False for one that was retried already.
    """
    if not isinstance(error, StoreError) or isinstance(
        error, StoreUnavailableError | ObjectNotFoundError | StorePermissionError
    ):
        return False
    cause = error.__cause__
    if isinstance(cause, ConnectionError | TimeoutError):
        return True
    if isinstance(cause, OSError) and cause.errno is not None:
        return cause.errno in _PASSING_NUMBERS
    reason = str(cause or "")
    word, status = _service_error(reason)
    curl_code = _CURL_CODE.search(reason)
    if curl_code is not None and int(curl_code[1]) in _LASTING_CURL_CODES:
        return False
    return word in _PASSING or status in _PASSING_STATUSES


def _service_error(reason: str) -> tuple[str, int]:
    """What the service said of itself in Arrow's message: its word for it, and the HTTP status where it has none."""
    amazon = _AWS_ERROR.search(reason)
    if amazon is not None:
        return amazon[1], int(amazon[2] or 0)
    google = _GOOGLE_ERROR.search(reason)
    return (google[1], 0) if google is not None else ("", 0)


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
