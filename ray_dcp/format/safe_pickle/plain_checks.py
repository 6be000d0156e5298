"""The one way in which a stored value is refused."""

from __future__ import annotations


class RefusedValueError(ValueError):
    """A file passes something to a plain class that no pickle of a plain value does."""


def require(allowed: bool) -> None:
    if not allowed:
        raise RefusedValueError("what is passed to it is none of its values")
