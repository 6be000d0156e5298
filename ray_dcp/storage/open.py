"""From a path or URL to the store it names."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from ray_dcp.errors import ConfigError, UnknownSchemeError
from ray_dcp.storage.failures import store_errors
from ray_dcp.storage.local import LocalStore
from ray_dcp.storage.store import Store

SCHEMES = ("file", "gs", "memory", "s3")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)")


def open_store(url: str | os.PathLike[str]) -> Store:
    """Open the folder or bucket prefix at ``url``: a path, ``file://``, ``memory://``, ``s3://``, ``gs://``.

    It need not exist yet. Raises ``UnknownSchemeError`` for any other scheme: to take such a URL for a
    path would write to a local folder of that name.
    """
    text = os.fsdecode(url)
    scheme = url_scheme(text)
    if scheme is None:
        if not text:
            raise ConfigError("url", "is empty; give a folder or a URL")
        return LocalStore(text)
    if scheme == "file":
        return LocalStore(_file_path(text))
    if scheme == "memory":
        from ray_dcp.storage.memory import MemoryStore

        return MemoryStore(text)
    return _open_bucket(text)


def url_scheme(url: str) -> str | None:
    """The scheme of a URL, one of ``SCHEMES``; None for a path. Raises ``UnknownSchemeError`` for others."""
    match = _SCHEME.match(url)
    if match is None:
        return None
    scheme, slashes = match[1].lower(), match[2]
    known = ", ".join(f"{name}://" for name in SCHEMES)
    if scheme not in SCHEMES:
        raise UnknownSchemeError(
            f"unknown scheme {match[1]}:{slashes}; known are {known}, and paths without a scheme "
            "(a folder with such a name is written ./name)",
            url=url,
        )
    if slashes == "/":
        # pathlib makes s3:/bucket of s3://bucket.
        raise UnknownSchemeError(f"a URL starts with {scheme}://; pass it as str, not as a pathlib.Path", url=url)
    return scheme


def join_url(url: str, *names: str) -> str:
    """The URL of what lies below ``url``; query parameters stay at the end."""
    head, mark, query = url.partition("?") if url_scheme(url) in ("s3", "gs") else (url, "", "")
    return "/".join([head.rstrip("/"), *names]) + mark + query


def _file_path(url: str) -> str:
    parts = urlsplit(url, allow_fragments=False)
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        raise ConfigError("url", f"a file URL is file:///folder, this one names no local folder: {url}")
    return unquote(url[len("file://") + len(parts.netloc) :])


def _open_bucket(url: str) -> Store:
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    from ray_dcp.storage.arrow import ArrowStore

    if not urlsplit(url).hostname:
        raise ConfigError("url", f"names no bucket: {url}")
    try:
        with store_errors("open", url=url):
            filesystem, base = FileSystem.from_uri(url)
    except ArrowInvalid as error:
        raise ConfigError("url", str(error)) from error
    return ArrowStore(filesystem, base, url=url)
