"""Paths, URLs and keys as text: which scheme, what lies below, what may be shown, what a key may look like."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ray_dcp.errors import ConfigError, StoreError, UnknownSchemeError, without_keys

SCHEMES = ("file", "gs", "memory", "s3")
"""The schemes that are built in."""
BUCKETS = ("gs", "s3")
"""The schemes whose URLs may have keys in front of the bucket and parameters behind a question mark."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)")
_SCHEME_NAME = re.compile(r"[a-z][a-z0-9+.-]*")
_WITHOUT_SLASHES = re.compile(rf"({'|'.join(SCHEMES)}):", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_added: set[str] = set()


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """The parts of a bucket's URL, as they are written: nothing in a key is an escape, ``%20`` least of all."""

    scheme: str
    keys: str
    """``user:secret``, quoted; mostly empty."""
    bucket: str
    prefix: str
    """What follows the bucket, without slashes at its ends."""
    query: str

    @classmethod
    def parse(cls, url: str) -> BucketUrl:
        """The parts of ``url``.

        Raises ``ConfigError`` where it names no bucket, or a place in it that not every tool would find.
        """
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        authority, _, prefix = place.partition("/")
        keys, _, bucket = authority.rpartition("@")
        if not bucket or set(": \t") & set(bucket):
            raise ConfigError(
                "url",
                f"names no bucket: {without_keys(url)} (keys with a / in them are quoted: S3Options.url does)",
            )
        if _CONTROL.search(place):
            raise ConfigError("url", f"has a line break or another control character in it: {without_keys(url)!r}")
        prefix = prefix.strip("/")
        if prefix and any(name in ("", ".", "..") for name in prefix.split("/")):
            raise ConfigError("url", f"has an empty name, . or .. in it: {without_keys(url)}")
        return cls(scheme.lower(), keys, bucket, prefix, query)

    def __str__(self) -> str:
        keys, query = self.keys and f"{self.keys}@", self.query and f"?{self.query}"
        return f"{self.scheme}://{keys}{self.path}{query}"

    @property
    def path(self) -> str:
        """Bucket and prefix, joined by a slash."""
        return f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket


def url_scheme(url: str) -> str | None:
    """The scheme of a URL, built in or added; None for a path. Raises ``UnknownSchemeError`` for others."""
    match = _SCHEME.match(url)
    if match is None:
        if bare := _WITHOUT_SLASHES.match(url):
            raise UnknownSchemeError(f"a URL starts with {bare[1]}://; a folder is written ./{url}", url=shown_url(url))
        return None
    scheme, slashes = match[1], match[2]
    if scheme.lower() not in SCHEMES and scheme.lower() not in _added:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, *sorted(_added)))
        raise UnknownSchemeError(
            f"Cannot detect the storage: unknown scheme {scheme}:{slashes[:2]}; known are {known}, and paths without a "
            "scheme (a folder with such a name is written ./name)",
            url=shown_url(url),
        )
    if slashes == "/":
        # pathlib makes s3:/bucket of s3://bucket.
        raise UnknownSchemeError(f"a URL starts with {scheme}://; pass it as str, not as a pathlib.Path", url=url)
    return scheme.lower()


def add_scheme(scheme: str) -> None:
    """Know ``scheme`` from now on, in this process. Raises ``ConfigError`` where it is built in or not a scheme."""
    if scheme in SCHEMES or not _SCHEME_NAME.fullmatch(scheme):
        raise ConfigError("scheme", f"{scheme!r} is built in, or not a scheme: use lower-case letters and digits")
    _added.add(scheme)


def join_url(url: str | os.PathLike[str], *names: str) -> str:
    """The path or URL of what lies below ``url``; query parameters stay at the end."""
    head, mark, query = _before_query(os.fsdecode(url))
    head = head if head.endswith("://") else head.rstrip("/") + "/"
    return head + "/".join(names) + mark + query


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """What ``join_url`` has joined: the place of the last folder, and its name.

    Above a whole bucket lies ``s3://``, which no store opens.
    """
    head, mark, query = _before_query(os.fsdecode(url))
    if head.endswith("://"):
        return head + mark + query, ""
    parent, slash, name = head.rstrip("/").rpartition("/")
    if parent.endswith(":/"):
        parent += slash
    elif not parent:
        parent = "/" if head.startswith("/") else "."
    return parent + mark + query, name


def name_below(url: str, place: str) -> str | None:
    """The names, joined by slashes, that lead from ``url`` to ``place`` below it; None where ``place`` is elsewhere."""
    (head, _, query), (place_head, _, place_query) = _before_query(url), _before_query(place)
    above = head if head.endswith("://") else head.rstrip("/") + "/"
    if query != place_query or not place_head.startswith(above):
        return None
    return place_head[len(above) :].strip("/") or None


def folder_name(url: str) -> str:
    """The name of the last folder of a path or URL."""
    return split_url(url)[1]


def shown_url(url: str) -> str:
    """``url`` as a message may show it: without the keys and parameters that a bucket's URL may have."""
    return without_keys(url)


def _before_query(text: str) -> tuple[str, str, str]:
    """``text`` parted at the ``?`` before its parameters; a path has none: a question mark in it is part of a name."""
    return text.partition("?") if url_scheme(text) in BUCKETS else (text, "", "")


def require_key(key: str, *, url: str, sibling: bool = False) -> str:
    """Return ``key`` when it names an object inside the root.

    With ``sibling`` it may also start with one ``../`` and the name of a sibling folder.
    Raises ``StoreError`` for every other key: the root itself, absolute keys, keys that climb out.
    """
    names = key.split("/")
    if sibling and len(names) > 2 and names[0] == "..":
        names = names[1:]
    if any(name in ("", ".", "..") for name in names) or "\0" in key:
        raise StoreError(f"not a key: {key!r}; keys are relative, use single slashes and stay inside the root", url=url)
    return key


def require_prefix(prefix: str, *, url: str) -> str:
    """Return ``prefix`` without a trailing slash when it names a folder inside the root; "" is the root."""
    stripped = prefix.removesuffix("/")
    return require_key(stripped, url=url) if prefix else ""
