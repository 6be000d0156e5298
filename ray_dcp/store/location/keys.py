"""What a key may look like: the same rules in every store."""

from __future__ import annotations

from ray_dcp.errors import StoreError


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
