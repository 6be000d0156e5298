"""The place of a checkpoint, as the user says it: one rule for every door through which a place comes in."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from urllib.parse import unquote

from ray_dcp.errors import ConfigError, NoCheckpointIdError
from ray_dcp.store.location.urls import BUCKETS, BucketUrl, shown_url, url_scheme

Place = str | os.PathLike[str]
_UNSET = "is it an unset variable?"
_MEANT_OTHERWISE = re.compile(r"~|(?:.*\W)?(?:s3[an]?|gc?s|file|memory|hdfs|https?|abfss?|az|wasbs?):")
"""Names of folders that nobody makes on purpose: what becomes of a URL or ``~`` that went through ``os.path``."""


def absolute(place: Place | bytes, *, setting: str = "checkpoint_id") -> str:
    """``place`` as an absolute path or a URL: the same in every process of a cluster, whatever its working directory.

    ``~`` is the home of this process's user; ``file://`` URLs become paths. A path is taken as it is: ``?``, ``#``,
    ``%`` and spaces are parts of names; so they are in a bucket's URL, but for the ``?`` in front of its parameters.
    Calling it again changes nothing.

    Raises ``ConfigError`` naming ``setting``, and ``UnknownSchemeError``, for what would be written somewhere else than
    it says: an empty place, a URL that was made a ``pathlib.Path`` or joined to a path, an unknown scheme.
    """
    text = _text(place, setting)
    scheme = url_scheme(text)
    if scheme is None:
        return _absolute_path(text, setting)
    if scheme == "file":
        return _file_path(text, setting)
    if scheme in BUCKETS:
        return str(BucketUrl.parse(text))
    return text


def foreign(place: object) -> str:
    """``place`` made absolute for storage of the user's, which may know schemes and kinds of places of its own."""
    text = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else str(place)
    return text if "://" in text or not text else os.path.abspath(text)


def _text(place: object, setting: str) -> str:
    if place is None:
        raise ConfigError(setting, f"is None; pass a path or a URL ({_UNSET})")
    if not isinstance(place, str | bytes | os.PathLike):
        raise ConfigError(setting, f"is a {type(place).__name__}; pass a path or a URL")
    text = os.fsdecode(place)
    if isinstance(place, PurePath) and text == ".":
        raise ConfigError(
            setting, f'is Path("."), which Path("") is too ({_UNSET}); pass "." for the working directory'
        )
    if not text.strip():
        raise NoCheckpointIdError(setting, f"is empty; pass a path or a URL ({_UNSET})")
    if "\0" in text:
        raise ConfigError(setting, f"has a NUL character in it: {text!r}")
    return text


def _absolute_path(text: str, setting: str) -> str:
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = text.partition("/")[0]
        raise ConfigError(setting, f"{user}: no such user here; a folder of that name is written ./{text}")
    try:
        path = os.path.abspath(path)
    except FileNotFoundError:
        raise ConfigError(setting, f"{text} is relative, and the working directory is gone") from None
    _require_meant(path, setting)
    return path


def _require_meant(path: str, setting: str) -> None:
    names = path.split("/")
    for number, name in enumerate(names):
        # One that is there may be what an earlier program left: it can be listed, copied and removed.
        if _MEANT_OTHERWISE.fullmatch(name) and not os.path.lexists("/".join(names[: number + 1])):
            raise ConfigError(
                setting,
                f"{path} would make a folder {name!r}. A URL is passed as str, and joined to nothing in front of it; "
                "~ stands at the beginning only. If you mean such a folder, make it first",
            )


def _file_path(url: str, setting: str) -> str:
    host, _, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost") or not path.strip("/"):
        raise ConfigError(
            setting, f"a file URL is file:///folder, this one names no local folder: {shown_url(url)} (no ~ either)"
        )
    if "?" in path or "#" in path:
        raise ConfigError(setting, f"a file URL has no parameters: {url} (a ? in a name is %3F, a # is %23)")
    path = os.path.abspath("/" + unquote(path, errors="surrogateescape"))
    _require_meant(path, setting)
    return path
