"""What the operating system has said, on errors of this package that are an ``OSError`` as well.

``OSError`` itself has ``errno``, ``strerror`` and ``filename`` only where it is made with them in place of a message.
"""

from __future__ import annotations

import errno
import os
from typing import Any

_OF_KIND = {
    FileNotFoundError: (errno.ENOENT,),
    PermissionError: (errno.EACCES, errno.EPERM),
    NotADirectoryError: (errno.ENOTDIR,),
}
"""The numbers that an error of each kind may have; it has the first one where nothing says more."""


def system_facts(error: BaseException) -> tuple[int | None, str | None]:
    """The number and text of the system error that ``error`` was raised from, else of its kind; None where unknown."""
    kept: tuple[int | None, str | None] | None = vars(error).get("_system_facts")
    if kept is not None:
        return kept
    number, text = _facts_of_cause(error)
    allowed = next((numbers for kind, numbers in _OF_KIND.items() if isinstance(error, kind)), None)
    if allowed is not None and number not in allowed:
        return allowed[0], os.strerror(allowed[0])
    return number, text


def behind(error: BaseException) -> BaseException | None:
    """What ``error`` was raised from; where Ray has raised it, the original. None where there is nothing behind it."""
    return error.__cause__ if error.__cause__ is not None else vars(error).get("cause")


def _facts_of_cause(error: BaseException) -> tuple[int | None, str | None]:
    cause = behind(error)
    return (cause.errno, cause.strerror) if isinstance(cause, OSError) else (None, None)


def _errno(error: Any) -> int | None:
    return system_facts(error)[0]


def _strerror(error: Any) -> str | None:
    return system_facts(error)[1]


class SystemFacts:
    """``errno`` and ``strerror`` of an error that is an ``OSError`` as well, and has a ``filename`` of its own."""

    errno: Any = property(_errno, doc="The number of the system error behind it; else that of its kind.")
    strerror: Any = property(_strerror, doc="The operating system's text for that number.")

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: Any = super().__reduce__()
        rebuild, (kind, args, facts) = reduced
        error: Any = self
        if behind(error) is None:
            return rebuild, (kind, args, facts)
        return rebuild, (kind, args, {**facts, "_system_facts": system_facts(error)})  # the cause does not travel
