"""Paths and URLs as text: which scheme, what lies below, what may be shown."""

from __future__ import annotations

import os
import re

from ray_dcp.errors import ConfigError, UnknownSchemeError, without_keys

SCHEMES = ("file", "gs", "memory", "s3")
"""Those that are built in."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)")
_SCHEME_NAME = re.compile(r"[a-z][a-z0-9+.-]*")
_added: set[str] = set()


def url_scheme(url: str) -> str | None:
    """The scheme of a URL, built in or added; None for a path. Raises ``UnknownSchemeError`` for others."""
    match = _SCHEME.match(url)
    if match is None:
        return None
    scheme, slashes = match[1], match[2]
    if scheme.lower() not in SCHEMES and scheme.lower() not in _added:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, *sorted(_added)))
        raise UnknownSchemeError(
            f"unknown scheme {scheme}:{slashes[:2]}; known are {known}, and paths without a scheme "
            "(a folder with such a name is written ./name)",
            url=shown_url(url),
        )
    if slashes == "/":
        # pathlib makes s3:/bucket of s3://bucket.
        raise UnknownSchemeError(f"a URL starts with {scheme}://; pass it as str, not as a pathlib.Path", url=url)
    return scheme.lower()


def add_scheme(scheme: str) -> None:
    """Know ``scheme`` from now on, in this process. Raises ``ConfigError`` for a built-in one and for what is none."""
    if scheme in SCHEMES or not _SCHEME_NAME.fullmatch(scheme):
        raise ConfigError("scheme", f"{scheme!r} is built in, or no scheme: use lower-case letters and digits")
    _added.add(scheme)


def join_url(url: str | os.PathLike[str], *names: str) -> str:
    """The path or URL of what lies below ``url``; query parameters stay at the end."""
    text = os.fsdecode(url)
    head, mark, query = text.partition("?") if url_scheme(text) in ("s3", "gs") else (text, "", "")
    head = head if head.endswith("://") else head.rstrip("/") + "/"
    return head + "/".join(names) + mark + query


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """What ``join_url`` has joined: where the last folder lies, and its name.

    Above a whole bucket lies ``s3://``, which no store opens.
    """
    text = os.fsdecode(url)
    head, mark, query = text.partition("?") if url_scheme(text) in ("s3", "gs") else (text, "", "")
    parent, slash, name = head.rstrip("/").rpartition("/")
    if parent.endswith(":/"):
        parent += slash
    elif not parent:
        parent = "/" if head.startswith("/") else "."
    return parent + mark + query, name


def shown_url(url: str) -> str:
    """``url`` without the keys that a bucket's URL may have."""
    return without_keys(url)
